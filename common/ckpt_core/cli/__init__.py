"""The command `ckpt`: inspect, verify, pin, mark and prune, without torch."""

from ckpt_core.cli._main import main

__all__ = ["main"]
