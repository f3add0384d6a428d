"""Parameter groups of a checkpoint, matched to live ones by their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from ckpt_core._torch_internals import without_step_hooks
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.types import SavedEntries, SavedState


def probe(optimizer: torch.optim.Optimizer, group: int, parameter: torch.Tensor) -> Mapping[str, Any]:
    """Return the state that the first step of `optimizer` creates for `parameter`.

    Steps a throw-away copy.
    """
    copy = nn.Parameter(torch.zeros_like(parameter))
    copy.grad = torch.zeros_like(parameter)
    double = object.__new__(type(optimizer))
    double.__dict__.update(optimizer.__dict__)
    double.__dict__.update(
        state=defaultdict(dict),
        param_groups=[{**optimizer.param_groups[group], "params": [copy]}],
        **without_step_hooks(),
    )
    # The instance's `step` may be a scheduler's wrapper around the live optimizer.
    type(optimizer).step(double)
    state: dict[str, Any] = double.state[copy]
    return state


_STATE = "state."
_GROUP = "param_groups."


def is_flat(state: Mapping[Any, Any]) -> bool:
    """Return whether `state` is in the flattened form."""
    return any(str(key).startswith((_STATE, _GROUP)) for key in state)


def split(key: str, names: Collection[str]) -> tuple[str, str] | None:
    """Split `state.<parameter>.<name>` into (parameter, name).

    None if no parameter in `names` matches.
    """
    parts = key.removeprefix(_STATE).split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        if name in names:
            return name, ".".join(parts[end:])
    return None


def nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a flattened state to the nested form, with one group per parameter."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith(_GROUP):
            # Hyperparameters have no dots in their names.
            name, _, option = key.removeprefix(_GROUP).rpartition(".")
            groups.setdefault(name, {"params": [name]})[option] = value
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        found = split(key, groups) if key.startswith(_STATE) else None
        if found is not None:
            by_name.setdefault(found[0], {})[found[1]] = value
    return {"state": by_name, "param_groups": list(groups.values())}


Fit: TypeAlias = Literal["same", "part", "any"]
"""Which parameters the saved groups may hold: the `same` as the live ones; more, of which the live ones are a
`part` (other ranks train the rest); or `any`: missing ones start with fresh state."""


def fit_of(saved: SavedState) -> Fit:
    """Return how the groups of a checkpoint must fit the live ones."""
    if not saved.strict:
        return "any"
    return "part" if saved.partial else "same"


# How a step is computed, not its result: the live optimizer's choice is kept, because it depends on the
# device, the strategy and the torch version.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "param_names")
_OF_TORCH = "torch.optim."
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")


def arrange(
    live: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
    resolve: Callable[[str], str],
    *,
    fit: Fit = "same",
) -> list[dict[str, Any]]:
    """Return the saved hyperparameters as one dict (without `params`) per live group.

    Args:
        live: the live groups.
        names: names of the parameters of each live group.
        saved: the saved groups; their `params` are names.
        resolve: maps a saved name to the live one (a tied parameter has several).
        fit: which parameters the saved groups may hold.

    Raises:
        IncompatibleCheckpointError: the groups hold other parameters, or a live group mixes parameters
            that were saved with different hyperparameters.
    """
    owner = check_members(names, saved, resolve, fit=fit)
    empty = [index for index, group in enumerate(saved) if not group.get("params")]
    arranged: list[dict[str, Any]] = []
    for index, (group, members) in enumerate(zip(live, names, strict=True)):
        sources = sorted({owner[name] for name in members if name in owner}) or empty[:1]
        _check_agreement(index, members, [(source, saved[source]) for source in sources], owner)
        arranged.append(_merge(group, saved[sources[0]] if sources else {}))
    return arranged


def check_entries(optimizer: torch.optim.Optimizer, saved: SavedEntries) -> None:
    """Check by names that a checkpoint is of this kind of optimizer; torch does not.

    New releases of torch add options, and so do schedulers and users; some options add names to the state. An
    optimizer of another kind has other options and other state.

    Args:
        optimizer: the live one; it is not changed.
        saved: its entries in the checkpoint.

    Raises:
        IncompatibleCheckpointError: it is of another kind.
    """
    options = {str(path[2]) for path in saved if path[0] == "param_groups" and len(path) > 2}
    state = {str(path[2]) for path in saved if path[0] == "state" and len(path) > 2}
    missing = sorted(set(optimizer.defaults) - options - {*_IMPLEMENTATION, *_OF_SCHEDULERS})
    known = set(optimizer.defaults).union(*optimizer.param_groups)
    foreign = sorted(options - known - {*_IMPLEMENTATION, *_OF_SCHEDULERS})
    # Before the first step there is no state to compare.
    differ = missing or foreign if state else missing and foreign
    if not options or not differ or (live := _state_names(optimizer)) == state:
        return
    missing += sorted((live or set()) - state)
    foreign += sorted(state - (live or set()))
    raise IncompatibleCheckpointError(
        f"the checkpoint is of another kind of optimizer than {type(optimizer).__name__}: it has "
        f"{', '.join(foreign) or 'nothing else'} and lacks {', '.join(missing) or 'nothing'}",
        missing=missing,
        unexpected=foreign,
    )


def class_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the classes of an optimizer, its own first, up to one of torch."""
    names: list[str] = []
    for each in type(optimizer).__mro__[: type(optimizer).__mro__.index(torch.optim.Optimizer)]:
        names.append(f"{each.__module__}.{each.__qualname__}")
        if names[-1].startswith(_OF_TORCH):
            break
    return names


def check_class(optimizer: torch.optim.Optimizer, saved: Sequence[str]) -> None:
    """Check that a checkpoint is of this class of optimizer, or of a relative.

    That is the same class of torch, or one that inherits from the other.

    Classes are known by their own names: modules move.

    Args:
        optimizer: the live one.
        saved: its `class_names` at the save.

    Raises:
        IncompatibleCheckpointError: it is of another class.
    """
    live = class_names(optimizer)
    then, now = ([name.rpartition(".")[2] for name in names] for names in (saved, live))
    of_torch = saved[-1].startswith(_OF_TORCH) and live[-1].startswith(_OF_TORCH)
    if then[-1] != now[-1] if of_torch else then[0] not in now and now[0] not in then:
        raise IncompatibleCheckpointError(
            f"the checkpoint is of another kind of optimizer: {saved[0]} was saved, and the live one is "
            f"{live[0]}, to which the same values mean something else. Build the one that was saved, or load "
            "the rest without it",
            mismatched=[f"{saved[0]} != {live[0]}"],
        )


def _state_names(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """Return the names of the state that is there, or that a first step creates.

    None if they are not known.
    """
    kept = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    if not kept:
        number, group = next((n, g) for n, g in enumerate(optimizer.param_groups) if g["params"])
        try:
            kept = [probe(optimizer, number, group["params"][0])]
        except Exception:  # noqa: BLE001 - of anyone's step, as for lack of a closure; its names stay unknown
            return None
    return {str(name) for state in kept for name in state}


def check_members(
    names: Sequence[Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
    resolve: Callable[[str], str],
    *,
    fit: Fit = "same",
) -> dict[str, int]:
    """Map every parameter's live name to the index of its saved group.

    Arguments as in `arrange`.

    Raises:
        IncompatibleCheckpointError: the groups hold other parameters.
    """
    owner = {resolve(name): index for index, group in enumerate(saved) for name in group.get("params", ())}
    _check_names({name for group in names for name in group}, set(owner), fit)
    return owner


def _check_names(live: set[str], saved: set[str], fit: Fit) -> None:
    missing = sorted(live - saved) if fit != "any" else []
    unexpected = sorted(saved - live) if fit == "same" else []
    if missing or unexpected:
        raise IncompatibleCheckpointError(
            "the checkpoint's optimizer trained other parameters: "
            f"not in the checkpoint: {', '.join(missing[:5]) or 'none'}; "
            f"not in the live optimizer: {', '.join(unexpected[:5]) or 'none'}",
            missing=missing,
            unexpected=unexpected,
        )


def _check_agreement(
    index: int,
    members: Sequence[str],
    sources: Sequence[tuple[int, Mapping[str, Any]]],
    owner: Mapping[str, int],
) -> None:
    if not sources:
        return
    first_index, first = sources[0]
    for other_index, other in sources[1:]:
        differing = sorted(
            key
            for key in (set(first) | set(other)) - {"params", *_IMPLEMENTATION}
            if not _same(first.get(key), other.get(key))
        )
        if differing:
            example = [
                next(name for name in members if owner.get(name) == each)
                for each in (first_index, other_index)
            ]
            raise IncompatibleCheckpointError(
                f"parameter group {index} of the live optimizer holds parameters that were saved in groups "
                f"with different {', '.join(differing)}: {example[0]} in group {first_index}, {example[1]} "
                f"in group {other_index}; build the optimizer with the groups that were saved",
                mismatched=[f"{key}: {first.get(key)!r} != {other.get(key)!r}" for key in differing],
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    return bool(one == other)


def _merge(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: value for key, value in live.items() if key != "params"}
    for key, value in saved.items():
        if key != "params" and not (key in _IMPLEMENTATION and key in live):
            merged[key] = _of_kind(live.get(key), value)
    return merged


def _of_kind(live: Any, saved: Any) -> Any:
    """Convert `saved` to a tensor where the live value is one, else to a number."""
    if isinstance(live, torch.Tensor) and isinstance(saved, int | float):
        return torch.full_like(live, saved)
    if isinstance(live, int | float) and isinstance(saved, torch.Tensor) and saved.numel() == 1:
        return saved.item()
    return saved
