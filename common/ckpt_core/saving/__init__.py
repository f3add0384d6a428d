"""Saves: prepared on the main thread, written and committed in the background."""

from ckpt_core.saving._files import RankFiles
from ckpt_core.saving._in_flight import SaveHandle, SaveRequest, SaveThread
from ckpt_core.saving._save import Means
from ckpt_core.saving._saver import Saver

__all__ = ["Means", "RankFiles", "SaveHandle", "SaveRequest", "SaveThread", "Saver"]
