"""`prune`: apply a retention policy to a root that no job is writing to."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import reduce
from operator import or_

from ckpt_core.cli._outcome import Outcome, Table, bytes_text
from ckpt_core.cli._places import open_root
from ckpt_core.commit import Catalog, Lease, Owner, collect_orphans, remove
from ckpt_core.errors import ConfigError, RootBusyError
from ckpt_core.retention import (
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNewerThan,
    PrunePlan,
    RetentionPolicy,
    plan_prune,
)
from ckpt_core.storage import Storage


def run(arguments: Namespace) -> Outcome:
    """Remove the checkpoints that no policy keeps, and what crashes left behind."""
    policy = reduce(or_, _policies(arguments))
    storage = open_root(arguments.root, arguments.storage_options)
    if arguments.dry_run:
        return _outcome(storage, _plan(storage, policy), Catalog(storage).torn(), dry_run=True)
    _refuse_to_take_over(storage, allowed=arguments.take_over)
    with Lease.acquire(storage, "ckpt prune") as lease:
        plan = _plan(storage, policy)
        for info in plan.drop:
            lease.check()
            remove(storage, info)
        orphans = collect_orphans(storage, keep=())
    return _outcome(storage, plan, orphans, dry_run=False)


def _plan(storage: Storage, policy: RetentionPolicy) -> PrunePlan:
    return plan_prune(policy, Catalog(storage).committed(), time.time())


def _refuse_to_take_over(storage: Storage, *, allowed: bool) -> None:
    # An object store cannot tell whether the job in writer.json lives; taking over would stop its saves.
    owner = Owner.of(storage)
    if owner is not None and not storage.supports_rename and not allowed:
        raise RootBusyError(
            f"{storage.url} belongs to {owner}: if that job has ended, add --take-over; "
            "if it lives, let it prune, or use --dry-run"
        )


def _policies(arguments: Namespace) -> Sequence[RetentionPolicy]:
    policies = list(_given(arguments))
    if not policies:
        raise ConfigError("nothing says what to keep: give --keep-latest, --keep-every, … or --policy")
    return policies


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
    freed = bytes_text(sum(info.size_bytes for info in plan.drop))
    verb = "would drop" if dry_run else "dropped"
    return Outcome(
        fields={
            "root": storage.url,
            "dry_run": dry_run,
            "keep": [{"step": step, "reasons": reasons} for step, reasons in plan.keep.items()],
            "drop": [asdict(info) for info in plan.drop],
            "torn": torn,
        },
        parts=[
            *([Table(columns=("", "STEP", "WHY"), rows=rows)] if rows else []),
            f"{verb} {len(plan.drop)} checkpoints, {freed}, and {len(torn)} torn directories",
        ],
    )
