"""An output file that is either written whole or not at all."""

import contextlib
import os
import stat
from typing import Self


class WholeFile:
    """The place for one file at `path`.

    Opening it makes a temporary file beside the target, so that an unwritable place is known (OSError) before
    a long run and not after. Without a write, the target stays as it was.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._path = os.path.realpath(path)  # a link stays a link
        if os.path.lexists(self._path) and not stat.S_ISREG(os.stat(self._path).st_mode):
            raise OSError(f"{path} exists and is not a regular file")
        folder, name = os.path.split(self._path)
        self._temporary_path = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
        descriptor = os.open(self._temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._file = os.fdopen(descriptor, "wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported by `write`
            self._file.close()
        with contextlib.suppress(FileNotFoundError):  # `write` has moved it
            os.unlink(self._temporary_path)

    def write(self, content: bytes) -> None:
        """Put `content` at the path, whole. Raises OSError."""
        self._file.write(content)
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._temporary_path, self._path)
