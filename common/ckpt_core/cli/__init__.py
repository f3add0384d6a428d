"""The command `ckpt`: look at, verify, pin and prune checkpoints, without torch or the job's code."""

from ckpt_core.cli._main import main

__all__ = ["main"]
