"""Staged state to bytes and back, in the format of torch.distributed.checkpoint."""

from ckpt_core.dcp._chunk_locator import ChunkLocation, ChunkLocator
from ckpt_core.dcp._decide import (
    Decision,
    GroupNames,
    LocalPlan,
    Outline,
    PlannedIndex,
    Replicas,
    WriteTask,
    decide,
    kept_name,
)
from ckpt_core.dcp._fingerprints import Fingerprints, sample
from ckpt_core.dcp._image import Image, ImageLayout, ShardSpec, spec_of
from ckpt_core.dcp._metadata import (
    check_stock,
    encode_metadata,
    entries,
    load_chunk,
    load_metadata,
    load_plain,
    load_value,
    metadata_of,
    read_linked,
    without_pickle,
)
from ckpt_core.dcp._plan import Leaves, Part, held_by_this_rank, is_expanded
from ckpt_core.dcp._tensor_reads import Cut, Cuts, TensorRead, TensorTarget, boxes_of_range, bytes_of
from ckpt_core.dcp._torch_zip import (
    TensorForm,
    build_archive,
    checked_zip,
    pickled_state,
    read_record,
    tensor_pickle,
    value_entry,
)
from ckpt_core.dcp._wrapped_tensors import WrapMismatchError, fillings
from ckpt_core.formats.consistency import check_metadata

__all__ = [
    "ChunkLocation",
    "ChunkLocator",
    "Cut",
    "Cuts",
    "Decision",
    "Fingerprints",
    "GroupNames",
    "Image",
    "ImageLayout",
    "Leaves",
    "LocalPlan",
    "Outline",
    "Part",
    "PlannedIndex",
    "Replicas",
    "ShardSpec",
    "TensorForm",
    "TensorRead",
    "TensorTarget",
    "WrapMismatchError",
    "WriteTask",
    "boxes_of_range",
    "build_archive",
    "bytes_of",
    "check_metadata",
    "check_stock",
    "checked_zip",
    "decide",
    "encode_metadata",
    "entries",
    "fillings",
    "held_by_this_rank",
    "is_expanded",
    "kept_name",
    "load_chunk",
    "load_metadata",
    "load_plain",
    "load_value",
    "metadata_of",
    "pickled_state",
    "read_linked",
    "read_record",
    "sample",
    "spec_of",
    "tensor_pickle",
    "value_entry",
    "without_pickle",
]
