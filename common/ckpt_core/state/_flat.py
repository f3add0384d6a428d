"""Torch's flattened form of optimizer state (`flatten_optimizer_state_dict=True`, torchtitan), read only.

Keys are `state.<parameter>.<name>` and `param_groups.<parameter>.<hyperparameter>`; as parameters' names have
dots themselves, only the names of a model, or the keys of the other half, tell where they end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_STATE = "state."
_GROUP = "param_groups."


def is_flat(state: Mapping[Any, Any]) -> bool:
    """Whether `state` is in the flattened form."""
    return any(str(key).startswith((_STATE, _GROUP)) for key in state)


def split(key: str, names: Collection[str]) -> tuple[str, str] | None:
    """`state.<parameter>.<name>` as (parameter, name), or None if no parameter in `names` fits."""
    parts = key.removeprefix(_STATE).split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        if name in names:
            return name, ".".join(parts[end:])
    return None


def nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """The nested form of a flattened state, with one group for every parameter."""
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
