"""Staged state to bytes and back, through the public extension points of torch.distributed.checkpoint."""

from ckpt_core.consistency import check_metadata
from ckpt_core.dcp._image import Image, ImageLayout, ShardSpec, spec_of
from ckpt_core.dcp._kinds import is_expanded
from ckpt_core.dcp._landing import Landing
from ckpt_core.dcp._metadata import entries, load_metadata
from ckpt_core.dcp._needs import Need
from ckpt_core.dcp._places import Place, Places
from ckpt_core.dcp._plan import Part, Share, decide
from ckpt_core.dcp._reader import SafeLoadPlanner, ShardReader, load_value
from ckpt_core.dcp._torch_zip import checked_zip, load_chunk
from ckpt_core.dcp._writer import Pace, ShardWriter, encode_metadata, places_in

__all__ = [
    "Image",
    "ImageLayout",
    "Landing",
    "Need",
    "Pace",
    "Part",
    "Place",
    "Places",
    "SafeLoadPlanner",
    "ShardReader",
    "ShardSpec",
    "ShardWriter",
    "Share",
    "check_metadata",
    "checked_zip",
    "decide",
    "encode_metadata",
    "entries",
    "is_expanded",
    "load_chunk",
    "load_metadata",
    "load_value",
    "places_in",
    "spec_of",
]
