"""Sources of training state: what each must have, and nested mappings as a source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from ckpt_core.data import is_stateful
from ckpt_core.errors import ConfigError
from ckpt_core.state._items import check_kind, item_state, item_target, load_item
from ckpt_core.state._model import of_own_loaders
from ckpt_core.state._nested import Path, get, is_leaf, put, under
from ckpt_core.state._optimizer import fit_of
from ckpt_core.state._override import Override
from ckpt_core.state._tensors import shape_of, template
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

    def weights(self) -> StateSource | None:
        """Return the model alone, as the item `model`; by default there is none."""
        return None


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
        return CapturedState(sharded={_PART: _captured(self._mapping)})

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        entries, tree = saved.sharded.get(_PART, {}), dict[str, Any]()
        for path, _, _, value in _entries(self._mapping):
            if isinstance(value, nn.Module):
                # Its own names, without those of other stages of a pipeline.
                live = value.state_dict()
                found = {at: entry for at, entry in under(entries, *path).items() if at[0] in live}
                own = {name: each if isinstance(each, torch.Tensor) else None for name, each in live.items()}
                put(tree, path, own | template(live, _fitting(value, live, found)))
            elif is_stateful(value):
                put(tree, path, item_target(value, under(entries, *path)))
            else:
                put(tree, path, value if isinstance(value, torch.Tensor) else None)
        return {_PART: tree}

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Callable[[], None]:
        for path, _, _, value in _entries(self._mapping):
            check_kind(value, get(loaded.get(_PART), path), fit=fit_of(saved))
        return lambda: None

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> list[str]:
        del saved
        tree = loaded.get(_PART, {})
        for path, container, key, value in list(_entries(self._mapping)):
            outer, new = get(tree, path[:-1]), get(tree, path)
            lacks = outer is None or (isinstance(outer, Mapping) and path[-1] not in outer)
            if lacks or isinstance(value, torch.Tensor):
                continue
            if is_stateful(value):
                load_item(".".join(map(str, path)), value, {} if new is None else new, of_tree=True)
            else:
                container[key] = new
        return []

    def weights(self) -> StateSource | None:
        return DictState({"model": self._mapping["model"]}) if "model" in self._mapping else None

    def check_override(self, change: Override) -> None:
        del change
        raise ConfigError(
            f"override= changes the optimizers of a TrainState, not of a {type(self._mapping).__name__}"
        )

    def takes_all(self, saved: SavedState) -> bool:
        tops = {str(path[0]) for entries in saved.sharded.values() for path in entries}
        return tops <= set(map(str, self._mapping))


def _fitting(module: nn.Module, live: Mapping[str, Any], saved: SavedEntries) -> SavedEntries:
    """Leave out entries of other shapes, unless a module may take them."""
    free = of_own_loaders(module, saved, live)
    return {
        path: entry
        for path, entry in saved.items()
        if entry is None
        or path[0] in free
        or not isinstance(own := live[str(path[0])], torch.Tensor)
        or shape_of(own) == entry.shape
    }


def _captured(value: Any) -> Any:
    """Return what is to be saved of a tree; every save waits for it."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        _refuse_doubles(value)
        return {str(key): _captured(each) for key, each in value.items()}
    if is_leaf(value):
        return item_state(value) if is_stateful(value) else value
    return [_captured(each) for each in value]


def _refuse_doubles(mapping: Mapping[Any, Any]) -> None:
    if len(set(map(str, mapping))) < len(mapping):
        twice = [name for name, times in Counter(map(str, mapping)).items() if times > 1]
        raise ConfigError(
            f"several keys of one mapping are called {', '.join(sorted(twice))} in a checkpoint, where every "
            "key is a string; only one of them would be saved"
        )


def _entries(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any, Any]]:
    """Yield the path, container, key and value of each leaf and object."""
    is_mapping = isinstance(value, Mapping)
    if is_mapping:
        _refuse_doubles(value)
    for key, each in list(value.items() if is_mapping else enumerate(value)):
        at = (*path, str(key) if is_mapping else key)
        if is_leaf(each):
            yield at, value, key, each
        else:
            yield from _entries(each, at)
