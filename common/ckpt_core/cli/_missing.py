"""`upload`: send to the further tiers of a root what its job has left."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial

from ckpt_core.cli._arguments import Commands, claimed, open_target
from ckpt_core.cli._cp import CopySource, add_copy_options, copy_all, outcome, pace_of
from ckpt_core.cli._outcome import Outcome
from ckpt_core.cli._tier_columns import open_with_tiers, options_for
from ckpt_core.commit import Catalog, Owner, Survey
from ckpt_core.disclosure import public_url
from ckpt_core.errors import CheckpointNotFoundError, ConfigError, RootBusyError
from ckpt_core.names import TIERS, WRITER
from ckpt_core.storage import Storage, excludes_others
from ckpt_core.tiers import TierRecord, read_tiers
from ckpt_core.types import CheckpointInfo


def add(commands: Commands, shared: ArgumentParser) -> None:
    """Add the command to those of `ckpt`."""
    command = commands.add_parser(
        "upload",
        parents=[shared],
        help="upload what a job that ended has left in its local root",
        description="Uploads to the tiers that the root's tiers.json names: what was due and is not there, "
        "and the newest. Verified and resumable as `cp`. A live job uploads by itself.",
    )
    command.add_argument("root", metavar="ROOT", help="path of a run")
    command.add_argument("--to", metavar="URL", help="only to this place, which tiers.json need not name")
    command.add_argument("--all", action="store_true", help="everything of the present lineage")
    add_copy_options(command)
    command.set_defaults(command=run)


def run(arguments: Namespace) -> Outcome:
    """Upload what is due, and the newest, to every tier or to the one named."""
    pace = pace_of(arguments)
    storage = open_with_tiers(arguments)
    records = read_tiers(storage)
    chosen = _chosen(records, arguments, storage.url)
    ended = _owner_that_ended(storage, records if any(each in records for each in chosen) else ())
    survey = Catalog(storage).survey()
    if not survey.committed:
        nothing = CheckpointNotFoundError(f"{storage.url}: no checkpoint is committed there")
        raise next(iter(survey.unreadable.values()), nothing)
    outcomes = []
    for record in chosen:
        target = open_target(arguments.to or record.url, options_for(record.url, arguments))
        if target.url == storage.url:
            raise ConfigError(f"{target.url} is the root itself: name another place to upload to")
        there = Catalog(target).survey()
        infos = survey.committed if arguments.all else _due(record, survey, there)
        names = {info.save_id: info.name for info in there.everything}
        selection = CopySource(
            source=storage,
            # What the tier has by another name, because its own was taken, is not sent again.
            infos=[info for info in infos[::-1] if names.get(info.save_id, info.name) == info.name],
            relatives=survey.everything,
            is_run=True,
            renames=True,
        )
        claim = partial(claimed, target, "ckpt upload", take_over=arguments.take_over, ended=ended)
        outcomes.append(outcome(target, copy_all([selection], target, there, pace=pace, claim=claim), ()))
    return Outcome(
        fields={"root": storage.url, "tiers": [each.fields for each in outcomes]},
        parts=[part for each in outcomes for part in each.parts],
        exit_code=max(each.exit_code for each in outcomes),
    )


def _chosen(records: Sequence[TierRecord], arguments: Namespace, root: str) -> Sequence[TierRecord]:
    """Return the tiers to upload to: those of the root, or the one named.

    Raises:
        ConfigError: there are none.
    """
    if arguments.to is None and not records:
        raise ConfigError(
            f"{root} has no {TIERS}: no job uploads from there; name the place to upload to: --to URL"
        )
    if arguments.to is None:
        return records
    url = public_url(arguments.to).rstrip("/")
    return [each for each in records if each.url.rstrip("/") == url] or [TierRecord(url=url)]


def _owner_that_ended(storage: Storage, records: Sequence[TierRecord]) -> Owner | None:
    """Return the last owner of a root if it has ended, None if that is unknown.

    Args:
        storage: the root.
        records: the tiers that its job uploads to by itself.

    Raises:
        RootBusyError: it is alive, and uploads to these tiers.
    """
    try:
        lock = storage.try_lock(WRITER)
    except OSError:
        return None  # a root that this user can only read
    if lock is None and records:
        raise RootBusyError(
            f"{storage.url} belongs to a live job ({Owner.of(storage) or 'of unknown name'}), which uploads "
            "by itself: wait until it ends, or name another place: --to URL"
        )
    if lock is None:
        return None
    lock.release()
    return Owner.of(storage) if excludes_others(lock) else None


def _due(record: TierRecord, survey: Survey, there: Survey) -> list[CheckpointInfo]:
    """Return what was due, and the newest if the tier has none as new; oldest first."""
    have = {info.save_id for info in there.everything}
    begun = {record.uploading.name} if record.uploading is not None else set()
    usable = [info for info in survey.committed if info.usable]
    newest = max((_age(info) for info in there.everything if info.usable), default=(-1, -1))
    return [
        info
        for info in usable
        if info.save_id not in have
        and (info.name in {*record.due, *begun} or (info is usable[-1] and _age(info) > newest))
    ]


def _age(info: CheckpointInfo) -> tuple[int, int]:
    return info.lineage.number, info.step
