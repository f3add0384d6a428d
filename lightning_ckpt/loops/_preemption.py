"""Preemptions in a validation, and in spite of Lightning's signal handlers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar, final

from torch.utils.data import IterableDataset

from ckpt_core.cadence import preemptions
from ckpt_core.disclosure import logger_of
from ckpt_core.manager import CheckpointManager

T = TypeVar("T")

_logger = logger_of(__name__)
_REGISTER: Final = "register_signal_handlers"
_UNKNOWN: Final = -1


@final
class ValidationExit:
    """Ends a fit's validation at a preemption, after the same batch on every rank.

    Where ranks have unequal or unknown numbers of batches it does not look: the others would wait for a rank
    that has finished. There a preemption is noticed when the validation ends.

    Concurrency: the thread that trains; every method on every rank alike.
    """

    def __init__(
        self, trainer: Any, manager: CheckpointManager, same: Callable[[Sequence[int]], bool]
    ) -> None:
        self.listens = bool(preemptions(manager.options.save))
        self._trainer = trainer
        self._manager = manager
        self._same = same
        self._looks = False
        self.cut_short = False

    def begin(self) -> None:
        """Prepare for a validation."""
        self.cut_short = False
        self._looks = self.listens and not self._trainer.sanity_checking
        if self._looks:
            sizes = _sizes(self._trainer.fit_loop.epoch_loop.val_loop)
            self._looks = self._same(sizes) and _UNKNOWN not in sizes

    def after_batch(self) -> None:
        """Leave the validation if a preemption that stops training was announced.

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
        """Set the Trainer's state back after the validation's own hooks."""
        if self.cut_short:
            self._trainer.validating = True


def _sizes(loop: Any) -> tuple[int, int, int]:
    """Return what determines the number of batches of a validation."""
    batches = loop.max_batches
    loaders = loop._combined_loader.flattened
    if not batches or any(_unsized(loader) for loader in loaders) or float("inf") in batches:
        return _UNKNOWN, _UNKNOWN, _UNKNOWN
    return sum(batches), max(batches), min(batches)


def _unsized(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset) or not hasattr(loader, "__len__")


@final
class SignalTakeover:
    """Keeps the core's signal handlers ahead of Lightning's until `give_back`.

    Lightning remembers the handlers that it finds and puts those back at its end, so ours are set aside
    while it looks. Its own SIGTERM handler waits for a collective: ranks that are signalled one after
    another, or in the middle of a step, hang in it. Under SLURM its SIGUSR1 handler saves wherever the signal
    arrives.

    Args:
        connector: what registers Lightning's handlers for a Trainer.
        names: of the signals.
        noted: one of them, to be noted for `was_noted`; None for none.
    """

    def __init__(self, connector: Any, names: Iterable[str], noted: str | None = None) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        self._numbers = [signal.Signals[name] for name in sorted(names)] if on_main else []
        self._connector = connector
        self._before: dict[signal.Signals, Any] = {}
        self._ours: dict[signal.Signals, Any] = {}
        self._theirs: dict[signal.Signals, Any] = {}
        self._noted = signal.Signals[noted] if noted is not None and on_main else None
        self.was_noted = False

    def _note(self, *_: Any) -> None:
        self.was_noted = True

    def made_by(self, make: Callable[[], T]) -> T:
        """Call `make`; keep the handlers that it installs ahead of Lightning's."""
        self._before = {number: _handler(number) for number in self._numbers}
        if self._noted is not None:
            _install(self._noted, self._note)  # the core's handler calls the one before it
        made = make()
        self._ours = {number: _handler(number) for number in self._numbers}
        if self._numbers:
            setattr(self._connector, _REGISTER, self._register)
        return made

    def give_back(self) -> None:
        """Hand the signals back to Lightning's handlers; idempotent."""
        self._connector.__dict__.pop(_REGISTER, None)
        for number, theirs in self._theirs.items():
            _install(number, theirs)
        self._theirs = {}
        if self._noted is not None and _handler(self._noted) == self._note:
            _install(self._noted, self._before[self._noted])

    def _register(self) -> None:
        for number, before in self._before.items():
            _install(number, before)
        getattr(type(self._connector), _REGISTER)(self._connector)
        self._theirs = {number: _install(number, ours) for number, ours in self._ours.items()}


def _handler(number: signal.Signals) -> Any:
    handler = signal.getsignal(number)
    # None is a handler that C code installed, which Python cannot put back.
    return signal.SIG_DFL if handler is None else handler


def _install(number: signal.Signals, handler: Any) -> Any:
    previous = _handler(number)
    signal.signal(number, handler)
    return previous
