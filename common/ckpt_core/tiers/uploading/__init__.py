"""Uploads of a running job: every n-th checkpoint goes to further tiers, in the background."""

from ckpt_core.tiers.uploading._due import SaveNumber
from ckpt_core.tiers.uploading._tier_uploads import TierUploads

__all__ = ["SaveNumber", "TierUploads"]
