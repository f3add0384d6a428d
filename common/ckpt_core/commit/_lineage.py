"""Lineages: the checkpoints of the present run, and those that it abandoned.

A lineage is an unbroken line of saves. A save that continues from the newest checkpoint continues its
lineage. A fresh start, or a save after a return to an older checkpoint, begins a new one, which records its
ancestry. The lineage with the highest number is the present one: numbers decide, because clocks cannot be
trusted.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

from ckpt_core.formats import codec
from ckpt_core.types import CheckpointInfo, Lineage

MAX_ANCESTORS: Final = 1000
"""Older ancestors count as abandoned. The bound keeps markers fast to read."""

_last_begun = attrgetter("lineage.number", "created", "lineage.id")
_ID: Final = re.compile(r"[0-9a-f]{8,32}")


def on_present_line(infos: Sequence[CheckpointInfo], present: Lineage | None = None) -> list[CheckpointInfo]:
    """Return the checkpoints with `abandoned` set, oldest step first.

    Within one step, abandoned ones come first, and the lineage begun last comes last.
    """
    present = present_lineage(infos) if present is None else present
    limits = present.limits()
    judged = [
        info if info.abandoned is abandoned else replace(info, abandoned=abandoned)
        for info in infos
        for abandoned in (info.step > limits.get(info.lineage.id, -1),)
    ]
    return sorted(judged, key=by_step)


def present_lineage(infos: Sequence[CheckpointInfo], others: Sequence[Lineage] = ()) -> Lineage:
    """Return the lineage with the highest number; of several, the one saved to last.

    `others` are those of checkpoints whose markers cannot be read: if the newest checkpoint is damaged, an
    older run must not count as the present one, or a resume would continue what was abandoned.
    """
    found = [(lineage.number, 0.0, lineage.id, lineage) for lineage in others]
    if infos:
        last = max(infos, key=_last_begun)
        found.append((*_last_begun(last), last.lineage))
    return max(found, key=lambda each: each[:3])[3] if found else Lineage()


def next_lineage(
    infos: Sequence[CheckpointInfo],
    present: Lineage,
    origin: CheckpointInfo | None,
    step: int,
    *,
    branch: bool = False,
) -> tuple[Lineage, bool]:
    """Return the lineage of a save continuing from `origin`, and whether it is new.

    Args:
        infos: every committed checkpoint of the root.
        present: the root's present lineage.
        origin: the checkpoint that the state was loaded from; None if from none of this root.
        step: of the save. If it is before that of its origin, the checkpoints between them are abandoned.
        branch: whether it is new although it continues the newest, which stays on the line.
    """
    new = Lineage(id=secrets.token_hex(4), number=present.number + 1)
    if origin is None:
        return new, True
    line = [info for info in on_present_line(infos, present) if not info.abandoned]
    continues = bool(line) and is_same(line[-1], origin) and step >= origin.step
    if continues and not branch and origin.lineage == present and present.number:
        return present, False
    last = origin.step if step >= origin.step else step - 1
    older = ((origin.lineage.id, last), *((each, min(end, last)) for each, end in origin.lineage.ancestry))
    ancestry = tuple(
        (each, end)
        for each, end in older[:MAX_ANCESTORS]
        if any(info.lineage.id == each and info.step <= end for info in infos)
    )
    return replace(new, ancestry=ancestry), not continues


def is_same(one: CheckpointInfo, other: CheckpointInfo) -> bool:
    """Return whether both are the same checkpoint, not one replaced by the other."""
    return (one.name, one.save_id, one.created) == (other.name, other.save_id, other.created)


def to_fields(lineage: Lineage) -> dict[str, Any]:
    """Return the fields for a manifest or marker; none for a checkpoint of no lineage."""
    if not lineage.number:
        return {}
    ancestry = [[each, step] for each, step in lineage.ancestry]
    return {"lineage": {"id": lineage.id, "number": lineage.number, "ancestry": ancestry}}


def from_fields(fields: codec.Fields) -> Lineage:
    """Read the lineage from a manifest or marker; ValueError for bad values."""
    found = fields.optional("lineage")
    if found is None:
        return Lineage()
    ancestry = found.get("ancestry", list)
    if len(ancestry) > MAX_ANCESTORS or any(type(pair) is not list or len(pair) != 2 for pair in ancestry):
        raise ValueError(f"'ancestry' should be at most {MAX_ANCESTORS} pairs of lineage and step")
    return Lineage(
        id=_id(found.get("id", str)),
        number=found.count("number", least=1),
        ancestry=tuple(
            ("" if each == "" else _id(each), codec.count(step, "step")) for each, step in ancestry
        ),
    )


def _id(value: object) -> str:
    if type(value) is not str or not _ID.fullmatch(value):
        raise ValueError(f"the id of a lineage should be 8 to 32 lower-case hex digits, not {value!r:.80}")
    return value


def by_step(info: CheckpointInfo) -> tuple[int, bool, int, float]:
    """Return the place of a checkpoint in a listing, by its step and lineage."""
    return info.step, not info.abandoned, info.lineage.number, info.created
