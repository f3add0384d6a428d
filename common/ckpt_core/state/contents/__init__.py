"""The option `contents`: whether checkpoints hold a frozen base, or refer to it."""

from ckpt_core.state.contents._contents import (
    Contents,
    begin,
    contents_problem,
    saved_part,
    saves_base,
    supplied,
)
from ckpt_core.state.contents._record import BaseRecord, base_names, is_of_base

__all__ = [
    "BaseRecord",
    "Contents",
    "base_names",
    "begin",
    "contents_problem",
    "is_of_base",
    "saved_part",
    "saves_base",
    "supplied",
]
