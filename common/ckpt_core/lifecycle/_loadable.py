"""What of a state comes back otherwise than it was saved, told once per manager, at the save.

What cannot come back at all is refused before: kinds of tensors by `dcp`, states of optimizers by `state`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final, final

from ckpt_core.dcp import checked_zip, load_value
from ckpt_core.disclosure import logger_of
from ckpt_core.lifecycle._items import PICKLED
from ckpt_core.lifecycle._plans import AgreedPlans
from ckpt_core.lifecycle._stage import StagedParts
from ckpt_core.types import CapturedState

_logger = logger_of(__name__)
_TOLD: Final = 8
_RESTORED: Final = (OrderedDict, Counter, defaultdict)
"""What a load makes of a dict again where the live state has one."""


@final
class LoadNotes:
    """What a person should know of what is saved, said once however many saves there are.

    Args:
        allow_pickle: whether loads may use pickle, so that what needs it need not be told.
    """

    def __init__(self, *, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._generation = 0
        self._told: set[str] = set()

    def tell(self, state: CapturedState, plans: AgreedPlans, staged: StagedParts, url: str) -> None:
        """Log what this rank writes and a load would not give back as it is; nothing for unchanged plans."""
        if plans.generation == self._generation:
            return
        self._generation = plans.generation
        pickles = () if self._allow_pickle else self._new(_pickles(state, plans, staged))
        if pickles:
            _logger.warning(
                "%s: what is saved as %s can be rebuilt only by pickle, which could run any code: load it "
                "with CheckpointManager(..., allow_pickle=True), or keep plain values instead",
                url,
                _listed(pickles),
            )
        if changes := self._new(_changes(state)):
            _logger.warning("%s: types change with a checkpoint: %s", url, _listed(changes))

    def _new(self, notes: Iterable[str]) -> list[str]:
        fresh = sorted(set(notes) - self._told)
        self._told.update(fresh)
        return fresh


def _listed(notes: list[str]) -> str:
    more = f", and {len(notes) - _TOLD} more" if len(notes) > _TOLD else ""
    return ", ".join(notes[:_TOLD]) + more


def _pickles(state: CapturedState, plans: AgreedPlans, staged: StagedParts) -> Iterator[str]:
    """The values of this rank that a load refuses unless it may use pickle."""
    own = state.per_rank.keys() | state.shared.keys()
    for part, tree in plans.trees():
        for key, content in (tree.get(PICKLED) or {}).items():
            name = key.partition(":")[2]
            if name in own and not _is_plain(content):
                yield repr(name)
        values = staged.values.get(part, {})
        for index in plans.parts[part].odd_values():
            if not _is_plain(values[index]):
                yield repr(index.fqn)


def _is_plain(content: bytes) -> bool:
    try:
        checked_zip(content, "a value", trusted=False)
        load_value(content, "a value", allow_pickle=False)
    except Exception:  # noqa: BLE001 - whatever it is, a load would meet it too; the caller tells the user
        return False
    return True


def _changes(state: CapturedState) -> Iterator[str]:
    for items in (state.per_rank, state.shared):
        for name, value in items.items():
            yield from _changed_types(_inside(value), name)
    for tree in state.sharded.values():
        for name, value in tree.items():
            yield from _changed_types(_inside(value), name)


def _inside(value: Any) -> Any:
    """A whole state is always given back as a dict, as `load_state_dict` takes it."""
    return dict(value) if isinstance(value, Mapping) else value


def _changed_types(value: Any, path: str) -> Iterator[str]:
    kind = type(value)
    if isinstance(value, Mapping):
        if kind is not dict and kind not in _RESTORED:
            yield f"{path} from {kind.__name__} to dict"
        for key, each in value.items():
            yield from _changed_types(each, f"{path}.{key}")
    elif kind is list or kind is tuple:
        for index, each in enumerate(value):
            if not isinstance(each, int | float | str):
                yield from _changed_types(each, f"{path}.{index}")
    elif isinstance(value, PurePath) and not isinstance(value, Path):
        yield f"{path} from {kind.__name__} to Path"
