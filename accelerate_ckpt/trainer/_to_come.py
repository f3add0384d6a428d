"""What is still to come of a saved step: an evaluation, or the end of training."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any, Self, final

from transformers.trainer_callback import ExportableState

from ckpt_core.state import load_rng_state, rng_state
from ckpt_core.types import SavedState

ITEM = "to_come"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ToCome:
    """What an uninterrupted run would do after the save; the same on every rank.

    Attributes:
        evaluation: whether an evaluation was due and is not made.
        decided: whether an evaluation has decided to stop, as for early stopping.
        until: `max_steps` and `num_train_epochs` at the save.
        epoch_ended: whether callbacks have heard of the end of the epoch.
        logged: norm of the gradients and learning rate, for a log at the end of the epoch.
    """

    evaluation: bool = False
    decided: bool = False
    until: tuple[float, float] = (0, 0)
    epoch_ended: bool = True
    logged: tuple[float | None, float | None] = (None, None)

    @classmethod
    def of(cls, saved: SavedState) -> Self:
        """Return what a checkpoint says of it."""
        found: dict[str, Any] = saved.shared.get(ITEM, {})
        return cls(**found)

    def item(self) -> dict[str, Any]:
        """Return the item of a checkpoint."""
        return {ITEM: asdict(self)}

    def stops(self, args: Any) -> bool:
        """Return whether a training stays stopped; not if it was made longer since."""
        return self.decided and args.max_steps <= self.until[0] and args.num_train_epochs <= self.until[1]


@final
class BeforeEvaluation:
    """What an evaluation changes before it ends, as it was; main thread only."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._generators = rng_state()
        self._logs = len(trainer.state.log_history)
        self._loaders = dict(getattr(trainer, "_eval_dataloaders", {}))
        self._callbacks = [
            (each, copy.deepcopy(each.state()["attributes"]))
            for each in trainer.callback_handler.callbacks
            if isinstance(each, ExportableState)
        ]

    def put_back(self) -> None:
        """Undo what an evaluation that was cut short has changed."""
        load_rng_state(self._generators)
        del self._trainer.state.log_history[self._logs :]
        if hasattr(self._trainer, "_eval_dataloaders"):
            self._trainer._eval_dataloaders = self._loaders
        for each, attributes in self._callbacks:
            vars(each).update(attributes)


def load_exported(trainer: Any) -> None:
    """Give callbacks the attributes that the Trainer's own state holds of them.

    The Trainer itself does so only on `restore_callback_states_from_checkpoint`, and replaces them by others.
    """
    for name, held in trainer.state.stateful_callbacks.items():
        live = [each for each in trainer.callback_handler.callbacks if type(each).__name__ == name]
        # Of several of one class the Trainer holds those of earlier saves, too.
        states = held[-len(live) :] if isinstance(held, list) else [held]
        for each, state in zip(live, states, strict=False):
            vars(each).update(state["attributes"])
