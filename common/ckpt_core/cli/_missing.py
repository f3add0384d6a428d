"""`upload`: send to the further tiers of a root what its job has left."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial

from ckpt_core.cli._arguments import Commands, claimed, open_root, open_target
from ckpt_core.cli._cp import CopySource, add_copy_options, copy_all, outcome, pace_of
from ckpt_core.cli._outcome import Outcome
from ckpt_core.cli._tier_columns import options_for
from ckpt_core.commit import Catalog, Owner, Survey
from ckpt_core.errors import CheckpointNotFoundError, ConfigError, RootBusyError
from ckpt_core.hosting import root_of
from ckpt_core.names import TIERS, WRITER
from ckpt_core.storage import Storage, excludes_others, open_storage
from ckpt_core.tiers import TierRecord, read_tiers
from ckpt_core.types import CheckpointInfo


def add(commands: Commands, shared: ArgumentParser) -> None:
    """Add the command to those of `ckpt`."""
    command = commands.add_parser(
        "upload",
        parents=[shared],
        help="upload what a job that ended has left in its local root",
        description="Uploads what was due for a place and is not there, and the newest. Verified and "
        "resumable as `cp`. A live job uploads by itself.",
    )
    command.add_argument("root", metavar="ROOT", help="path of a run")
    command.add_argument("--to", metavar="URL", help="the place to upload to; tiers.json need not name it")
    command.add_argument("--all", action="store_true", help="everything of the present lineage")
    add_copy_options(command)
    command.set_defaults(command=run)


def run(arguments: Namespace) -> Outcome:
    """Upload what is due, and the newest, to the place named."""
    pace = pace_of(arguments)
    storage = open_root(arguments.root, arguments.storage_options)
    records = read_tiers(storage)
    if arguments.to is None:
        named = ", ".join(each.url for each in records) or "no place"
        raise ConfigError(
            f"name the place to upload to: --to URL. {TIERS} of {storage.url} names {named}; "
            "the writer of that root chose it"
        )
    options = options_for(arguments.to, arguments)
    url = open_storage(root_of(arguments.to), options).url.rstrip("/")
    record = next((each for each in records if each.url.rstrip("/") == url), None)
    has_ended = _judge_of_owners(storage, is_tier=record is not None)
    survey = Catalog(storage).survey()
    if not survey.committed:
        nothing = CheckpointNotFoundError(f"{storage.url}: no checkpoint is committed there")
        raise next(iter(survey.unreadable.values()), nothing)
    target = open_target(arguments.to, options)
    if target.url == storage.url:
        raise ConfigError(f"{target.url} is the root itself: name another place to upload to")
    there = Catalog(target).survey()
    infos = survey.committed if arguments.all else _due(record or TierRecord(url=url), survey, there)
    names = {info.save_id: info.name for info in there.everything}
    selection = CopySource(
        source=storage,
        # What the tier has by another name, because its own was taken, is not sent again.
        infos=[info for info in infos[::-1] if names.get(info.save_id, info.name) == info.name],
        relatives=survey.everything,
        is_run=True,
        renames=True,
    )
    claim = partial(claimed, target, "ckpt upload", take_over=arguments.take_over, has_ended=has_ended)
    sent = outcome(target, copy_all([selection], target, there, pace=pace, claim=claim), ())
    fields = {"root": storage.url, "tiers": [sent.fields]}
    return Outcome(fields=fields, parts=sent.parts, exit_code=sent.exit_code)


def _judge_of_owners(storage: Storage, *, is_tier: bool) -> Callable[[Owner], bool]:
    """Return what tells whether the owner of a tier has ended."""
    last = Owner.of(storage)
    try:
        lock = storage.try_lock(WRITER)
    except OSError:  # a root that this user can only read
        return lambda _: False
    if lock is None and is_tier:
        raise RootBusyError(
            f"{storage.url} belongs to a live job ({Owner.of(storage) or 'of unknown name'}), which uploads "
            "by itself: wait until it ends, or name another place: --to URL"
        )
    if lock is None:
        return lambda _: False
    lock.release()
    idle = excludes_others(lock)

    def has_ended(owner: Owner) -> bool:
        died_here = last is not None and (owner.host, owner.pid) == (last.host, last.pid)
        return idle and bool(owner.pid) and (owner.has_ended or died_here)

    return has_ended


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
