"""Shared reads: every byte is read by one rank and passed on to all that need it.

Every rank computes the same schedule by itself, from the content of the checkpoint and the layout of live
tensors over ranks; nothing is gathered. `Schedule.consistency` shows whether all ranks agree.
"""

from ckpt_core.loading.sharing._layouts import Boxes, Layouts
from ckpt_core.loading.sharing._passing import relay_shared
from ckpt_core.loading.sharing._schedule import Schedule, make_schedule
from ckpt_core.loading.sharing._units import Cell, StoredTensor

__all__ = ["Boxes", "Cell", "Layouts", "Schedule", "StoredTensor", "make_schedule", "relay_shared"]
