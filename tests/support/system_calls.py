"""What a process asks of the kernel below one directory: numbered, logged, and failing where a test wants.

`FaultyStorage` stands above a storage; this stands below it, so that the storage's own code is what is tried.
Linux only, and for tests alone: functions of `os`, `io` and `fcntl` are replaced while it is entered, in this
process and in what it forks. Code that imported one of those functions by name is not seen, and neither is
what C code writes without asking Python.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from pathlib import Path
from threading import local
from typing import Any, Final, Self, final

from ckpt_core.storage.local import _paths
from ckpt_core.testing import Fault, Operation
from ckpt_core.testing._faults import Script
from tests.support.watched_file import open_watched

# Function of `os` -> what the operation is called.
_BY_PATH: Final = {
    "mkdir": "mkdir",
    "rmdir": "rmdir",
    "unlink": "unlink",
    "remove": "unlink",
    "truncate": "truncate",
    "scandir": "list",
    "listdir": "list",
    "statvfs": "statvfs",
}
_BY_PATHS: Final = {"rename": "rename", "replace": "rename", "link": "link"}
_BY_DESCRIPTOR: Final = {
    "fsync": "fsync",
    "fdatasync": "fsync",
    "ftruncate": "truncate",
    "posix_fallocate": "allocate",
    "read": "read",
    "pread": "read",
    "preadv": "read",
}
_WRITES: Final = {"write": "write", "pwrite": "write"}
_LOCKS: Final = ("lockf", "flock")

CHANGING: Final = frozenset(
    {
        "create",
        "write",
        "truncate",
        "allocate",
        "fsync",
        "mkdir",
        "rmdir",
        "unlink",
        "link",
        "symlink",
        "rename",
        "exchange",
        "lock",
    }
)
"""Methods after which something below the directory, or its durability, may be other than before."""

_RENAME_EXCHANGE: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortWrite(Fault):
    """A write that takes at most so many bytes."""

    short_bytes: int


@final
class SystemCalls:
    """Watches what this process does below `root` while it is entered as a context.

    An operation's method is one of `CHANGING`, or `open` (of a file that is there), `read`, `list`,
    `statvfs`. Its key is the path relative to `root`, "" for `root` itself; of two paths `source -> target`,
    of two that change places `first <-> second`. A file without a name has the key `#<inode number>`.

    Concurrency: operations of all threads are seen. What the functions of a fault do themselves is not.
    """

    def __init__(self, root: str | os.PathLike[str], faults: Sequence[Fault] = ()) -> None:
        self._root = os.path.realpath(root)
        self._script = Script(faults)
        self._in_fault = local()
        self._stack = ExitStack()

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What was asked so far, faults included, in order."""
        return self._script.operations

    def inject(self, faults: Sequence[Fault]) -> None:
        """From now on these faults and no others, each counted from 0; with `()` all is well again."""
        self._script.inject(faults)

    def __enter__(self) -> Self:
        for name, method in _BY_PATH.items():
            self._replace(os, name, partial(self._by_path, method))
        for name, method in _BY_PATHS.items():
            self._replace(os, name, partial(self._by_paths, method))
        for name, method in _BY_DESCRIPTOR.items():
            self._replace(os, name, partial(self._by_descriptor, method))
        for name, method in _WRITES.items():
            self._replace(os, name, partial(self._write, method))
        for name in _LOCKS:
            self._replace(fcntl, name, partial(self._by_descriptor, "lock"))
        self._replace(os, "symlink", self._symlink)
        self._replace(os, "open", self._open)
        self._replace(io, "open", self._open_file)
        self._replace(builtins, "open", self._open_file)
        self._replace(_paths, "_in_one_step", self._in_one_step)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @contextmanager
    def operation(self, method: str, key: str, paths: Sequence[Any] = ()) -> Generator[int | None]:
        """Log an operation and apply its faults around the block; gives how many bytes a write may take."""
        with ExitStack() as stack:
            with self._unseen():
                try:
                    due = stack.enter_context(self._script.operation(method, key))
                except OSError as error:
                    raise _as_of_the_kernel(error, paths) from None
            yield min((fault.short_bytes for fault in due if isinstance(fault, ShortWrite)), default=None)
            with self._unseen():
                stack.close()

    def watches(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The key of what is to be logged, by its path or an open descriptor; None for everything else."""
        if getattr(self._in_fault, "value", False):
            return None
        where = self._absolute(path, dir_fd)
        if where == self._root:
            return ""
        return where[len(self._root) + 1 :] if where.startswith(self._root + "/") else None

    def write_some(self, descriptor: int, content: Any, write: Callable[[Any], int]) -> int:
        """Write by `write`, which takes the content, or as much of it as a fault allows."""
        key = self.watches(descriptor)
        if key is None:
            return write(content)
        with self.operation("write", key) as short:
            if short is None:
                return write(content)
            with _undirected(descriptor):
                return write(memoryview(content).cast("B")[:short])

    def _replace(self, module: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Until the context ends, calls of a function go to `wrapper`, with the real one first."""
        real = getattr(module, name, None)
        if real is not None:
            self._stack.callback(setattr, module, name, real)
            setattr(module, name, _standing_for(real, wrapper))

    @contextmanager
    def _unseen(self) -> Generator[None]:
        outer = getattr(self._in_fault, "value", False)
        self._in_fault.value = True
        try:
            yield
        finally:
            self._in_fault.value = outer

    def _absolute(self, path: Any, dir_fd: int | None) -> str:
        if isinstance(path, int):
            # The kernel knows where a file is now, whatever was renamed since it was opened.
            return str(Path(f"/proc/self/fd/{path}").readlink()).removesuffix(" (deleted)")
        name = os.fsdecode(path)
        if dir_fd is not None:
            name = os.path.join(self._absolute(dir_fd, None), name)  # noqa: PTH118 - a Path would ask the kernel
        folder, last = os.path.split(os.path.abspath(name))  # noqa: PTH100 - as above
        return os.path.join(os.path.realpath(folder), last)  # noqa: PTH118 - as above

    def _by_path(self, method: str, real: Any, path: Any = ".", *rest: Any, **options: Any) -> Any:
        key = self.watches(path, options.get("dir_fd"))
        if key is None:
            return real(path, *rest, **options)
        with self.operation(method, key, [path]):
            return real(path, *rest, **options)

    def _by_paths(self, method: str, real: Any, source: Any, target: Any, **options: Any) -> Any:
        first = self.watches(source, options.get("src_dir_fd"))
        second = self.watches(target, options.get("dst_dir_fd"))
        if first is None and second is None:
            return real(source, target, **options)
        key = f"{os.fsdecode(source) if first is None else first} -> "
        key += os.fsdecode(target) if second is None else second
        with self.operation(method, key, [source, target]):
            return real(source, target, **options)

    def _symlink(self, real: Any, source: Any, target: Any, *rest: Any, **options: Any) -> Any:
        key = self.watches(target, options.get("dir_fd"))
        if key is None:
            return real(source, target, *rest, **options)
        with self.operation("symlink", key, [source, target]):
            return real(source, target, *rest, **options)

    def _by_descriptor(self, method: str, real: Any, file: Any, *rest: Any, **options: Any) -> Any:
        key = self.watches(file if isinstance(file, int) else file.fileno())
        if key is None:
            return real(file, *rest, **options)
        with self.operation(method, key):
            return real(file, *rest, **options)

    def _write(self, _method: str, real: Any, descriptor: int, content: Any, *rest: Any) -> Any:
        return self.write_some(descriptor, content, lambda part: real(descriptor, part, *rest))

    def _open(self, real: Any, path: Any, flags: int, *rest: Any, **options: Any) -> Any:
        # A descriptor of a place only opens nothing, as the lookup of a path does not.
        is_lookup = flags & os.O_PATH
        key = None if is_lookup else self.watches(path, options.get("dir_fd"))
        if key is None:
            return real(path, flags, *rest, **options)
        creates = flags & (os.O_CREAT | os.O_TRUNC) or flags & os.O_TMPFILE == os.O_TMPFILE
        with self.operation("create" if creates else "open", key, [path]):
            return real(path, flags, *rest, **options)

    def _open_file(self, real: Any, file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        key = None if isinstance(file, int) else self.watches(file)
        if key is None:
            return real(file, mode, *rest, **options)
        return open_watched(self, key, file, mode, *rest, **options)

    def _in_one_step(self, real: Any, source: Path, target: Path, flags: int) -> int:
        first, second = self.watches(source), self.watches(target)
        if first is None or second is None or _paths._renameat2 is None:
            return int(real(source, target, flags))
        method, sign = ("exchange", "<->") if flags == _RENAME_EXCHANGE else ("rename", "->")
        try:
            with self.operation(method, f"{first} {sign} {second}"):
                number = int(real(source, target, flags))
                if number:
                    raise OSError(number, os.strerror(number))
        except OSError as error:
            return error.errno or errno.EIO
        return 0


def _as_of_the_kernel(error: OSError, paths: Sequence[Any]) -> OSError:
    """The error as if it had just happened to these paths: an instance of its own for every thread."""
    if error.errno is None or error.filename is not None:
        return error
    names = [os.fsdecode(path) for path in paths if not isinstance(path, int)]
    first, second = (*names, None, None)[:2]
    return OSError(error.errno, error.strerror, first, None, second)


def _standing_for(real: Any, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def function(*arguments: Any, **options: Any) -> Any:
        return wrapper(real, *arguments, **options)

    return update_wrapper(function, real)


@contextmanager
def _undirected(descriptor: int) -> Generator[None]:
    """A direct write takes whole blocks only, yet may end early anywhere: then it goes by the page cache."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
