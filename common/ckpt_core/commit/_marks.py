"""Which checkpoints nobody should go on from, in `damaged.json`, for people and jobs that come later.

Either they did not verify (`damaged`), or their bytes are as they were written and a person or a check has
found the training in them bad (`bad`). Nothing is deleted for a mark. One of damage is advice, and losing it
costs no more than another verification.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, final

from ckpt_core import codec
from ckpt_core.commit._manifest import Marker
from ckpt_core.commit._once import is_well, warn_once
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CorruptCheckpointError
from ckpt_core.names import DAMAGED, FORMAT_VERSION
from ckpt_core.storage import Storage, read_small

_logger = logger_of(__name__)

MAX_MARKS: Final = 1000
"""Of either kind."""
MAX_PROBLEM: Final = 400
"""Characters; the rest is cut off."""

MAX_MARKS_BYTES: Final = 16 << 20
"""As many marks as may be, with names and problems as long as may be, take less."""

_MAX_ID: Final = 64


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What is wrong with one checkpoint.

    Attributes:
        save_id: of the save that wrote the checkpoint, so that another of its name is not meant.
        problem: what is wrong, in words.
        found: Unix time in seconds.
    """

    save_id: str
    problem: str
    found: float

    @classmethod
    def of(cls, marker: Marker, problem: str, *, found: float) -> Mark:
        """The mark of the checkpoint with that marker."""
        return cls(save_id=marker.save_id[:_MAX_ID], problem=problem[:MAX_PROBLEM], found=found)

    def means(self, save_id: str) -> bool:
        """Whether the checkpoint that this save wrote is the one that was marked."""
        return self.save_id == save_id[:_MAX_ID]

    def says_as_much_as(self, other: Mark | None) -> bool:
        """Whether the other is of the same checkpoint, for the same reason."""
        return other is not None and (self.save_id, self.problem) == (other.save_id, other.problem)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """All marks of a root: name of a checkpoint -> its mark, of either kind."""

    damaged: Mapping[str, Mark] = field(default_factory=dict[str, Mark])
    bad: Mapping[str, Mark] = field(default_factory=dict[str, Mark])


def read_marks(storage: Storage) -> Marks:
    """The marks; none if nothing was ever marked.

    Raises:
        CorruptCheckpointError: the file is malformed, or has changed since it was written.
        IncompatibleCheckpointError: it was written by a newer version.
        OSError: it cannot be read.
    """
    try:
        content = read_small(storage, DAMAGED, MAX_MARKS_BYTES)
    except FileNotFoundError:
        return Marks()
    vouched = codec.has_checksum(content, source=DAMAGED)
    with codec.Fields.parse(content, source=DAMAGED) as fields:
        if not vouched:
            raise ValueError("it does not name its checksum")
        bad = {} if fields.optional("bad") is None else fields.mapping("bad", dict)
        return Marks(damaged=_read(fields.mapping("checkpoints", dict)), bad=_read(bad))


def known_marks(storage: Storage) -> Marks:
    """The marks, for those who only look; if they cannot be read there are none, and the log says so."""
    try:
        marks = read_marks(storage)
    except (CheckpointError, OSError) as error:
        nothing = "nothing counts as damaged before it is verified again, and nothing as bad"
        warn_once(storage, DAMAGED, str(error), so_that=nothing)
        return Marks()
    is_well(storage, DAMAGED)
    return marks


def marks_to_change(storage: Storage) -> Marks:
    """The marks, for one who will write them: what is malformed is lost anyway, all else is an error.

    Raises:
        IncompatibleCheckpointError: they were written by a newer version.
        OSError: they cannot be read.
    """
    try:
        return read_marks(storage)
    except CorruptCheckpointError as error:
        _logger.warning("what was marked in %s is forgotten: %s", storage.url, error)
        return Marks()


def problem_of(marks: Mapping[str, Mark], name: str, save_id: str) -> str | None:
    """What the marks say is wrong with the checkpoint of that name and save; None if it is not marked."""
    mark = marks.get(name)
    return mark.problem if mark is not None and mark.means(save_id) else None


def replace_marks(storage: Storage, marks: Marks) -> None:
    """Write the marks, of too many the latest; a reader sees the old ones or the new ones."""
    fields = {"format_version": FORMAT_VERSION, "checkpoints": _latest(marks.damaged)}
    if marks.bad:
        fields["bad"] = _latest(marks.bad)
    # In ASCII: the name of a directory need not be valid Unicode.
    content = json.dumps(fields, separators=(",", ":")).encode()
    storage.replace(DAMAGED, codec.add_checksum(content))


def _latest(marks: Mapping[str, Mark]) -> dict[str, dict[str, Any]]:
    names = sorted(marks, key=lambda name: (marks[name].found, name))[-MAX_MARKS:]
    return {name: asdict(marks[name]) for name in names}


def _read(marks: Mapping[str, dict[str, Any]]) -> dict[str, Mark]:
    return {name: _mark(codec.Fields(mark)) for name, mark in marks.items()}


def _mark(fields: codec.Fields) -> Mark:
    return Mark(
        save_id=fields.get("save_id", str),
        problem=fields.get("problem", str)[:MAX_PROBLEM],
        found=fields.number("found"),
    )
