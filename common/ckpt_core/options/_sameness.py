"""The options that all ranks must be given alike, and how they differ.

They are compared as text, without secrets or memory addresses: equal options of two processes have equal
text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, Final

from ckpt_core.cadence import OnPreemption
from ckpt_core.disclosure import public_url
from ckpt_core.errors import first_of
from ckpt_core.options._options import CheckpointOptions, Upload
from ckpt_core.policies import RetentionPolicy, SavePolicy

OF_EACH_RANK: Final = frozenset(
    {"staging_memory", "write_bandwidth", "writers", "priority", "storage_options"}
)
"""Options that belong to one process or node: its memory, disk, cores and credentials."""
OF_EACH_UPLOAD: Final = frozenset({"bandwidth", "storage_options"})
OF_COORDINATOR: Final = frozenset({"sign_manifest", "verify_manifest"})
"""Options that only the coordinator uses; it must have them if any rank does, which may lack the key."""
_OF_EACH_NODE: Final = frozenset({"file", "when"})
"""Where an `OnPreemption` looks; each rank looks for itself, and one is enough."""
_NEEDS: Final = ("needs_agreement", "needs_costs", "needs_failures")
"""What a save policy says about itself, by which ranks communicate or do not."""
_MOST_OPTIONS: Final = 6
_MOST_VALUES: Final = 4
_MOST_RANKS: Final = 4
_LONGEST: Final = 160
_CONTEXT: Final = 40


def given_options(options: CheckpointOptions) -> dict[str, str]:
    """Return the options that ranks must be given alike, as text, without defaults."""
    return {name: text for name, text in _all_given(options).items() if text != _DEFAULTS.get(name)}


def _all_given(options: CheckpointOptions) -> dict[str, str]:
    found = {
        each.name: text_of(getattr(options, each.name))
        for each in fields(options)
        if each.name not in OF_EACH_RANK | OF_COORDINATOR
    }
    found |= {name: "given" for name in sorted(OF_COORDINATOR) if getattr(options, name) is not None}
    # As they are used, not as they are written: "2 GiB" and 2147483648 are the same.
    found["headroom"] = text_of(options.free_headroom)
    found["verify"] = text_of(None if options.verify is None else options.verification)
    initial = options.initial_weights  # whose storage options belong to one process
    found["init_from"] = text_of(None if initial is None else (public_url(initial.place), initial))
    found["upload"] = " and ".join(upload.url for upload in options.uploads) or "None"
    found["export"] = " and ".join(map(text_of, options.exports)) or "None"
    for number, upload in enumerate(options.uploads):
        place = f"upload[{number}]" if len(options.uploads) > 1 else "upload"
        own = (each.name for each in fields(Upload) if each.init and each.name not in OF_EACH_UPLOAD | {"to"})
        found |= {f"{place}.{name}": text_of(getattr(upload, name)) for name in own}
    if options.save is not None:
        found |= {f"save.{name}": text_of(getattr(options.save, name)) for name in _NEEDS}
        found["save.counts"] = text_of(options.save.counts)
    return found


def text_of(value: Any) -> str:
    """Return the text of a value, the same for equal values of two processes."""
    if value is None or isinstance(value, bool | str | bytes):
        return repr(value)
    if isinstance(value, Integral):
        return repr(int(value))
    if isinstance(value, Real):
        number = float(value)
        return repr(int(number)) if number.is_integer() else repr(number)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(text_of, value))})"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(text_of, value))) + "}"
    return _text_of_object(value)


def _text_of_object(value: Any) -> str:
    kind = type(value).__qualname__
    if isinstance(value, Enum):
        return f"{kind}.{value.name}"
    if isinstance(value, PurePath):
        return repr(str(value))
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(sorted(f"{text_of(key)}: {text_of(each)}" for key, each in value.items())) + "}"
        )
    if is_dataclass(value) and not isinstance(value, type):
        hidden = _OF_EACH_NODE if isinstance(value, OnPreemption) else frozenset[str]()
        shown = [
            each.name for each in fields(value) if each.repr and each.compare and each.name not in hidden
        ]
        return f"{kind}({', '.join(f'{name}={text_of(getattr(value, name))}' for name in shown)})"
    if isinstance(value, SavePolicy | RetentionPolicy):
        return f"{kind}({', '.join(f'{name}={text_of(each)}' for name, each in _settings_of(value))})"
    return str(getattr(value, "__qualname__", kind))  # no more: a function may be bound to a key


def _settings_of(policy: Any) -> list[tuple[str, Any]]:
    """Return the public numbers and policies of a user's own policy.

    Others may be its state, which differs between ranks, or secrets.
    """
    state = object.__getstate__(policy)
    parts = state if isinstance(state, tuple) else (state,)
    found = {name: each for part in parts if isinstance(part, Mapping) for name, each in part.items()}
    return sorted((name, each) for name, each in found.items() if name[:1] != "_" and _is_setting(each))


def _is_setting(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_setting, value))
    return isinstance(value, Real | SavePolicy | RetentionPolicy)


_DEFAULTS: Final = _all_given(CheckpointOptions())


def difference(given: Sequence[Mapping[str, str]]) -> str:
    """Return how options differ between ranks; "" if they do not."""
    different = [
        name
        for name in sorted({name for each in given for name in each})
        if (
            name not in given[0]
            if name in OF_COORDINATOR
            else len({_given(name, each) for each in given}) > 1
        )
    ]
    # What an upload or a policy is in detail matters only where all ranks have the same one.
    different = [
        name
        for name in different
        if "." not in name or name.partition(".")[0].partition("[")[0] not in different
    ]
    shown = [f"{name} is {_values(name, given)}" for name in different[:_MOST_OPTIONS]]
    more = len(different) - len(shown)
    return "; ".join(shown) + (f"; and {more} more options" if more > 0 else "")


def _given(name: str, by_rank: Mapping[str, str]) -> str:
    return by_rank.get(name, _DEFAULTS.get(name, "None"))


def _values(name: str, given: Sequence[Mapping[str, str]]) -> str:
    """Return the values of an option with the ranks that have them, rank 0 first.

    A long one is shown from where it differs from others.
    """
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(given):
        ranks.setdefault(_given(name, each), []).append(rank)
    common = os.path.commonprefix(list(ranks))  # noqa: RUF071 - texts, no paths
    begin = max(0, len(common) - _CONTEXT) if len(ranks) > 1 else 0
    shown = []
    for text, having in list(ranks.items())[:_MOST_VALUES]:
        if len(text) > _LONGEST:
            rest = text[begin:]
            text = f"{'…' if begin else ''}{rest[:_LONGEST]}{'…' if len(rest) > _LONGEST else ''}"  # noqa: PLW2901
        shown.append(f"{text} on {_ranks(having)}")
    more = len(ranks) - len(shown)
    return ", ".join(shown) + (f" and {more} other values" if more > 0 else "")


def _ranks(having: Sequence[int]) -> str:
    if len(having) == 1:
        return f"rank {having[0]}"
    if list(having) == list(range(having[0], having[-1] + 1)):
        return f"ranks {having[0]} to {having[-1]}"
    return f"ranks {first_of(list(map(str, having)), _MOST_RANKS)}"
