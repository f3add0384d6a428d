"""Wrapped tensors, which are made of others: stored as stock DCP does, loaded by parts."""

from ckpt_core.dcp.wrapped._filling import Piece, WrapMismatchError, fillings
from ckpt_core.dcp.wrapped._record import problem_of, wrapped_pickle

__all__ = ["Piece", "WrapMismatchError", "fillings", "problem_of", "wrapped_pickle"]
