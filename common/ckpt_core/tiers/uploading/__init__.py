"""Uploads of a running job to further tiers, in the background."""

from ckpt_core.tiers.uploading._due import SaveNumber
from ckpt_core.tiers.uploading._tier_uploads import TierUploads

__all__ = ["SaveNumber", "TierUploads"]
