"""Training-safe copies of live state."""

from ckpt_core.staging._host import HostStager, StagedShards, Stager

__all__ = ["HostStager", "StagedShards", "Stager"]
