"""What a checkpoint directory holds, before anything large is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ckpt_core.commit import Catalog
from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import ShardReader, entries, load_value
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, FileFailure
from ckpt_core.lifecycle._items import PICKLED, decode_items, pickled_key
from ckpt_core.lifecycle._local import LocalKey, read_local
from ckpt_core.names import MARKER, METADATA, SHARED, rank_name
from ckpt_core.storage import Storage
from ckpt_core.types import SavedState


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """An opened checkpoint: a reader and the metadata of every part, and everything small."""

    readers: Mapping[str, ShardReader]
    metadata: Mapping[str, Metadata]
    saved: SavedState
    local: Mapping[LocalKey, Any]


def open_checkpoint(
    storage: Storage, directory: str, coordinator: Coordinator, *, allow_pickle: bool
) -> Opened:
    """Open a checkpoint of ours, or a directory that stock DCP wrote.

    Raises:
        CheckpointNotFoundError: there is neither.
        CorruptCheckpointError: a file is damaged.
        UnsafeCheckpointError: it needs pickle and that was not allowed.
    """
    ours = storage.exists(f"{directory}/{MARKER}")
    manifest = Catalog(storage).manifest(directory) if ours else None
    readers = {part: ShardReader(storage, _join(directory, part)) for part in _parts(storage, directory)}
    if not readers:
        raise CheckpointNotFoundError(
            f"{storage.url}/{directory} holds neither a committed checkpoint ({MARKER}) "
            f"nor one that torch.distributed.checkpoint wrote ({METADATA})"
        )
    metadata = {part: reader.read_metadata() for part, reader in readers.items()}
    for part, reader in readers.items():
        reader.set_up_storage_reader(metadata[part], is_coordinator=False)
    items = _Items(storage, directory, readers.get(""), metadata.get(""), allow_pickle=allow_pickle)
    saved = SavedState(
        sharded={
            part: {path: entry for path, entry in entries(of_part).items() if path[0] != PICKLED}
            for part, of_part in metadata.items()
        },
        per_rank=items.read(rank_name(coordinator.rank)),
        shared=items.read(SHARED),
        world_size=None if manifest is None else manifest.world_size,
        step=None if manifest is None else manifest.step,
        name=directory,
    )
    same_ranks = saved.world_size == coordinator.world_size
    local = read_local(storage, directory, coordinator.rank) if same_ranks else {}
    return Opened(readers=readers, metadata=metadata, saved=saved, local=local)


def _parts(storage: Storage, directory: str) -> list[str]:
    children = storage.list(directory)
    own = [""] if any(child.name == METADATA for child in children) else []
    inner = [
        child.name
        for child in children
        if child.is_directory and storage.exists(f"{directory}/{child.name}/{METADATA}")
    ]
    return own + inner


def is_stock(storage: Storage, directory: str) -> bool:
    """Whether the directory, or one right below it, has DCP's metadata."""
    return bool(_parts(storage, directory))


class _Items:
    """Reads the small files, and behind them the values that only pickle could hold."""

    def __init__(
        self,
        storage: Storage,
        directory: str,
        reader: ShardReader | None,
        metadata: Metadata | None,
        *,
        allow_pickle: bool,
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._reader = reader
        self._metadata = metadata
        self._allow_pickle = allow_pickle

    def read(self, name: str) -> dict[str, Any]:
        path = f"{self._directory}/{name}"
        try:
            content = self._storage.read_bytes(path)
        except FileNotFoundError:
            return {}
        items = decode_items(content, path)
        scope = "shared" if name == SHARED else name
        return {**items.values, **{item: self._unpickle(scope, item) for item in items.pickled}}

    def _unpickle(self, scope: str, item: str) -> Any:
        key = f"{PICKLED}.{pickled_key(scope, item)}"
        if self._reader is None or self._metadata is None or key not in self._metadata.state_dict_metadata:
            failure = FileFailure(path=f"{self._directory}/{METADATA}", problem=f"lacks {key}")
            raise CorruptCheckpointError(str(failure), failures=(failure,))
        entry = load_value(self._reader.read_entry(MetadataIndex(key)), key, allow_pickle=False)
        return load_value(entry, f"item {item!r}", allow_pickle=self._allow_pickle)


def _join(directory: str, part: str) -> str:
    return f"{directory}/{part}" if part else directory
