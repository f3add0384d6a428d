"""The state of callbacks, and what is still to come of a saved step.

The Trainer itself keeps only what fits into JSON of callbacks: not a moving average of the weights.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from transformers.trainer_callback import ExportableState

from ckpt_core.data import is_stateful
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError
from ckpt_core.state import StateSource, is_large, load_item, load_rng_state, rng_state, template, under
from ckpt_core.types import CapturedState, SavedState

_PART = "callbacks"

_logger = logger_of(__name__)


@final
class CallbackStates(StateSource):
    """Captures and loads a Trainer's callbacks that have a state.

    Those with `state_dict` and `load_state_dict`. Main thread only.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._live: dict[str, Any] = {}
        for each in filter(is_stateful, trainer.callback_handler.callbacks):
            name = type(each).__name__
            same = sum(type(other).__name__ == name for other in self._live.values())
            self._live[f"{name}-{same + 1}" if same else name] = each

    def __bool__(self) -> bool:
        return bool(self._live)

    def check(self) -> None:
        """Refuse a state that no resume would find; warn of weights without one."""
        others = [each for each in self._trainer.callback_handler.callbacks if not is_stateful(each)]
        for each in others:
            name = type(each).__name__
            if isinstance(each, ExportableState) and not _is_json(each.state()):
                raise ConfigError(
                    f"the state() of callback {name} is no JSON, and the Trainer stores nothing else: give "
                    "the callback state_dict and load_state_dict for its tensors, which are saved then"
                )
            for attribute in _weights(each, self._trainer.model):
                if (name, attribute) not in _warned:
                    _warned.add((name, attribute))
                    _logger.warning(
                        "callback %s holds weights, %s, that are in no checkpoint: a resumed run has those "
                        "that the script makes. Give the callback state_dict and load_state_dict, and its "
                        "state is saved and loaded",
                        name,
                        attribute,
                    )

    def capture(self) -> CapturedState:
        """Return the present states: large or sharded ones as tensors, others as values."""
        states = {name: each.state_dict() for name, each in self._live.items()}
        large = {name: state for name, state in states.items() if is_large(state)}
        small = {name: state for name, state in states.items() if name not in large}
        return CapturedState(sharded={_PART: large} if large else {}, shared={_PART: small} if small else {})

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        entries = saved.sharded.get(_PART, {})
        found = {name: under(entries, name) for name in self._live}
        tree = {
            name: template(self._live[name].state_dict(), inside) for name, inside in found.items() if inside
        }
        return {_PART: tree} if tree else {}

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        large, small = loaded.get(_PART, {}), saved.shared.get(_PART, {})
        for name, each in self._live.items():
            if name in large or name in small:
                where = f"callback {name} of checkpoint {saved.name}"
                load_item(where, each, large.get(name, small.get(name)), of_tree=name in large)
        notes = [
            f"checkpoint {saved.name} has no state of callback {name}: it begins as new"
            for name in self._live
            if name not in large and name not in small
        ]
        for note in notes:
            _logger.warning("%s", note)
        return notes

    def takes_all(self, saved: SavedState) -> bool:
        """Return False: it is a part of a checkpoint."""
        del saved
        return False


_warned = set[tuple[str, str]]()


def _is_json(state: Any) -> bool:
    try:
        json.dumps(state)
    except (TypeError, ValueError):
        return False
    return True


def _weights(callback: Any, model: nn.Module) -> list[str]:
    """Return the attributes with weights of their own, or values for the model's."""
    held = getattr(callback, "__dict__", {})
    candidates = {name: value for name, value in held.items() if isinstance(value, Mapping | nn.Module)}
    if not candidates:
        return []  # at every save: nothing that looks at all parameters
    trained = {name: id(each) for name, each in model.named_parameters()}

    def holds(value: Mapping[Any, Any] | nn.Module) -> bool:
        if isinstance(value, Mapping):
            return bool(trained.keys() & value.keys())
        own = {id(each) for each in value.parameters()}
        return bool(own) and own.isdisjoint(trained.values())

    return [name for name, value in candidates.items() if holds(value)]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ToCome:
    """What an uninterrupted run would do after the save; the same on every rank.

    Attributes:
        decided: whether an evaluation has decided to stop, as for early stopping.
        logged: norm of the gradients and learning rate, for a log at the end of the epoch.
    """

    evaluation: bool = False
    decided: bool = False
    until: tuple[float, float] = (0, 0)
    epoch_ended: bool = True
    logged: tuple[float | None, float | None] = (None, None)

    def stops(self, args: Any) -> bool:
        """Return whether a training stays stopped; not if it was made longer since."""
        return self.decided and args.max_steps <= self.until[0] and args.num_train_epochs <= self.until[1]


def undo_of_evaluation(trainer: Any) -> Callable[[], None]:
    generators, num_logs = rng_state(), len(trainer.state.log_history)
    loaders = dict(getattr(trainer, "_eval_dataloaders", {}))
    callbacks = [
        (each, copy.deepcopy(each.state()["attributes"]))
        for each in trainer.callback_handler.callbacks
        if isinstance(each, ExportableState)
    ]

    def undo() -> None:
        load_rng_state(generators)
        del trainer.state.log_history[num_logs:]
        if hasattr(trainer, "_eval_dataloaders"):
            trainer._eval_dataloaders = loaders
        for each, attributes in callbacks:
            vars(each).update(attributes)

    return undo


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
