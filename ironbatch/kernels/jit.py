"""How kernels are compiled, and where the compiled code is kept.

`kernel` marks an entry point: it is compiled for one explicit signature when its module is imported, so that "imported"
means "ready". `inline` marks a helper that only kernels call.

numba's cache has three faults that matter to a server, and this module deals with them (numba 0.68):

* it does not notice that an imported helper changed: the directory's name holds a hash of all kernel sources;
* code compiled with NUMBA_BOUNDSCHECK=1 and without share their files: the setting is part of the hash;
* a truncated file raises at import: the kernel's files are removed, and it is compiled again.

Where the directory cannot be written (read-only, full), the kernels are compiled without a cache, for then numba would
quietly keep the code beside the sources, where none of the above is dealt with. So they are where it is another user's:
whoever may write there decides what this process runs. Either is one warning, and a start that takes longer.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import njit, types
from numba.core.errors import NumbaError

_log = logging.getLogger("ironbatch.jit")

CACHE_VARIABLE = "IRONBATCH_CACHE_DIR"
PRIVATE = 0o700
ATTEMPTS = 3
"""To compile a kernel through the cache. Two processes that start together may meet the same damaged file."""

# Nobody calls these through C, nor the helpers from Python. Their wrappers would be a quarter of the time to compile.
_KERNEL = {"error_model": "numpy", "no_cfunc_wrapper": True}
_HELPER = {**_KERNEL, "no_cpython_wrapper": True}

F = TypeVar("F", bound=Callable[..., Any])


def source_digest() -> str:
    """A hash of everything that the compiled code depends on and that numba's own index does not look at."""
    here = Path(__file__).parent
    digest = hashlib.sha256(f"{numba.__version__} boundscheck={numba.config.BOUNDSCHECK}".encode())
    for path in sorted([*here.glob("*.py"), here.parent / "layout.py", here.parent / "limits.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_directory() -> Path:
    """$IRONBATCH_CACHE_DIR, else systemd's $CACHE_DIRECTORY, else the user's cache directory; one folder a digest."""
    base = os.environ.get(CACHE_VARIABLE) or os.environ.get("CACHE_DIRECTORY")
    if not base:
        home_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # left as it is without a home
        base = os.devnull if home_cache.startswith("~") else str(Path(home_cache) / "ironbatch")
    return Path(base) / f"kernels-{source_digest()}"


class KernelCache:
    """Where compiled kernels are kept, as long as it is of use.

    Args:
        directory: is made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._has_warned = False
        self.is_usable = True
        self.path = ""
        """The directory by its descriptor: who may rename what is above it can put no other in its place."""
        try:
            self.path = f"/proc/self/fd/{_opened_for_us_alone(directory)}"
            tempfile.TemporaryFile(dir=self.path).close()
        except OSError as problem:
            self.give_up(problem)

    def give_up(self, problem: OSError) -> None:
        """Go on without it: what is wrong will be wrong for the next kernel too."""
        self.is_usable = False
        reason = problem.strerror or problem
        self._warn(f"the kernels are compiled anew at each start: their cache {self._directory} is not used: {reason}")

    def repair(self, function: Callable[..., Any], problem: Exception) -> None:
        """Remove what it holds of a function: it cannot be read."""
        for path in Path(self.path).rglob(f"*.{function.__qualname__}-*"):
            path.unlink(missing_ok=True)
        kind = type(problem).__name__
        self._warn(f"the cache {self._directory} is damaged ({function.__name__}: {kind}); what is, is compiled anew")

    def has(self, module: str) -> bool:
        """Whether there is code of a kernel module, such as `ironbatch.kernels.plan`."""
        return self.is_usable and any(Path(self.path).rglob(f"{module.rpartition('.')[2]}.*.nbi"))

    def _warn(self, message: str) -> None:
        """Once: seventy kernels have one cache."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s", message)


def _opened_for_us_alone(directory: Path) -> int:
    """A descriptor of the directory; OSError says why it can't be had, or must not be used."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=PRIVATE)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        problem = f"it belongs to user {found.st_uid}, and this process is user {os.geteuid()}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others may write there (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        os.fchmod(descriptor, PRIVATE)
        return descriptor
    os.close(descriptor)
    raise PermissionError(
        errno.EPERM, f"{problem}, so the code in it need not be ours; remove it, or set {CACHE_VARIABLE} to another"
    )


def is_compiled(module: str) -> bool:
    """Whether the cache has code of a kernel module, such as `ironbatch.kernels.plan`."""
    return _cache.has(module)


_cache = KernelCache(cache_directory())
numba.config.CACHE_DIR = _cache.path


def kernel(signature: str) -> Callable[[F], F]:
    """Compile the decorated function for `signature` now, from the cache if it can be used.

    Raises:
        NumbaError: the function itself does not compile (a bug).
    """

    def decorate(function: F) -> F:
        return entry_point(_compile(signature, function))

    return decorate


def _compile(signature: str, function: Callable[..., Any]) -> Any:
    for _ in range(ATTEMPTS):
        if not _cache.is_usable:
            break
        try:
            return njit(signature, cache=True, **_KERNEL)(function)
        except NumbaError:
            raise
        except FileNotFoundError:  # another process has just repaired it
            continue
        except OSError as problem:
            _cache.give_up(problem)
        except Exception as problem:  # whatever unpickling nonsense may raise
            _cache.repair(function, problem)
    return njit(signature, **_KERNEL)(function)


def entry_point(dispatcher: Any) -> Any:
    """What Python calls. Where all arguments are integers it is the compiled code itself, in half a dispatcher's time.

    A dispatcher looks at the types of the arguments and chooses; here is nothing to choose. It stays where it is of
    use: before arrays, since the code itself would take one of another type that has the same size, and in the test leg
    with bounds checks.
    """
    (compiled,) = dispatcher.overloads.values()
    takes_integers = all(isinstance(argument, types.Integer) for argument in compiled.signature.args)
    if not takes_integers or numba.config.BOUNDSCHECK:
        return dispatcher
    _dispatchers[compiled.entry_point] = dispatcher
    return compiled.entry_point


def callable_in_kernels(kernel_function: Any) -> Any:
    """A kernel as another kernel may call it: numba knows its dispatcher only."""
    return _dispatchers.get(kernel_function, kernel_function)


_dispatchers: dict[Any, Any] = {}


def inline(function: F) -> F:
    """A helper that is compiled into each kernel that calls it."""
    return njit(forceinline=True, **_HELPER)(function)


def subroutine(function: F) -> F:
    """A helper for the rare path: compiled once a kernel, called rather than copied into it."""
    return njit(**_HELPER)(function)
