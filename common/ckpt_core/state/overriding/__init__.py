"""Hyperparameters that a resume changes, and the schedules that follow them."""

from ckpt_core.state.overriding._override import Override

__all__ = ["Override"]
