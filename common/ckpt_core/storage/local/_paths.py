"""Names below a root, accessed relative to open directories, never through links.

A system call resolves a path from its start, and a user with write access to a directory on the way can put a
link there between two calls: then the checked file is not the one written or deleted. An open directory
cannot be exchanged. The path of the root itself is given by the user: links in it are followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, Self, cast, final

from ckpt_core.storage._small import ForeignFileError
from ckpt_core.storage.local._posix import make_directories, sync_directory

# On Linux, O_PATH opens a directory without the permission to read it.
_PASSING: Final = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)
_LISTING: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY
# Errors of opening a link or a file as a directory.
_NO_DIRECTORY: Final = {errno.ENOTDIR, errno.ELOOP, errno.EMLINK}


class LinkInTheWayError(ForeignFileError):
    """A symbolic link is where a directory or a file is expected."""


@final
@dataclass(frozen=True, slots=True)
class PathAt:
    """A name in an open directory, existing or not; the arguments of `openat(2)`.

    Attributes:
        directory: descriptor of the directory, for `dir_fd`.
        name: one component.
        path: the whole path, for messages.
    """

    directory: int
    name: str
    path: Path

    def beside(self, name: str) -> PathAt:
        """Return another name in the same directory."""
        return replace(self, name=name, path=self.path.with_name(name))

    @contextmanager
    def errors(self) -> Generator[Self]:
        """Add the whole path to OS errors of the block; give links an error of their own."""
        try:
            yield self
        except OSError as error:
            raise _explained(error, self.path) from None

    def status(self) -> os.stat_result:
        """Return the status of the entry, of a link itself."""
        with self.errors():
            return os.stat(self.name, dir_fd=self.directory, follow_symlinks=False)

    def open_descriptor(self, flags: int, mode: int = 0o666) -> int:
        """Open the entry as `os.open` does, but never through a link."""
        with self.errors():
            return os.open(self.name, flags | os.O_NOFOLLOW, mode, dir_fd=self.directory)

    def open_existing(self, flags: int) -> int:
        """Open a file or directory; never blocks on a pipe.

        Raises:
            LinkInTheWayError: it is a link.
            ForeignFileError: it is a pipe, a socket or a device.
        """
        try:
            descriptor = self.open_descriptor(flags | os.O_NONBLOCK)
        except BlockingIOError:
            return self.open_descriptor(flags)  # a regular file under a lease of a file server
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise _special_file(self.path) from error
            raise
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            os.set_blocking(descriptor, True)
            return descriptor
        os.close(descriptor)
        raise _special_file(self.path)

    def create_stream(self, *, buffering: int = -1) -> IO[bytes]:
        """Create a file for writing.

        Raises:
            FileExistsError: the name exists already.
        """
        # The path is the stream's name only.
        return _stream(self.path, "xb", buffering, self.open_descriptor)

    def read_stream(self, *, buffering: int = -1) -> IO[bytes]:
        """Open a file for reading; same errors as `open_existing`."""
        return _stream(self.path, "rb", buffering, self.open_existing)

    def update_stream(self) -> IO[bytes]:
        """Open a file for writing over its content; same errors as `open_existing`."""
        return _stream(self.path, "r+b", -1, self.open_existing)

    def make_directory(self) -> None:
        """Create a directory; `sync` makes its name durable."""
        with self.errors():
            os.mkdir(self.name, dir_fd=self.directory)

    def sync(self) -> None:
        """Fsync the directory that contains the name."""
        with self.errors():
            sync_directory(".", dir_fd=self.directory)

    def sync_as_directory(self) -> None:
        """Fsync the directory of that name."""
        with self.errors():
            sync_directory(self.name, dir_fd=self.directory)

    def replace_by(self, draft: PathAt) -> None:
        """Rename another file onto this name."""
        with self.errors():
            os.replace(draft.name, self.name, src_dir_fd=draft.directory, dst_dir_fd=self.directory)

    def delete(self) -> None:
        """Delete a file, a link (not its target) or a directory; no-op if absent."""
        with suppress(FileNotFoundError):
            inner = self._open_listing()
            if inner is None:
                with self.errors():
                    os.unlink(self.name, dir_fd=self.directory)
                return
            try:
                with os.scandir(inner) as children:
                    names = [child.name for child in children]
                for name in names:
                    PathAt(inner, name, self.path / name).delete()
            finally:
                os.close(inner)
            with self.errors():
                os.rmdir(self.name, dir_fd=self.directory)

    def _open_listing(self) -> int | None:
        """Open the directory of that name; None if it is something else."""
        try:
            return os.open(self.name, _LISTING, dir_fd=self.directory)
        except OSError as error:
            if error.errno in _NO_DIRECTORY:
                return None
            raise _explained(error, self.path) from None


@contextmanager
def path_below(root: Path, parts: Sequence[str], *, make: bool = False) -> Generator[PathAt]:
    """Open the parent directory of a path; with `make`, create missing directories.

    Raises:
        FileNotFoundError: a directory on the way is missing.
        LinkInTheWayError: a link is on the way.
        NotADirectoryError: a file is on the way.
    """
    directory = _descend(root, parts[:-1], make=make)
    try:
        yield PathAt(directory, parts[-1], root.joinpath(*parts))
    finally:
        os.close(directory)


def _stream(path: Path, mode: str, buffering: int, open_name: Callable[[int], int]) -> IO[bytes]:
    return cast("IO[bytes]", open(path, mode, buffering, opener=lambda _, flags: open_name(flags)))


def _special_file(path: Path) -> ForeignFileError:
    message = "not a regular file but a pipe, socket or device, which no checkpoint has; remove it"
    return ForeignFileError(errno.EACCES, message, str(path))


def _descend(root: Path, parts: Sequence[str], *, make: bool) -> int:
    if not parts:
        return _open_root(root, make=make)
    here = root / parts[0]
    descriptor = _enter(here, None, make=make)
    for part in parts[1:]:
        outer, here = descriptor, here / part
        try:
            descriptor = _enter(here, outer, make=make)
        finally:
            os.close(outer)
    return descriptor


def _open_root(root: Path, *, make: bool) -> int:
    flags = _PASSING & ~os.O_NOFOLLOW
    try:
        return os.open(root, flags)
    except FileNotFoundError:
        if not make:
            raise
    make_directories(root)
    return os.open(root, flags)


def _enter(here: Path, outer: int | None, *, make: bool) -> int:
    """Open a directory in `outer`; without it, directly in the root.

    Links in the path of the root are followed.
    """
    name = here if outer is None else here.name
    try:
        try:
            return os.open(name, _PASSING, dir_fd=outer)
        except FileNotFoundError:
            if not make:
                raise
        if outer is None:
            make_directories(here.parent)
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=outer)
        sync_directory(here.parent if outer is None else ".", dir_fd=outer)
        return os.open(name, _PASSING, dir_fd=outer)
    except OSError as error:
        raise _explained(error, here) from None


def _explained(error: OSError, path: Path) -> OSError:
    """Add the whole path to the error, or return the error for a link."""
    if error.errno in _NO_DIRECTORY and path.is_symlink():
        message = (
            "a symbolic link is in the way, and none below the checkpoint root is followed here; move it "
            "away, and if you did not put it there, find out who did"
        )
        return LinkInTheWayError(errno.EACCES, message, str(path))
    error.filename = str(path)
    return error
