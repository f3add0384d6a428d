"""Storage in an object store: S3, GCS, Azure, or any other that fsspec reaches."""

from ckpt_core.storage.object._storage import ObjectStorage, RequestTerms

__all__ = ["ObjectStorage", "RequestTerms"]
