"""Shards of safetensors that DCP's HuggingFaceStorageWriter did not join.

Source: `torch.distributed.checkpoint._hf_utils`. Each file has the offsets of its boxes in its metadata.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from ckpt_core.formats.codec import count, damage
from ckpt_core.sources._layout import Layout, StoredTensor
from ckpt_core.sources._safetensors import read_header
from ckpt_core.storage import Storage

_FILE: Final = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")


def find_dcp_safetensors(storage: Storage, directory: str, files: Iterable[str]) -> Layout | None:
    """Describe the shards in a folder as whole tensors of the item `model`."""
    found = [match for match in map(_FILE.fullmatch, files) if match]
    if not found:
        return None
    url = f"{storage.url}/{directory}"
    ranks = sorted({int(match[1]) for match in found})
    if ranks != list(range(1, len(ranks) + 1)):
        raise damage(url, f"of its shards 1 to {ranks[-1]} there are only {', '.join(map(str, ranks))}")
    boxes: defaultdict[str, list[StoredTensor]] = defaultdict(list)
    for match in found:
        for key, box in _boxes(storage, directory, match[0]).items():
            boxes[key].append(box)
    return Layout(
        kind="shards of safetensors of torch.distributed.checkpoint",
        tensors={("model", key): _joined(each, f"{url}: {key!r:.200}") for key, each in boxes.items()},
    )


def _boxes(storage: Storage, directory: str, name: str) -> dict[str, StoredTensor]:
    """Read the boxes in a file, each as a tensor of one chunk at its offsets."""
    header, metadata = read_header(storage, directory, name)
    try:
        places = json.loads(metadata["DCP_SHARDING_INFO"])
        offsets = {
            key: tuple(count(each, "offset") for each in places[key]["saved_offsets"]) for key in header
        }
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise damage(
            f"{storage.url}/{directory}/{name}", f"it has no offsets of its boxes: {error!r:.200}"
        ) from error
    return {key: each.as_tensor(name, offsets[key]) for key, each in header.items()}


def _joined(boxes: list[StoredTensor], place: str) -> StoredTensor:
    """Return the tensor that boxes make up; whether they cover it is checked later."""
    first, chunks = boxes[0], [box.chunks[0] for box in boxes]
    if {box.dtype for box in boxes} != {first.dtype} or {
        len(each) for box in boxes for each in (box.shape, box.chunks[0].offsets)
    } != {len(first.shape)}:
        raise damage(place, "its shards have different dtypes or dimensions")
    ends = [[o + n for o, n in zip(each.offsets, each.sizes, strict=True)] for each in chunks]
    return replace(first, shape=tuple(max(dim) for dim in zip(*ends, strict=True)), chunks=chunks)
