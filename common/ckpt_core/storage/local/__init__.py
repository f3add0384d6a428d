"""Storage in a directory of a local or shared POSIX filesystem."""

from ckpt_core.storage.local._locks import excludes_others
from ckpt_core.storage.local._storage import LocalStorage

__all__ = ["LocalStorage", "excludes_others"]
