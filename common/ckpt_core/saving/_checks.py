"""Checks of a state to be saved: finite, trained, and the same after a load."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn

from ckpt_core._torch_internals import own_part
from ckpt_core.dcp import Image, checked_zip, load_value
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ALLOW_PICKLE, SaveError, first_of
from ckpt_core.options import OnStale
from ckpt_core.saving._plan_cache import PlanCache
from ckpt_core.saving._stager import StagedParts, memory_of, memory_of_own
from ckpt_core.state import PICKLED
from ckpt_core.types import CapturedState

_logger = logger_of(__name__)
_MOST_LOGGED: Final = 8
_RESTORED: Final = (OrderedDict, Counter, defaultdict)
"""Types to which a load converts a dict where the live state has them."""


@final
class LoadNotes:
    """Warnings about values that a load refuses or changes, each logged once."""

    def __init__(self, *, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._generation = 0
        self._logged: set[str] = set()

    def log(self, state: CapturedState, plans: PlanCache, staged: StagedParts, url: str) -> None:
        """Log the values of this rank that a load refuses or changes, once per plan."""
        if plans.generation == self._generation:
            return
        self._generation = plans.generation
        pickles = () if self._allow_pickle else self._new(_pickles(state, plans, staged))
        if pickles:
            _logger.warning(
                "%s: values saved as %s can be rebuilt only by pickle, which could run any code, so that a "
                "load refuses them: keep plain values instead, or give %s",
                url,
                first_of(pickles, _MOST_LOGGED),
                ALLOW_PICKLE,
            )
        if changes := self._new(_changes(state)):
            _logger.warning("%s: types change with a checkpoint: %s", url, first_of(changes, _MOST_LOGGED))

    def _new(self, notes: Iterable[str]) -> list[str]:
        fresh = sorted(set(notes) - self._logged)
        self._logged.update(fresh)
        return fresh


def _pickles(state: CapturedState, plans: PlanCache, staged: StagedParts) -> Iterator[str]:
    """Yield the values of this rank that a load refuses without pickle."""
    own = state.per_rank.keys() | state.shared.keys()
    for name_of_part, part in plans.parts.items():
        for key, content in (part.tree.get(PICKLED) or {}).items():
            name = key.partition(":")[2]
            if name in own and not _is_plain(content):
                yield repr(name)
        values = staged.values.get(name_of_part, {})
        for index in part.odd_values():
            if not _is_plain(values[index]):
                yield repr(index.fqn)


def _is_plain(content: bytes) -> bool:
    try:
        checked_zip(content, "a value", trusted=False)
        load_value(content, "a value", allow_pickle=False)
    except Exception:  # noqa: BLE001 - a load would fail with any of them, too; the caller logs it
        return False
    return True


def _changes(state: CapturedState) -> Iterator[str]:
    for items in (state.per_rank, state.shared, *state.sharded.values()):
        for name, value in items.items():
            # A load gives `load_state_dict` a dict, whatever the whole state was.
            yield from _changed_types(dict(value) if isinstance(value, Mapping) else value, name)


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


_MOST_NAMED: Final = 5


def refuse_non_finite(staged: StagedParts, ignored: Collection[tuple[str, str]]) -> None:
    """Refuse a save of tensors with NaN or infinities. All copies must have been made.

    Those of the (part, key) `ignored` may have some: in module buffers they are usual, as in attention masks.
    """
    found = [
        (part, slot.index.fqn)
        for part, image in staged.images.items()
        for slot, tensor in zip(image.layout.slots, image.targets, strict=False)  # in waves, of none
        if (part, slot.index.fqn) not in ignored and not is_finite(tensor)
    ]
    found += [each for each in staged.non_finite if each not in ignored]
    _refuse([name for _, name in dict.fromkeys(found)])


def refuse_non_finite_in_files(tensors: Mapping[str, torch.Tensor]) -> None:
    _refuse([name for name, tensor in tensors.items() if not is_finite(own_part(tensor.detach()))])


def _refuse(found: list[str]) -> None:
    if found:
        raise SaveError(
            f"while staging: NaN or infinity in {first_of(found, _MOST_NAMED)}, and "
            "reject_non_finite is on; go back to an earlier checkpoint"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not values.is_floating_point() or values.numel() == 0:
        return True
    if values.dtype.itemsize == 1:
        values = values.float()  # torch has no aminmax of 8-bit floats
    # This needs no mask of the tensor's size: NaN becomes both extremes, an infinity one of them.
    return all(map(math.isfinite, (extreme.item() for extreme in torch.aminmax(values))))


TrainedSlots: TypeAlias = Mapping[str, Sequence[tuple[str, int, str]]]
"""The model or the optimizer's state -> part, slot and name of what this rank writes of it."""
_Judged: TypeAlias = tuple[int, int, Sequence[Mapping[str, str]]]
_MODEL: Final = "the model"
_OPTIMIZER: Final = "the optimizer's state"


def trained_slots(plans: PlanCache, state: CapturedState) -> TrainedSlots:
    """Find what only training changes, by its memory, once for each plan.

    Frozen parameters do not count; nor does optimizer state where another optimizer, which has none, may have
    made the steps.
    """
    kinds, all_have_state = (
        dict[int, str](),
        all(
            any(
                isinstance(value, torch.Tensor)
                for each in optimizer.state.values()
                for value in each.values()
            )
            for optimizer in state.optimizers
        ),
    )
    for tensor in state.stable:
        kind = _MODEL if isinstance(tensor, nn.Parameter) else _OPTIMIZER
        if tensor.requires_grad if kind == _MODEL else all_have_state:
            kinds |= dict.fromkeys(memory_of_own(tensor), kind)
    found: dict[str, list[tuple[str, int, str]]] = {}
    for name, part in plans.parts.items():
        for slot, ((index, _, _), shard) in enumerate(zip(part.specs, part.shards(), strict=True)):
            if shard.numel() and (kind := kinds.get(memory_of(shard), "")):
                found.setdefault(kind, []).append((name, slot, index.fqn))
    return found


def trained_digests(trained: TrainedSlots, images: Mapping[str, Image]) -> dict[str, str]:
    """Digest the checksums of what is trained, by kind, once the images are written."""
    crcs = {kind: [images[part].chunk_crcs[at] for part, at, _ in each] for kind, each in trained.items()}
    return {kind: hashlib.sha256(repr(each).encode()).hexdigest()[:32] for kind, each in crcs.items()}


@final
class StaleJudge:
    """Comparison of what is trained with the last commit. Coordinator only."""

    def __init__(self, policy: OnStale) -> None:
        self._policy = policy
        self._last: _Judged = (-1, -1, ())
        self._next: _Judged = self._last
        self._told = False

    def judge(
        self, digests: Sequence[Mapping[str, str]], trained: TrainedSlots, *, generation: int, step: int
    ) -> None:
        """Compare the digests of all ranks, by rank; the plans have a `generation`.

        Raises:
            SaveError: steps have changed nothing of the model or the optimizer's state, which is refused.
        """
        (of_plans, before, known), self._next = self._last, (generation, step, digests)
        if self._policy == "ignore" or of_plans != generation or step <= before:
            return
        kinds = sorted({kind for found in digests for kind in found})
        pairs = list(zip(digests, known, strict=True))
        stale = [kind for kind in kinds if all(new.get(kind) == old.get(kind) for new, old in pairs)]
        if not stale or (self._told and self._policy == "warn"):
            return
        self._told = True
        names = {kind: [name for _, _, name in trained.get(kind, ())] for kind in stale}
        named = " and of ".join(f"{kind} ({first_of(names[kind], _MOST_NAMED)})" for kind in stale)
        text = (
            f"nothing that is trained of {named} has changed since step {before}: look whether the optimizer "
            "trains this model, whether a gradient scaler skips every step, and at the learning rate"
        )
        if self._policy == "refuse":
            raise SaveError(f"step {step} was not saved: {text}", step=step, phase="commit")
        _logger.warning("step %d: %s. on_stale='ignore' says nothing of it", step, text)

    def committed(self) -> None:
        """Remember what was judged last, for the next save."""
        self._last = self._next
