"""`prune`: apply a retention policy to a root that no job is writing to, or delete what is damaged there."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import reduce
from operator import or_

from ckpt_core.cli._outcome import Outcome, Table
from ckpt_core.cli._places import open_root
from ckpt_core.commit import Catalog, Lease, Owner, collect_orphans, countable, remove
from ckpt_core.errors import ConfigError, CorruptCheckpointError, RootBusyError
from ckpt_core.names import WRITER
from ckpt_core.options import bytes_text
from ckpt_core.retention import (
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNewerThan,
    PrunePlan,
    RetentionPolicy,
    plan_prune,
)
from ckpt_core.storage import Storage, excludes_others
from ckpt_core.types import CheckpointInfo


def run(arguments: Namespace) -> Outcome:
    """Remove what no policy keeps and what crashes left behind, or only what is marked as damaged."""
    policy = _policy(arguments)
    storage = open_root(arguments.root, arguments.storage_options)
    if arguments.dry_run:
        torn = [] if policy is None else Catalog(storage).torn()
        return _outcome(storage, _plan(storage, policy), torn, dry_run=True)
    _refuse_to_take_over(storage, allowed=arguments.take_over)
    with Lease.acquire(storage, "ckpt prune") as lease:
        plan = _plan(storage, policy)
        for info in plan.drop:
            lease.check()
            remove(storage, info)
            if info.damaged is not None:
                Catalog(storage).unmark(info.name)
        orphans = [] if policy is None else collect_orphans(storage, keep=())
    return _outcome(storage, plan, orphans, dry_run=False)


def _plan(storage: Storage, policy: RetentionPolicy | None) -> PrunePlan:
    """What the policy says; without one, that the damaged go."""
    history = countable(storage)
    return _plan_damaged(storage, history) if policy is None else plan_prune(policy, history, time.time())


def _plan_damaged(storage: Storage, history: Sequence[CheckpointInfo]) -> PrunePlan:
    """Drop what is marked as damaged, but what a person has pinned; refuse if nothing else is there."""
    damaged = [info for info in history if info.damaged is not None]
    sound = [info for info in history if info.damaged is None]
    drop = tuple(info for info in damaged if info.pinned is None)
    if drop and not sound:
        raise CorruptCheckpointError(
            f"every committed checkpoint in {storage.url} is marked as damaged: "
            f"{', '.join(info.name for info in damaged)}. Nothing was deleted; look at each with "
            "`ckpt verify`, which takes the mark from one that is whole, or delete the directories by hand"
        )
    return PrunePlan(
        keep={info.step: ("not marked as damaged",) for info in sound},
        drop=drop,
        damaged=tuple(info for info in damaged if info.pinned is not None),
    )


def _refuse_to_take_over(storage: Storage, *, allowed: bool) -> None:
    # Where nobody can be locked out, nobody can tell whether the job in writer.json lives; taking over would
    # stop its saves.
    owner = Owner.of(storage)
    if owner is not None and not allowed and not _locks(storage):
        raise RootBusyError(
            f"{storage.url} belongs to {owner}: if that job has ended, add --take-over; "
            "if it lives, let it prune, or use --dry-run"
        )


def _locks(storage: Storage) -> bool:
    """Whether a live job would hold a lock."""
    lock = storage.try_lock(WRITER)
    if lock is None:
        return True
    lock.release()
    return excludes_others(lock)


def _policy(arguments: Namespace) -> RetentionPolicy | None:
    """All that was given, as one; None if only the damaged are to go."""
    policies = list(_given(arguments))
    if arguments.damaged and policies:
        raise ConfigError("--damaged deletes the damaged and nothing else: give it without a policy")
    if arguments.damaged:
        return None
    if not policies:
        raise ConfigError(
            "nothing says what to keep: give --keep-latest, --keep-every, … or --policy; or --damaged"
        )
    return reduce(or_, policies)


def _given(arguments: Namespace) -> Iterator[RetentionPolicy]:
    if arguments.keep_latest is not None:
        yield KeepLatest(arguments.keep_latest)
    if arguments.keep_every is not None:
        yield KeepEvery(arguments.keep_every)
    if arguments.keep_newer_than is not None:
        yield KeepNewerThan(arguments.keep_newer_than)
    for text in arguments.keep_best:
        yield _keep_best(text)
    if arguments.policy is not None:
        yield _from_file(arguments.policy)


def _keep_best(text: str) -> KeepBest:
    metric, *rest = text.split(":")
    numbers = [part for part in rest if part.isdecimal()]
    modes = [part for part in rest if part in {"min", "max"}]
    if len(rest) != len(numbers) + len(modes) or len(numbers) > 1 or len(modes) > 1:
        raise ConfigError(f"--keep-best takes METRIC[:N][:min|max], such as val_loss:2:min, not {text!r}")
    return KeepBest(metric, n=int(numbers[0]) if numbers else 1, mode="max" if modes == ["max"] else "min")


def _from_file(path: str) -> RetentionPolicy:
    from ckpt_core.options import CheckpointOptions

    policy = CheckpointOptions.from_file(path).keep
    if policy is None:
        raise ConfigError(f"{path} says nothing about `keep`")
    return policy


def _outcome(storage: Storage, plan: PrunePlan, torn: Sequence[str], *, dry_run: bool) -> Outcome:
    rows = [("keep", str(step), ", ".join(reasons)) for step, reasons in plan.keep.items()]
    rows += [("drop", str(info.step), bytes_text(info.size_bytes)) for info in plan.drop]
    rows += [("drop", "torn", name) for name in torn]
    rows += [("left", str(info.step), _why_left(info)) for info in plan.damaged]
    freed = bytes_text(sum(info.size_bytes for info in plan.drop))
    verb = "would drop" if dry_run else "dropped"
    advice = "left for a person: damaged checkpoints, see `ckpt verify` and `ckpt prune --damaged`"
    return Outcome(
        fields={
            "root": storage.url,
            "dry_run": dry_run,
            "keep": [{"step": step, "reasons": reasons} for step, reasons in plan.keep.items()],
            "drop": [asdict(info) for info in plan.drop],
            "torn": torn,
            "damaged": [asdict(info) for info in plan.damaged],
        },
        parts=[
            *([Table(columns=("", "STEP", "WHY"), rows=rows)] if rows else []),
            f"{verb} {len(plan.drop)} checkpoints, {freed}, and {len(torn)} leftovers of crashes",
            *([advice] if plan.damaged else []),
        ],
    )


def _why_left(info: CheckpointInfo) -> str:
    pinned = "" if info.pinned is None else f"; pinned: {info.pinned}"
    return f"marked as damaged: {info.damaged}{pinned}"
