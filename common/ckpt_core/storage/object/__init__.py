"""Storage in an object store: S3, GCS, or any other that fsspec reaches."""

from ckpt_core.storage.object._storage import ObjectStorage

__all__ = ["ObjectStorage"]
