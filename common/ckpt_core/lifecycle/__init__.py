"""The only place where state, staging, dcp, storage, commit and coordination meet: save, load, prune."""

from ckpt_core.lifecycle._agreed import agreed_place, agreed_step, checked_step
from ckpt_core.lifecycle._cadence import CadenceKeeper
from ckpt_core.lifecycle._everywhere import everywhere
from ckpt_core.lifecycle._files import Files
from ckpt_core.lifecycle._handle import SaveHandle
from ckpt_core.lifecycle._load import LoadRequest
from ckpt_core.lifecycle._loader import Loader
from ckpt_core.lifecycle._request import SaveRequest
from ckpt_core.lifecycle._saver import Saver
from ckpt_core.lifecycle._selection import Selection, narrowed

__all__ = [
    "CadenceKeeper",
    "Files",
    "LoadRequest",
    "Loader",
    "SaveHandle",
    "SaveRequest",
    "Saver",
    "Selection",
    "agreed_place",
    "agreed_step",
    "checked_step",
    "everywhere",
    "narrowed",
]
