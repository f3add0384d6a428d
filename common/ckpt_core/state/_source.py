"""Sources of training state: what each must have, and nested mappings as a source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from ckpt_core.data import is_stateful
from ckpt_core.errors import ConfigError
from ckpt_core.state._items import check_kind, item_state, item_target, load_item
from ckpt_core.state._nested import Path, get, is_leaf, under
from ckpt_core.state._optimizer import Fit, fit_of
from ckpt_core.state._override import Override
from ckpt_core.state._tensors import template
from ckpt_core.types import CapturedState, SavedEntries, SavedState


class StateSource(ABC):
    """A training state that can be saved and loaded.

    Calls on every rank, on the training thread:

    1. save: `capture()`. Its tensors are live: they must be copied before the next optimizer step, and those
       that are not parameters or optimizer state before training continues. Its `per_rank` and `shared`
       values are live, too: they must be encoded before training continues.
    2. load: `target(saved)` before anything large is read; its tensors are filled in place and each None is
       replaced by the value read; then `begin(loaded, saved)`, when plain values are read and tensors are
       not; then `apply(loaded, saved)` with the same structure. Before `apply`, only tensors change; if
       `target` or `begin` raises, nothing has changed. A load with `override=` ends with `override`.

    Methods may be collective over the ranks that hold the state.
    """

    @abstractmethod
    def capture(self) -> CapturedState:
        """Return the present state."""

    @abstractmethod
    def target(self, saved: SavedState) -> Mapping[str, dict[str, Any]]:
        """Return part directory -> nested dict: tensors, and None for every plain value.

        It has an entry for every saved entry to be loaded; other entries of the checkpoint need not be read.

        Raises:
            IncompatibleCheckpointError: the checkpoint is of another training state.
        """

    def begin(
        self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState
    ) -> Callable[[], Sequence[Path] | None]:
        """Put back small values that may refuse, before any tensor is read.

        By default nothing.

        Returns:
            A function that undoes it, and returns the paths of values, in `per_rank` or `shared`, that it
            cannot undo: if the load fails later, another that has them must replace them.

        Raises:
            IncompatibleCheckpointError: a part of the state refuses; everything is unchanged.
        """
        del loaded, saved
        return lambda: None

    @abstractmethod
    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        """Put everything back; return notes for the user, such as what was not restored.

        Raises:
            IncompatibleCheckpointError: a part of the state refuses what was loaded.
        """

    def check_override(self, change: Override) -> None:
        """Refuse what cannot be changed, before anything is read; by default all.

        Raises:
            ConfigError: there is one.
        """
        del change
        raise ConfigError(f"override= changes the optimizers of a TrainState, not of a {type(self).__name__}")

    # Not abstract: what refuses every change has none to make.
    def override(self, change: Override) -> None:  # noqa: B027
        """Change hyperparameters, after `apply`."""

    def takes_all(self, saved: SavedState) -> bool:
        """Return whether a load uses every model and optimizer of a checkpoint."""
        del saved
        return True


_PART = ""


@final
class DictState(StateSource):
    """A nested mapping of tensors, plain values and stateful objects, loaded in place.

    Keys are those that `dcp.save(mapping)` writes (and beside an optimizer's, the names of its classes), so
    either reads the other's checkpoints. As with `dcp.load`, the mapping selects what is loaded; other
    entries of the checkpoint are ignored.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._mapping = mapping

    def capture(self) -> CapturedState:
        return CapturedState(sharded={_PART: _states(self._mapping)})

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        return {_PART: _targets(self._mapping, saved.sharded.get(_PART, {}))}

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Callable[[], None]:
        _check(self._mapping, loaded.get(_PART, {}), fit_of(saved))
        return lambda: None

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> list[str]:
        del saved
        _apply(self._mapping, loaded.get(_PART, {}), "")
        return []

    def check_override(self, change: Override) -> None:
        del change
        raise ConfigError(
            f"override= changes the optimizers of a TrainState, not of a {type(self._mapping).__name__}"
        )

    def takes_all(self, saved: SavedState) -> bool:
        tops = {str(path[0]) for entries in saved.sharded.values() for path in entries}
        return tops <= set(map(str, self._mapping))


def _states(value: Any) -> Any:
    if isinstance(value, Mapping):
        if twice := sorted(name for name, times in Counter(map(str, value)).items() if times > 1):
            raise ConfigError(
                f"several keys of one mapping are called {', '.join(twice)} in a checkpoint, where every key "
                "is a string; only one of them would be saved"
            )
        return {str(key): _states(each) for key, each in value.items()}
    if is_stateful(value):
        return item_state(value)
    return value if is_leaf(value) else [_states(each) for each in value]


def _targets(value: Any, saved: SavedEntries, *prefix: str | int) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return {str(key): _targets(each, saved, *prefix, str(key)) for key, each in value.items()}
    if isinstance(value, nn.Module):
        # Its own names, without those of other stages of a pipeline.
        live = value.state_dict()
        found = {path: entry for path, entry in under(saved, *prefix).items() if path[0] in live}
        return {**dict.fromkeys(live), **template(live, found)}
    if is_stateful(value):
        return item_target(value, under(saved, *prefix))
    return None if is_leaf(value) else [_targets(each, saved, *prefix, i) for i, each in enumerate(value)]


def _check(live: Any, loaded: Any, fit: Fit) -> None:
    if is_stateful(live):
        check_kind(live, loaded, fit=fit)
    elif isinstance(live, Mapping):
        for key, value in live.items():
            _check(value, get(loaded, (str(key),)), fit)


def _apply(live: Any, loaded: Any, name: str) -> None:
    is_list = type(live) is list
    for key, value in list(enumerate(live) if is_list else live.items()):
        new = get(loaded, (key if is_list else str(key),))
        if isinstance(value, torch.Tensor) or (not is_list and str(key) not in loaded):
            continue
        if is_stateful(value):
            load_item(f"{name}{key}", value, {} if new is None else new, of_tree=True)
        elif not is_leaf(value):
            _apply(value, {} if new is None else new, f"{name}{key}.")
        else:
            live[key] = new
