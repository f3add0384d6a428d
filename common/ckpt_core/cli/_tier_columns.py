"""What the tiers of a root hold of its checkpoints, a column each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

from ckpt_core.cli._arguments import is_local, storage_options
from ckpt_core.commit import Catalog, Owner, Survey
from ckpt_core.crew import run_all
from ckpt_core.disclosure import public_url
from ckpt_core.errors import CheckpointError
from ckpt_core.hosting import root_of
from ckpt_core.names import WRITER
from ckpt_core.storage import Storage, open_storage
from ckpt_core.tiers import TierRecord, United, read_tiers, unite
from ckpt_core.types import CheckpointInfo

_PATIENCE_SECONDS: Final = 60.0
"""A tier that does not answer must not keep the others from being listed; a request has a third of it."""
_MOST_TIERS: Final = 16


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TierColumn:
    """One tier, as far as it could be listed."""

    label: str
    record: TierRecord | None = None
    survey: Survey | None = None
    problem: str = ""
    running: bool = True

    def state(self, info: CheckpointInfo) -> str:
        """Return the state of a checkpoint in this tier, "?" if it is not known."""
        there = () if self.survey is None else self.survey.everything
        found = next((each for each in there if each.save_id == info.save_id), None)
        if found is not None:
            return "committed" if found.damaged is None else "damaged"
        if self.survey is not None and info.name in self.survey.unreadable:
            return "damaged"
        begun = None if self.record is None else self.record.uploading
        if begun is not None and begun.name == info.name:
            word = "uploading" if self.running else "waiting"
            return f"{word} {100 * begun.done_bytes // max(begun.size_bytes, 1)} %"
        if self.record is not None and info.name in self.record.due:
            return "waiting"
        return "?" if self.survey is None else "missing"

    @property
    def waiting(self) -> bool:
        """Whether something is due that nobody uploads."""
        record = self.record
        return record is not None and not self.running and bool(record.due or record.uploading)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TierColumns:
    """The columns of a root that has further tiers."""

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
                        "state": None if (state := column.state(info)) == "?" else state,
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
                f"waiting, and no job uploads: {each.label}: the next run does, or "
                f"`ckpt upload {root} --to {each.label}`"
                for each in self.columns
                if each.waiting
            ),
            *(
                f"not asked: {each.label}: `ckpt ls {root} --tier {each.label}`, or --tiers for all"
                for each in self.columns
                if each.survey is None and not each.problem
            ),
        ]


def options_for(url: str, arguments: Namespace) -> dict[str, Any]:
    """Return the storage options of a command for one tier."""
    return {} if is_local(url) else storage_options(arguments.storage_option, url)


def tier_columns(storage: Storage, survey: Survey, arguments: Namespace) -> tuple[TierColumns | None, str]:
    """List the further tiers of a root.

    The writer of the root chose them. So none is asked unless the user says so, and only what the user names
    gets options.
    """
    try:
        records, problem = read_tiers(storage), ""
    except (CheckpointError, OSError) as error:
        records, problem = [], str(error)
    named = {public_url(url).rstrip("/"): url for url in arguments.tier}
    urls = {record.url.rstrip("/") for record in records}
    records += [TierRecord(url=url) for url in named if url not in urls]
    if not records:
        return None, problem
    running = _may_have_writer(storage)
    columns = [TierColumn(label=each.url, record=each, running=running) for each in records]

    def look(number: int) -> None:
        url = named.get(records[number].url.rstrip("/"))
        if url is not None or (arguments.tiers and number < _MOST_TIERS):
            options = {} if url is None else options_for(url, arguments)
            columns[number] = _asked(columns[number], url or records[number].url, options)

    run_all(look, range(len(columns)), _MOST_TIERS, name="ckpt-tier")
    columns.insert(0, TierColumn(label=storage.url, survey=survey))
    united = unite([column.survey for column in columns if column.survey is not None])
    return TierColumns(columns=columns, united=united), problem


def _may_have_writer(storage: Storage) -> bool:
    """Return whether a job may be writing to a root; never takes its lock."""
    owner = Owner.of(storage)
    if owner is None or not owner.pid:
        return storage.lock_holder(WRITER) is not None
    return not owner.has_ended


def _asked(column: TierColumn, url: str, options: Mapping[str, Any]) -> TierColumn:
    try:
        tier = open_storage(root_of(url), options, deadline_seconds=_PATIENCE_SECONDS)
        return replace(column, survey=Catalog(tier).survey())
    except (CheckpointError, OSError) as error:
        return replace(column, problem=str(error))
