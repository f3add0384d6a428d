"""Read once among ranks: who needs which bytes, who reads them for all, and how they get around.

Every rank works out the same answer for itself, from what the checkpoint holds and how the live tensors are
laid out over ranks; nothing of it is gathered. `Schedule.consistency` tells whether all of them agree.
"""

from ckpt_core.loading.sharing._layouts import Boxes, Layouts
from ckpt_core.loading.sharing._passing import relay_shared
from ckpt_core.loading.sharing._schedule import Bucket, Schedule, make_schedule
from ckpt_core.loading.sharing._units import Cell, StoredTensor

__all__ = ["Boxes", "Bucket", "Cell", "Layouts", "Schedule", "StoredTensor", "make_schedule", "relay_shared"]
