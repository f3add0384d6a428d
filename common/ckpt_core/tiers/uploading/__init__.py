"""Uploads of a running job: every n-th checkpoint goes to further tiers, in the background."""

from ckpt_core.tiers.uploading._tiers import Tiers

__all__ = ["Tiers"]
