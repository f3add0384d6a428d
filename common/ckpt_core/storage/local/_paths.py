"""Names below a root, reached through open directories and never through a link.

Every system call looks a path up from its start, and whoever may write into a directory on the way can put a
link there between two calls: then what was checked is not what is written or deleted. An open directory stays
what it is. The path of the root itself is the user's word: links in it are followed.
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

# Linux opens a directory as a place only, which needs no right to read it.
_PASSING: Final = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)
_LISTING: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY
# What systems answer where a directory was asked for and a link or a file is there.
_NO_DIRECTORY: Final = {errno.ENOTDIR, errno.ELOOP, errno.EMLINK}


class LinkInTheWayError(ForeignFileError):
    """A symbolic link is where a directory or a file is expected."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """A name in an open directory, which may or may not exist.

    Attributes:
        directory: its descriptor, for `dir_fd`.
        name: one component.
        path: the whole of it, for people.
    """

    directory: int
    name: str
    path: Path

    def beside(self, name: str) -> Place:
        """Another name in the same directory."""
        return replace(self, name=name, path=self.path.with_name(name))

    @contextmanager
    def errors(self) -> Generator[Self]:
        """Give OS errors of the block the whole path, and links an error of their own."""
        try:
            yield self
        except OSError as error:
            raise _explained(error, self.path) from None

    def status(self) -> os.stat_result:
        """Stat what is there, a link as a link."""
        with self.errors():
            return os.stat(self.name, dir_fd=self.directory, follow_symlinks=False)

    def open_descriptor(self, flags: int, mode: int = 0o666) -> int:
        """Open what is there as `os.open` does, but never through a link."""
        with self.errors():
            return os.open(self.name, flags | os.O_NOFOLLOW, mode, dir_fd=self.directory)

    def open_existing(self, flags: int) -> int:
        """Open a file or directory; nobody can make this wait for the other end of a pipe.

        Raises:
            LinkInTheWayError: it is a link.
            ForeignFileError: it is a pipe, a socket or a device.
        """
        try:
            descriptor = self.open_descriptor(flags | os.O_NONBLOCK)
        except BlockingIOError:
            return self.open_descriptor(flags)  # a regular file of which a file server holds a lease
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
            FileExistsError: there is something already.
        """
        # The path is the stream's name only.
        return _stream(self.path, "xb", buffering, self.open_descriptor)

    def read_stream(self, *, buffering: int = -1) -> IO[bytes]:
        """Open a file for reading; same errors as `open_existing`."""
        return _stream(self.path, "rb", buffering, self.open_existing)

    def make_directory(self) -> None:
        """Create a directory; `sync` makes its name durable."""
        with self.errors():
            os.mkdir(self.name, dir_fd=self.directory)

    def sync(self) -> None:
        """Fsync the directory that the name is in."""
        with self.errors():
            sync_directory(".", dir_fd=self.directory)

    def sync_as_directory(self) -> None:
        """Fsync the directory that has the name."""
        with self.errors():
            sync_directory(self.name, dir_fd=self.directory)

    def replace_by(self, draft: Place) -> None:
        """Take the content of another file, whose name ends."""
        with self.errors():
            os.replace(draft.name, self.name, src_dir_fd=draft.directory, dst_dir_fd=self.directory)

    def delete(self) -> None:
        """Delete a file, a link (not what it leads to) or a directory; what is gone already is fine."""
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
                    Place(inner, name, self.path / name).delete()
            finally:
                os.close(inner)
            with self.errors():
                os.rmdir(self.name, dir_fd=self.directory)

    def _open_listing(self) -> int | None:
        """The directory of that name, None if it is something else."""
        try:
            return os.open(self.name, _LISTING, dir_fd=self.directory)
        except OSError as error:
            if error.errno in _NO_DIRECTORY:
                return None
            raise _explained(error, self.path) from None


@contextmanager
def place_below(root: Path, parts: Sequence[str], *, make: bool = False) -> Generator[Place]:
    """Open the directory that the last of `parts` is a name in; with `make`, create what is missing of it.

    Raises:
        FileNotFoundError: a directory on the way is missing.
        LinkInTheWayError: a link is on the way.
        NotADirectoryError: a file is on the way.
    """
    directory = _descend(root, parts[:-1], make=make)
    try:
        yield Place(directory, parts[-1], root.joinpath(*parts))
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
    """Open a directory in `outer`, or directly in the root, whose path is followed."""
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
    """The same error with the whole path, or the one for a link."""
    if error.errno in _NO_DIRECTORY and path.is_symlink():
        message = (
            "a symbolic link is in the way, and none below the checkpoint root is followed here; if you did "
            "not put it there, ask who did: else move it away"
        )
        return LinkInTheWayError(errno.EACCES, message, str(path))
    error.filename = str(path)
    return error
