"""Wrapped tensors: stored as stock DCP does, loaded by their inner tensors."""

from ckpt_core.dcp.wrapped._filling import StoredPiece, WrapMismatchError, fillings
from ckpt_core.dcp.wrapped._wrapped_pickle import problem_of, wrapped_pickle

__all__ = ["StoredPiece", "WrapMismatchError", "fillings", "problem_of", "wrapped_pickle"]
