"""What the tiers of a root hold of its checkpoints, a column each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

from ckpt_core.cli._arguments import is_local, open_root, storage_options
from ckpt_core.commit import Catalog, Owner, Survey
from ckpt_core.errors import CheckpointError
from ckpt_core.hosting import root_of
from ckpt_core.names import WRITER
from ckpt_core.storage import Storage, open_storage
from ckpt_core.tiers import TierRecord, United, read_tiers, unite
from ckpt_core.types import CheckpointInfo

_PATIENCE_SECONDS: Final = 60.0
"""A tier that does not answer must not keep the others from being listed; a request has a third of it."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TierColumn:
    """One tier, as far as it could be listed.

    Attributes:
        record: of the tier; None for the root itself.
        survey: what it holds; None if it cannot be reached.
        problem: why it cannot.
        running: whether a job may be uploading there now.
    """

    label: str
    record: TierRecord | None = None
    survey: Survey | None = None
    problem: str = ""
    running: bool = True

    def state(self, info: CheckpointInfo) -> str:
        """Return the state of a checkpoint in this tier, in a word or two."""
        if self.survey is None:
            return "?"
        found = next((each for each in self.survey.everything if each.save_id == info.save_id), None)
        if found is not None:
            return "committed" if found.damaged is None else "damaged"
        if info.name in self.survey.unreadable:
            return "damaged"
        if self.record is None:
            return "missing"
        begun = self.record.uploading
        if begun is not None and begun.name == info.name:
            word = "uploading" if self.running else "waiting"
            return f"{word} {100 * begun.done_bytes // max(begun.size_bytes, 1)} %"
        return "waiting" if info.name in self.record.due else "missing"

    @property
    def waiting(self) -> bool:
        """Whether something is due that nobody uploads."""
        record = self.record
        return record is not None and not self.running and bool(record.due or record.uploading)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TierColumns:
    """The columns of a root that has further tiers.

    Attributes:
        columns: the root first.
        united: the checkpoints of all of them, each once.
    """

    columns: Sequence[TierColumn]
    united: United

    @property
    def fields(self) -> list[Mapping[str, Any]]:
        """The fields of the further tiers for `--json`."""
        return [
            {
                "url": column.label,
                "every": record.every,
                "due": list(record.due),
                "uploading": None if record.uploading is None else asdict(record.uploading),
                "problem": column.problem or None,
                "checkpoints": [
                    {
                        "step": info.step,
                        "name": info.name,
                        "save_id": info.save_id,
                        "state": None if column.survey is None else column.state(info),
                    }
                    for info in self.united.infos
                ],
            }
            for column in self.columns
            if (record := column.record) is not None
        ]

    @property
    def lines(self) -> list[str]:
        """What is wrong with a tier, for people."""
        root = self.columns[0].label
        return [
            *(f"cannot be reached: {each.label}: {each.problem}" for each in self.columns if each.problem),
            *(
                f"waiting, and no job uploads: {each.label}: the next run does, or `ckpt upload {root}`"
                for each in self.columns
                if each.waiting
            ),
        ]


def open_with_tiers(arguments: Namespace) -> Storage:
    """Open a root.

    Options of storage are for its tiers if it is a path and they are not.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        ConfigError: it cannot be opened, or takes no options.
    """
    options = arguments.storage_options
    if options and is_local(arguments.root):
        records, _ = _records(open_storage(root_of(arguments.root)))
        if not all(map(is_local, (getattr(arguments, "to", None) or "", *(each.url for each in records)))):
            return open_root(arguments.root, {})
    return open_root(arguments.root, options)


def options_for(url: str, arguments: Namespace) -> dict[str, Any]:
    """Return the storage options of a command for one tier."""
    return {} if is_local(url) else storage_options(arguments.storage_option, url)


def tier_columns(storage: Storage, survey: Survey, arguments: Namespace) -> tuple[TierColumns | None, str]:
    """List the further tiers of a root.

    Returns:
        The columns, None if there are no tiers; and what is wrong with the file that names them, or "".
    """
    records, problem = _records(storage)
    if not records:
        return None, problem
    columns = [TierColumn(label=storage.url, survey=survey)]
    running = _may_have_writer(storage)
    columns += [replace(_column(record, arguments), running=running) for record in records]
    united = unite([column.survey for column in columns if column.survey is not None])
    return TierColumns(columns=columns, united=united), problem


def _records(storage: Storage) -> tuple[list[TierRecord], str]:
    try:
        return read_tiers(storage), ""
    except (CheckpointError, OSError) as error:
        return [], str(error)


def _may_have_writer(storage: Storage) -> bool:
    """Return whether a job may be writing to a root; never takes its lock."""
    owner = Owner.of(storage)
    if owner is None or not owner.pid:
        return storage.lock_holder(WRITER) is not None
    return not owner.has_ended


def _column(record: TierRecord, arguments: Namespace) -> TierColumn:
    try:
        options = options_for(record.url, arguments)
        tier = open_storage(root_of(record.url), options, deadline_seconds=_PATIENCE_SECONDS)
        return TierColumn(label=record.url, record=record, survey=Catalog(tier).survey())
    except (CheckpointError, OSError) as error:
        return TierColumn(label=record.url, record=record, problem=str(error))
