"""Storage in an object store: S3, GCS, Azure, or any other that fsspec reaches."""

from ckpt_core.storage.object._connect import REQUEST_SECONDS, object_storage
from ckpt_core.storage.object._storage import ObjectStorage

__all__ = ["REQUEST_SECONDS", "ObjectStorage", "object_storage"]
