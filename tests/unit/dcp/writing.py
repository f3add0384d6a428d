"""Trees written by our writer as the one rank of a save writes them, by the plan of stock DCP."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from ckpt_core._torch_internals import StorageInfo, inner_tensors
from ckpt_core.dcp import Image, ImageLayout, encode_metadata
from ckpt_core.dcp._image import specs_of
from ckpt_core.dcp._torch_zip import value_entry
from ckpt_core.formats.chunks import ChunkTable, encode_table
from ckpt_core.saving._files import RankFiles
from ckpt_core.storage import Storage


def copy_into(image: Image, shards: Mapping[MetadataIndex, torch.Tensor]) -> None:
    """Copy shards, in the order of the layout, into their slots."""
    sources = [inner for shard in shards.values() for _, inner in inner_tensors(shard)]
    with torch.no_grad():
        for source, target in zip(sources, image.targets, strict=True):
            target.copy_(source)


def places_in(table: ChunkTable, part: str) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
    """Yield DCP's storage data of one part, from a rank's chunk table."""
    for path, chunks in table.files.items():
        directory, _, name = path.rpartition("/")
        if directory != part:
            continue
        columns = chunks.columns
        rows = zip(columns.key, columns.shard_offsets, columns.offset, columns.size_bytes, strict=True)
        for key, shard_offsets, offset, size in rows:
            index = MetadataIndex(key) if shard_offsets is None else MetadataIndex(key, shard_offsets)
            yield index, StorageInfo(relative_path=name, offset=offset, length=size)


def written(storage: Storage, directory: str, tree: dict[str, Any], *, part: str = "") -> RankFiles:
    """Write data files and `.metadata`; the files and tables written are the writer's."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(tree, None, is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    shards: dict[MetadataIndex, torch.Tensor] = {}
    values: dict[MetadataIndex, bytes] = {}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            values[item.index] = value_entry(planner.lookup_object(item.index))
        else:
            shards[item.index] = planner.resolve_data(item)
    laid_out = {index: specs_of(index, shard) for index, shard in shards.items()}
    layout = ImageLayout(
        [spec for specs, _ in laid_out.values() for spec in specs],
        {index: record for index, (_, record) in laid_out.items() if record is not None},
    )
    image = Image(layout, torch.frombuffer(mmap.mmap(-1, layout.size_bytes or 1), dtype=torch.uint8))
    copy_into(image, shards)
    writer = RankFiles(storage, directory)
    writer.write_image(part, image)
    writer.write_values(part, values)
    table = ChunkTable.from_bytes(encode_table(writer.tables), source="the table")
    content = encode_metadata(metadata, dict(places_in(table, part)))
    writer.write(f"{part}/.metadata" if part else ".metadata", content)
    return writer
