"""Uploads and exports of a running job to further places, in the background."""

from ckpt_core.tiers.uploading._demotions import demoter_of
from ckpt_core.tiers.uploading._due import SaveNumber
from ckpt_core.tiers.uploading._run_exports import RunExports
from ckpt_core.tiers.uploading._tier_uploads import TierUploads

__all__ = ["RunExports", "SaveNumber", "TierUploads", "demoter_of"]
