"""Differences of two checkpoints: of tensors, as a load sees them, and of values.

A tensor is compared as a whole, however it is divided into chunks. Where both divide it alike, equal
checksums stand for equal bytes, and nothing is read. What is read is compared with its checksums, so that
damage is no difference; two tensors are in memory at a time. Nothing is unpickled but plain values.
"""

from ckpt_core.comparison._compare import Comparison, TensorDifference, ValueDifference, compare

__all__ = ["Comparison", "TensorDifference", "ValueDifference", "compare"]
