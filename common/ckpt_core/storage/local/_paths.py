"""Files and directories by their paths: links, durability, single steps.

Links in the path of a root are the user's, and are followed. Below it only reads follow links, and only where
they stay inside: a checkpoint from elsewhere may contain any link.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import signal
import stat
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, cast, final

from ckpt_core.names import OWN, aside_name
from ckpt_core.storage._base import ForeignFileError, ends_early

_UNSUPPORTED: Final = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_AT_FDCWD: Final = -100
_NOREPLACE: Final = 1
_EXCHANGE: Final = 2
_ON_ERROR: Final = "onexc" if sys.version_info >= (3, 12) else "onerror"  # 3.14 drops this one
_POPULATE_READ: Final = 22  # since Linux 5.14; Python's mmap does not know it
_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_renameat2 = getattr(_libc, "renameat2", None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def path_below(root: Path, parts: Sequence[str]) -> Path:
    """Return the path of a name; ForeignFileError if a link below the root is on it."""
    here = root
    for part in parts[:-1]:
        here = here / part
        if here.is_symlink():
            raise _link_in_the_way(here)
    return root.joinpath(*parts)


def open_regular(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open as `os.open` does; ForeignFileError for a link, pipe, socket or device."""
    with suppress(FileNotFoundError):
        kind = path.lstat().st_mode
        if stat.S_ISLNK(kind):
            raise _link_in_the_way(path)
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            message = "not a regular file but a pipe, socket or device, which no checkpoint has; remove it"
            raise ForeignFileError(errno.EACCES, message, str(path))
    return os.open(path, flags | os.O_NOFOLLOW, mode)


def open_inside(root: Path, parts: Sequence[str], *, buffering: int = -1) -> IO[bytes]:
    """Open a file below the root for reading; follow links only inside the root.

    ForeignFileError if a link on the way leads out of the root (the root itself may be a link), or the entry
    is neither a file nor a directory.
    """
    path = root.joinpath(*parts)
    # `Path.resolve` has no OSError for loops of links.
    real_root, real = Path(os.path.realpath(root)), Path(os.path.realpath(path))
    if real.is_symlink():
        raise FileNotFoundError(errno.ENOENT, "a symbolic link in a loop", str(real))
    if not real.is_relative_to(real_root):
        steps = (root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1))
        link = next(step for step in steps if not Path(os.path.realpath(step)).is_relative_to(real_root))
        message = (
            f"a symbolic link in the way of {'/'.join(parts)!r} leads out of the checkpoint root, to "
            f"{os.path.realpath(link)}; if that is intended, put the files themselves here, or use their "
            "directory as the root"
        )
        raise ForeignFileError(errno.EACCES, message, str(link))
    return open(path, "rb", buffering, opener=lambda _, flags: open_regular(real, flags))


@contextmanager
def open_local_ranges(root: Path, parts: Sequence[str]) -> Generator[LocalRanges]:
    with open_inside(root, parts, buffering=0) as file:
        # Reads by several threads look random. With this hint the kernel reads ahead, 1.3 times as fast from
        # a cold disk.
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield LocalRanges(file.fileno(), str(root.joinpath(*parts)))


@final
class LocalRanges:
    """Ranges of an open file, by `preadv`: no shared position, without the GIL."""

    def __init__(self, descriptor: int, where: str) -> None:
        self._descriptor = descriptor
        self._where = where
        self.size_bytes = os.fstat(descriptor).st_size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        while offset < end:
            try:
                count = os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                # The kernel knows a descriptor only; the reader of the error needs the name.
                error.filename = self._where
                raise
            if count == 0:
                raise ends_early(self._where, end, min(offset, os.fstat(self._descriptor).st_size))
            offset += count
            buffer = buffer[count:]

    @contextmanager
    def mapped(self, offset: int, size_bytes: int) -> Generator[memoryview | None]:
        """Lend bytes where they lie in the page cache; None if they must be read.

        To look at a page that is not there any more would end the process. So all are read first, which tells
        of a bad device, and a lease makes a process wait that would shorten the file (45 s, unless the system
        says otherwise). Network and FUSE filesystems, and files of other users, have no leases.
        """
        skew = offset % mmap.PAGESIZE
        length, start, own, view = skew + size_bytes, None, -1, None
        try:
            # AttributeError: a system without leases.
            with suppress(OSError, AttributeError):
                # A lease is of an opened file: other threads have their own.
                own = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY)
                fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGURG)  # whose default is nothing, unlike SIGIO's
                fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                start = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, own, offset - skew)
                is_there = start != _FAILED and not _libc.madvise(start, length, _POPULATE_READ)
                if is_there and fcntl.fcntl(own, fcntl.F_GETLEASE) == fcntl.F_RDLCK:
                    pages = (ctypes.c_char * length).from_address(start)
                    view = memoryview(pages).cast("B").toreadonly()[skew:]
            yield view
        finally:
            if view is not None:
                view.release()
            if start not in {None, _FAILED}:
                _libc.munmap(start, length)
            if own != -1:
                with suppress(OSError):  # there may be none
                    fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_UNLCK)  # a forked child may keep the file
                os.close(own)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE filesystems refuse to fsync a directory; they keep names on the server.
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Make a directory and its parents durably; NotADirectoryError if one is a file."""
    missing: list[Path] = []
    nearest = path
    while not nearest.is_dir():
        missing.append(nearest)
        nearest = nearest.parent
    for directory in reversed(missing):
        try:
            directory.mkdir()
        except FileExistsError:
            if not directory.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file is in the way", str(directory)) from None
        if directory.name == OWN:
            with suppress(OSError):  # some filesystems have one mode for all
                root = directory.parent.stat()
                os.chown(directory, -1, root.st_gid)
                directory.chmod(stat.S_IMODE(root.st_mode))
        sync_directory(directory.parent)


def delete(path: Path) -> None:
    places: list[str] = []

    def tell_where(_function: object, place: str, _found: object) -> None:
        if isinstance(error := sys.exception(), OSError) and not isinstance(error, FileNotFoundError):
            places.append(place)  # since Python 3.13 the error comes again, with the path of its directory
            error.filename = places[0]
            raise error

    with suppress(FileNotFoundError, NotADirectoryError):  # a parent is a file: nothing has this name
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        try:
            cast("Any", shutil.rmtree)(path, **{_ON_ERROR: tell_where})
        except RecursionError:
            message = "directories are nested too deeply in it; delete it with `rm -r`"
            raise OSError(errno.ENAMETOOLONG, message, str(path)) from None


def rename_exclusively(source: Path, target: Path) -> None:
    """Rename onto a free name only; FileExistsError if it is not.

    `os.rename` would replace a file or an empty directory. Where the kernel or the filesystem cannot do
    better, one that appears meanwhile is replaced.
    """
    number = _in_one_step(source, target, _NOREPLACE)
    if number in _UNSUPPORTED:
        number = errno.EEXIST if os.path.lexists(target) else 0
        if not number:
            source.rename(target)
    if number:
        raise OSError(number, os.strerror(number), str(source), None, str(target))


def exchange(first: Path, second: Path) -> None:
    """Exchange two names in one step; in three renames where that is not supported.

    A crash between the three leaves the old `second` under a name that `set_aside` recognises.
    """
    number = _in_one_step(first, second, _EXCHANGE)
    if number in _UNSUPPORTED:
        aside = second.with_name(aside_name(second.name, secrets.token_hex(4)))
        # Each is durable before the next: if a power cut kept only the last, `second` would not exist.
        second.rename(aside)
        sync_directory(second.parent)
        first.rename(second)
        sync_directory(second.parent)
        aside.rename(first)
    elif number:
        raise OSError(number, os.strerror(number), str(first), None, str(second))


def _in_one_step(source: Path, target: Path, flags: int) -> int:
    """Return the error number of `renameat2`, 0 for success."""
    if _renameat2 is None:
        return errno.ENOSYS
    failed = _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags)
    return ctypes.get_errno() if failed else 0


def _link_in_the_way(path: Path) -> ForeignFileError:
    message = (
        "a symbolic link is in the way, and none below the checkpoint root is followed here; move it away, "
        "and if you did not put it there, find out who did"
    )
    return ForeignFileError(errno.EACCES, message, str(path))
