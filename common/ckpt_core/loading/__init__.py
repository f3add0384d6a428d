"""Loads: choice of a checkpoint, and a load verified before live state changes."""

from ckpt_core.loading._checkpoint import CheckpointPart, open_parts, values_beside
from ckpt_core.loading._committed_files import CommittedFiles
from ckpt_core.loading._fetch import Fetcher
from ckpt_core.loading._load import LoadRequest
from ckpt_core.loading._loader import Loader, find_source
from ckpt_core.loading._located import LocatedTensor, located
from ckpt_core.loading._repair import Repairer
from ckpt_core.loading._selection import Selection, narrowed

__all__ = [
    "CheckpointPart",
    "CommittedFiles",
    "Fetcher",
    "LoadRequest",
    "Loader",
    "LocatedTensor",
    "Repairer",
    "Selection",
    "find_source",
    "located",
    "narrowed",
    "open_parts",
    "values_beside",
]
