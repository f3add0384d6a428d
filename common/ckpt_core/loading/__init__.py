"""Loads: choice of a checkpoint, and a load verified before live state changes."""

from ckpt_core.loading._committed_files import CommittedFiles
from ckpt_core.loading._fetch import Fetcher
from ckpt_core.loading._load import LoadRequest
from ckpt_core.loading._loader import Loader
from ckpt_core.loading._repair import Repairer
from ckpt_core.loading._selection import Selection, narrowed
from ckpt_core.loading._tiered import Loaded

__all__ = [
    "CommittedFiles",
    "Fetcher",
    "LoadRequest",
    "Loaded",
    "Loader",
    "Repairer",
    "Selection",
    "narrowed",
]
