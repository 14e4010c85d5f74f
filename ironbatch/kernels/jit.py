"""How kernels are compiled, and where the compiled code is kept.

`kernel` marks an entry point: it is compiled for one explicit signature when its module is imported, so that "imported"
means "ready". `inline` marks a helper that only kernels call.

numba's cache has three faults that matter to a server, and this module deals with them (numba 0.68):

* it does not notice that an imported helper changed: the directory's name holds a hash of all kernel sources;
* code compiled with NUMBA_BOUNDSCHECK=1 and without share their files: the setting is part of the hash;
* a truncated file raises at import: the directory is emptied and the kernel compiled again, and if that fails too it is
  compiled without a cache. So it is when the directory cannot be written, for then numba would quietly keep the code
  beside the sources, where neither of the above is dealt with.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import njit, types
from numba.core.errors import NumbaError

_log = logging.getLogger("ironbatch.jit")

CACHE_VARIABLE = "IRONBATCH_CACHE_DIR"

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


def _can_write(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as problem:
        _log.warning("the kernels are compiled anew at each start, since their cache cannot be written: %s", problem)
        return False
    return True


def is_compiled(module: str) -> bool:
    """Whether the cache has code of a kernel module, such as `ironbatch.kernels.plan`."""
    return any(_directory.rglob(f"{module.rpartition('.')[2]}.*.nbi"))


_directory = cache_directory()
_is_cached = _can_write(_directory)
numba.config.CACHE_DIR = str(_directory)


def kernel(signature: str) -> Callable[[F], F]:
    """Compile the decorated function for `signature` now, from the cache if it can be used.

    Raises:
        NumbaError: the function itself does not compile (a bug).
    """

    def decorate(function: F) -> F:
        return entry_point(_compile(signature, function))

    return decorate


def _compile(signature: str, function: Callable[..., Any]) -> Any:
    for attempt in ("cached", "cached, after the cache was emptied") if _is_cached else ():
        try:
            return njit(signature, cache=True, **_KERNEL)(function)
        except NumbaError:
            raise
        except Exception as problem:
            _log.warning("kernel %s, %s: %s: %s", function.__name__, attempt, type(problem).__name__, problem)
            shutil.rmtree(_directory, ignore_errors=True)
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
