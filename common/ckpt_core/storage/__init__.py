"""Bytes at a place: the `Storage` contract, its backends, and `open_storage` to choose one by URL."""

from ckpt_core.storage._base import Lock, Storage, StorageEntry

__all__ = ["Lock", "Storage", "StorageEntry"]
