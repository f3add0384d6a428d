"""Several storages of the same files, read as one."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import IO, Any, NoReturn, TypeVar, final

from typing_extensions import override

from ckpt_core.storage._base import RangeReader, Space, Storage, StorageEntry

T = TypeVar("T")


class ReadOnlyStorage(Storage):
    """A storage to which nothing can be written."""

    def _refuse(self, *keys: Any, **_: Any) -> NoReturn:
        raise OSError(
            errno.EROFS, "this view of a storage cannot be written", "/".join((self.url, *keys[:1]))
        )

    check_root = create = replace = delete = make_directory = _refuse
    sync_directory = rename = exchange = try_lock = _refuse


@final
class LayeredStorage(ReadOnlyStorage):
    """Reads each file from the first storage that has it; nothing can be written.

    Args:
        first: the nearest storage, whose URL stands in messages.
        passed_over: key of a file -> how many storages not to ask for it, because it is damaged there.
    """

    def __init__(
        self, first: Storage, *others: Storage, passed_over: Mapping[str, int] | None = None
    ) -> None:
        self._layers = (first, *others)
        self._passed_over = dict(passed_over or {})
        self.supports_rename = first.supports_rename
        self.rereads_from_memory = all(layer.rereads_from_memory for layer in self._layers)
        self.reads_in_place = all(each.rereads_from_memory or each.reads_in_place for each in self._layers)

    @property
    @override
    def url(self) -> str:
        return self._layers[0].url

    @override
    def open(self, key: str) -> AbstractContextManager[IO[bytes]]:
        return self._opened(key, lambda layer: layer.open(key))

    @contextmanager
    @override
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        with self._opened(key, lambda layer: layer.open_ranges(key)) as reader:
            yield reader

    @override
    def size(self, key: str) -> int:
        return self._first(key, lambda layer: layer.size(key))

    @override
    def list(self, key: str) -> list[StorageEntry]:
        found: dict[str, StorageEntry] = {}
        for place, layer in enumerate(self._layers):
            for entry in layer.list(key):
                child = f"{key}/{entry.name}" if key else entry.name
                if self._passed_over.get(child, 0) <= place:
                    found.setdefault(entry.name, entry)
        return sorted(found.values())

    @override
    def space(self) -> Space:
        return self._layers[0].space()

    @contextmanager
    def _opened(self, key: str, enter: Callable[[Storage], AbstractContextManager[T]]) -> Generator[T]:
        with ExitStack() as stack:
            yield self._first(key, lambda layer: stack.enter_context(enter(layer)))

    def _first(self, key: str, get: Callable[[Storage], T]) -> T:
        layers = self._layers[self._passed_over.get(key, 0) :]
        for layer in layers[:-1]:
            try:
                return get(layer)
            except (FileNotFoundError, NotADirectoryError):
                continue
        if layers:
            return get(layers[-1])
        raise FileNotFoundError(errno.ENOENT, "damaged or missing in every tier", f"{self.url}/{key}")
