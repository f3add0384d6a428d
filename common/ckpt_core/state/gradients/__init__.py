"""Gradients of an accumulation window: captured sharded, put back exactly."""

from ckpt_core.state.gradients._gradients import Gradients

__all__ = ["Gradients"]
