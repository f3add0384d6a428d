"""`prune`: apply a retention policy to an idle root, or delete what is useless."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Final

from ckpt_core.cli._arguments import claimed, none_committed, open_root
from ckpt_core.cli._outcome import Outcome, Table
from ckpt_core.cli._progress_line import ProgressLine
from ckpt_core.commit import Catalog, Inventory, Lease, collect_orphans, look_around, read_notes, remove
from ckpt_core.errors import ConfigError, CorruptCheckpointError
from ckpt_core.hosting import number_in
from ckpt_core.journal import add_event
from ckpt_core.options import CheckpointOptions, bytes_text
from ckpt_core.retention import (
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLatest,
    KeepWithin,
    PrunePlan,
    RetentionPolicy,
    any_of,
    plan_prune,
    withheld,
)
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo

_UNUSABLE: Final = ("damaged", "bad", "abandoned")


def run(arguments: Namespace) -> Outcome:
    policy = _policy(arguments)
    storage = open_root(arguments.root, arguments.storage_options)
    if Catalog(storage).latest() is None and look_around(storage).runs:
        raise none_committed(storage)  # of a folder of roots, before anything is written there

    sizes: dict[int, int] = {}

    def choose(history: Sequence[CheckpointInfo]) -> PrunePlan:
        sizes.update((info.step, info.size_bytes) for info in history)
        if policy is None:
            return _plan_kinds(storage, history, arguments)
        return plan_prune(policy, history, time.time())

    if arguments.dry_run:
        torn = [] if policy is None else Catalog(storage).torn()
        return _outcome(storage, choose(Inventory(storage).history()), torn, sizes, dry_run=True)
    with claimed(storage, "ckpt prune", take_over=arguments.take_over) as lease:
        plan = _applied(storage, choose, lease)
        if plan.drop:
            kinds = ", ".join(kind for kind in _UNUSABLE if getattr(arguments, kind))
            fields = {
                "names": [info.name for info in plan.drop],
                "size_bytes": sum(info.size_bytes for info in plan.drop),
                "why": f"ckpt prune, {f'what is {kinds}' if policy is None else f'keep={policy!r}'}",
                "tier": storage.url,
            }
            with suppress(OSError):  # a journal that cannot be written does not matter
                add_event(storage, "prune", time.time(), fields)
        orphans = [] if policy is None else collect_orphans(storage, keep=())
    return _outcome(storage, plan, orphans, sizes, dry_run=False)


def _applied(
    storage: Storage, choose: Callable[[Sequence[CheckpointInfo]], PrunePlan], lease: Lease
) -> PrunePlan:
    """Carry out the plan as far as what stays is known to be whole; return that plan."""
    plans: list[PrunePlan] = []

    def droppable(history: Sequence[CheckpointInfo]) -> Sequence[CheckpointInfo]:
        plans.append(choose(history))
        return plans[-1].drop

    catalog, inventory = Catalog(storage), Inventory(storage, watch=_watched)
    drop = inventory.droppable(droppable)
    if not drop:
        return withheld(plans[-1], drop)
    with ProgressLine("deleting", sum(info.size_bytes for info in drop)) as progress:
        for info in drop:
            lease.check()
            taken = info.step in read_notes(storage).in_use
            if not taken and inventory.still_there(info):
                remove(storage, info)
                for bad in (False, True):
                    catalog.unmark(info.name, bad=bad)
            progress.add(info.size_bytes)
    return withheld(plans[-1], drop)


@contextmanager
def _watched(info: CheckpointInfo) -> Generator[Callable[[int], None]]:
    with ProgressLine(f"verifying {info.name}, which stays", info.size_bytes) as progress:
        yield progress.add


def _plan_kinds(storage: Storage, history: Sequence[CheckpointInfo], arguments: Namespace) -> PrunePlan:
    """Plan to drop the given kinds unless pinned; refuse if nothing else is there."""

    def goes(info: CheckpointInfo) -> bool:
        if info.damaged is not None:
            return bool(arguments.damaged)
        return bool(arguments.bad if info.bad is not None else arguments.abandoned and info.abandoned)

    chosen = [info for info in history if goes(info)]
    drop = tuple(info for info in chosen if info.pinned is None)
    stays = [info for info in history if info.usable and not info.abandoned]
    if drop and not stays:
        raise CorruptCheckpointError(
            f"nothing in {storage.url} would be left to go on from: every committed checkpoint of the "
            "present lineage is marked as damaged or bad. Nothing was deleted of "
            f"{', '.join(info.name for info in drop)}; look at each with `ckpt verify`, which takes "
            "the mark from one that is whole, or delete the directories by hand"
        )
    rest = [info for info in history if info not in drop]
    return PrunePlan(
        keep={info.step: ("of the present lineage, not marked",) for info in stays},
        drop=drop,
        damaged=tuple(info for info in rest if info.damaged is not None),
        bad=tuple(info for info in rest if info.bad is not None and info.damaged is None),
        abandoned=tuple(info for info in rest if info.abandoned and info.usable),
    )


def _policy(arguments: Namespace) -> RetentionPolicy | None:
    """Join the policies that were given; None if only given kinds are to go."""
    policies = list(_given(arguments))
    kinds = [kind for kind in _UNUSABLE if getattr(arguments, kind)]
    if kinds and policies:
        named = " ".join(f"--{kind}" for kind in kinds)
        raise ConfigError(f"{named} deletes what is so and nothing else: give it without a policy")
    if kinds:
        return None
    if not policies:
        raise ConfigError(
            "nothing says what to keep: give --keep-latest, --keep-every, … or --policy; or --damaged, "
            "--bad or --abandoned"
        )
    return any_of(policies)


def _given(arguments: Namespace) -> Iterator[RetentionPolicy]:
    if arguments.keep_latest is not None:
        yield KeepLatest(arguments.keep_latest)
    if arguments.keep_every is not None:
        yield KeepEvery(arguments.keep_every)
    if arguments.keep_for is not None:
        yield KeepFor(number_in(arguments.keep_for) or arguments.keep_for)
    if arguments.keep_within is not None:
        yield KeepWithin(arguments.keep_within)
    yield from map(_keep_best, arguments.keep_best)
    if arguments.policy is not None:
        policy = CheckpointOptions.from_file(arguments.policy).keep
        if policy is None:
            raise ConfigError(f"{arguments.policy} has no `keep`")
        yield policy


def _keep_best(text: str) -> KeepBest:
    metric, *rest = text.split(":")
    numbers = [number for part in rest if (number := number_in(part)) is not None]
    modes = [part for part in rest if part in {"min", "max"}]
    if len(rest) != len(numbers) + len(modes) or len(numbers) > 1 or len(modes) > 1:
        raise ConfigError(f"--keep-best takes METRIC[:N][:min|max], such as val_loss:2:min, not {text!r}")
    return KeepBest(metric, n=numbers[0] if numbers else 1, mode="max" if modes == ["max"] else "min")


def _outcome(
    storage: Storage, plan: PrunePlan, torn: Sequence[str], sizes: Mapping[int, int], *, dry_run: bool
) -> Outcome:
    rows = [("keep", str(step), bytes_text(sizes[step]), ", ".join(why)) for step, why in plan.keep.items()]
    for info in plan.drop:
        why = "no room" if info.name in plan.without_room else _why_left(info) or "no rule keeps it"
        rows.append(("drop", str(info.step), bytes_text(info.size_bytes), why))
    rows += [("drop", "torn", "", name) for name in torn]
    left = [*plan.damaged, *plan.bad, *plan.abandoned]
    rows += [("left", str(info.step), bytes_text(info.size_bytes), _why_left(info)) for info in left]
    freed = bytes_text(sum(info.size_bytes for info in plan.drop))
    verb = "would drop" if dry_run else "dropped"
    prune = f"ckpt prune {storage.url}"
    advice = {
        f"left to you: damaged checkpoints, see `ckpt verify` and `{prune} --damaged`": plan.damaged,
        f"left to you: bad checkpoints, see `ckpt mark` and `{prune} --bad`": plan.bad,
        f"left: abandoned checkpoints, see `{prune} --abandoned`": plan.abandoned,
    }
    return Outcome(
        fields={
            "root": storage.url,
            "dry_run": dry_run,
            "keep": [{"step": step, "reasons": reasons} for step, reasons in plan.keep.items()],
            "drop": [asdict(info) for info in plan.drop],
            "torn": torn,
            **{kind: [asdict(info) for info in getattr(plan, kind)] for kind in _UNUSABLE},
        },
        parts=[
            *([Table(columns=("", "STEP", "SIZE", "WHY"), rows=rows)] if rows else []),
            f"{verb} {len(plan.drop)} checkpoints, {freed}, and {len(torn)} leftovers of crashes",
            *(text for text, some in advice.items() if some),
        ],
    )


def _why_left(info: CheckpointInfo) -> str:
    reasons = {"marked as damaged": info.damaged, "marked as bad": info.bad, "pinned": info.pinned}
    found = [f"{reason}: {text}" for reason, text in reasons.items() if text is not None]
    return "; ".join([*found, *([f"abandoned: {info.name}"] if info.abandoned else [])])
