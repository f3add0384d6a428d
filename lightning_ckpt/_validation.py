"""The way out of a validation that a preemption cuts short."""

from __future__ import annotations

from typing import Any, final

from torch.utils.data import IterableDataset

from ckpt_core.disclosure import logger_of
from ckpt_core.manager import CheckpointManager
from lightning_ckpt._roots import Roots

_logger = logger_of(__name__)
_UNKNOWN = -1


@final
class ValidationExit:
    """Looks for a preemption after every batch of a fit's validations; all ranks leave after the same one.

    Where ranks have unequal numbers of batches, or do not know theirs beforehand, it does not look: a rank
    that is done would be waited for in vain. There a preemption is noticed when the validation ends.

    Concurrency: the thread that trains; every method on every rank alike.
    """

    def __init__(self, trainer: Any, manager: CheckpointManager, roots: Roots) -> None:
        save = manager.options.save
        self._listens = save is not None and bool(save.preemptions)
        self._trainer = trainer
        self._manager = manager
        self._roots = roots
        self._looks = False
        self.cut_short = False

    def begin(self) -> None:
        """A validation is about to begin."""
        self.cut_short = False
        self._looks = self._listens and not self._trainer.sanity_checking
        if self._looks:
            sizes = _sizes(self._trainer.fit_loop.epoch_loop.val_loop)
            self._looks = self._roots.same(sizes) and _UNKNOWN not in sizes

    def after_batch(self) -> None:
        """Leave if a preemption was announced that stops the training.

        Raises:
            StopIteration: the validation ends here; its loop takes it as the end of the data.
        """
        trainer = self._trainer
        if not self._looks or trainer.fit_loop.epoch_loop.val_loop.batch_progress.is_last_batch:
            return
        self._manager.due()
        if self._manager.preempted:
            _logger.warning("preempted: the validation after step %d is cut short", trainer.global_step)
            self.cut_short = True
            # Lightning's own word for results that do not count: early stopping and the like pass them over.
            trainer.sanity_checking = True
            raise StopIteration

    def end(self) -> None:
        """The validation's own hooks are done."""
        if self.cut_short:
            self._trainer.validating = True


def _sizes(loop: Any) -> tuple[int, int, int]:
    """What determines a validation's number of batches, in whichever way its loaders are combined."""
    batches = loop.max_batches
    loaders = loop._combined_loader.flattened
    if not batches or any(_unsized(loader) for loader in loaders) or float("inf") in batches:
        return _UNKNOWN, _UNKNOWN, _UNKNOWN
    return sum(batches), max(batches), min(batches)


def _unsized(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset) or not hasattr(loader, "__len__")
