"""`prune`: apply a retention policy to an idle root, or delete what is useless."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, cast

from ckpt_core.cli._arguments import claimed, find_step, none_committed, open_root
from ckpt_core.cli._outcome import Outcome, ProgressLine, Table
from ckpt_core.commit import Catalog, Inventory, Lease, collect_orphans, look_around, read_notes, remove
from ckpt_core.errors import ConfigError, CorruptCheckpointError
from ckpt_core.hosting import number_in
from ckpt_core.journal import add_event
from ckpt_core.options import CheckpointOptions, bytes_text
from ckpt_core.policies import RetentionPolicy
from ckpt_core.retention import (
    UNVERIFIED,
    KeepBest,
    KeepEvery,
    KeepEveryEpochs,
    KeepEveryFraction,
    KeepFor,
    KeepLatest,
    KeepWeights,
    KeepWithin,
    PrunePlan,
    any_of,
    as_it_is,
    keeps_weights,
    plan_prune,
    unknown_counts,
    withheld,
)
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo, Parent

if TYPE_CHECKING:
    from ckpt_core.root import Demoter

_UNUSABLE: Final = ("damaged", "bad", "abandoned")


def _fraction(text: str) -> RetentionPolicy:
    fraction, _, total = text.partition(":")
    try:
        return KeepEveryFraction(float(fraction), total_steps=int(total) if total else None)
    except ValueError as error:
        raise ConfigError(f"--keep-every-fraction takes F[:STEPS], such as 0.1, not {text!r}") from error


def _weights(text: str) -> RetentionPolicy:
    steps, _, dtype = text.partition(":")
    return KeepWeights(KeepEvery(number_in(steps) or cast("Any", steps)), dtype=dtype or None)


_RULES: Final[Mapping[str, Callable[[Any], RetentionPolicy]]] = {
    "keep_latest": KeepLatest,
    "keep_every": KeepEvery,
    "keep_every_fraction": _fraction,
    "keep_every_epochs": KeepEveryEpochs,
    "keep_weights_every": _weights,
    "keep_for": lambda text: KeepFor(number_in(text) or text),
    "keep_within": KeepWithin,
}


def run(arguments: Namespace) -> Outcome:
    policy = _policy(arguments)
    storage = open_root(arguments.root, arguments.storage_options)
    if Catalog(storage).latest() is None and look_around(storage).runs:
        raise none_committed(storage)  # of a folder of roots, before anything is written there

    demoter = _demoter(storage) if keeps_weights(policy) else None
    light = as_it_is if demoter is None else demoter.weights_bytes

    def choose(history: Sequence[CheckpointInfo]) -> PrunePlan:
        if policy is None:
            return _plan_kinds(storage, history, arguments)
        if unknown := unknown_counts(policy, history):
            raise ConfigError(
                f"no checkpoint in {storage.url} knows its {' and '.join(unknown)}, by which "
                f"{policy!r} goes: give another rule, or for a fraction the length of the training, "
                "--keep-every-fraction 0.1:STEPS"
            )
        return plan_prune(policy, history, time.time(), weights_bytes=light)

    if arguments.dry_run:
        torn = [] if policy is None else Catalog(storage).torn()
        plan = _possible(choose(Inventory(storage).history()), demoter)
        return _outcome(storage, plan, torn, light=light)
    with claimed(storage, "ckpt prune", take_over=arguments.take_over) as lease:
        plan = _applied(storage, choose, lease, demoter)
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
    return _outcome(storage, _possible(plan, demoter), orphans)


def _possible(plan: PrunePlan, demoter: Demoter | None) -> PrunePlan:
    """Leave out the demotions that are refused, and say of each why it stays whole."""
    refused = {info.step: demoter.refusal(info) for info, _ in plan.demote} if demoter else {}
    whole = {step: f"stays whole: {why}" for step, why in refused.items() if why is not None}
    keep = {step: (*why, *([whole[step]] if step in whole else [])) for step, why in plan.keep.items()}
    return replace(plan, keep=keep, demote=tuple(each for each in plan.demote if each[0].step not in whole))


def demote(arguments: Namespace) -> Outcome:
    storage, step, name = find_step(arguments.checkpoint, arguments.storage_options)
    catalog, dtype = Catalog(storage), arguments.dtype
    info = catalog.find(step=None if name else step, name=name)
    demoter = _demoter(storage)
    _refuse_demotion(storage, info, demoter.refusal(info))
    light = demoter.weights_bytes(info, dtype)
    if not arguments.dry_run:
        with claimed(storage, "ckpt demote", take_over=arguments.take_over) as lease:
            inventory = Inventory(storage, watch=_watched)
            if not inventory.droppable(lambda _: [info]):
                raise CorruptCheckpointError(
                    f"{storage.url}/{info.name} stays whole: {UNVERIFIED}; look at each with `ckpt verify`"
                )
            demoter.begin([(info, dtype)])
            _finish(demoter, lease, strict=True)
            lease.check()
            _remove(storage, inventory, info)
        demoter.close()
        weights = next(i for i in catalog.survey().weights if i.weights_of == Parent.of(info))
        name, light = weights.name, weights.size_bytes
    verb = "would become" if arguments.dry_run else "became"
    return Outcome(
        fields={
            "root": storage.url, "name": info.name, "step": step, "dtype": dtype,
            "dry_run": arguments.dry_run, "weights": None if arguments.dry_run else name,
            "size_bytes": info.size_bytes, "weights_bytes": light,
        },
        parts=[
            f"{storage.url}/{info.name}, {bytes_text(info.size_bytes)}, {verb} weights of "
            f"{bytes_text(light)}; no resume takes them"
        ],
    )  # fmt: skip


def _demoter(storage: Storage) -> Demoter:
    from ckpt_core.tiers.uploading import demoter_of  # it needs torch, which takes a second

    return demoter_of(storage, {}, beside=False)


def _refuse_demotion(storage: Storage, info: CheckpointInfo, refusal: str | None) -> None:
    """Refuse to take from a root what must stay whole."""
    newest = Catalog(storage).latest()
    problems = {
        "holds only weights already": info.weights_of is not None,
        f"is pinned ({info.pinned}): `ckpt unpin` it first": info.pinned is not None,
        "is marked as damaged or bad: see `ckpt verify` and `ckpt mark`": info.marked,
        "is what a resume would load": newest is not None and newest.name == info.name,
        str(refusal): refusal is not None,
    }
    if problem := next((text for text, holds in problems.items() if holds), None):
        raise ConfigError(f"{storage.url}/{info.name} {problem}; nothing was written")


def _finish(demoter: Demoter, lease: Lease, *, strict: bool = False) -> None:
    while demoter.is_busy:
        demoter.wait()
    if (error := demoter.take(lease.check)) is not None and strict:
        raise error


def _remove(storage: Storage, inventory: Inventory, info: CheckpointInfo) -> None:
    """Remove a checkpoint, unless somebody uses it or another has its name."""
    if info.step not in read_notes(storage).in_use and inventory.still_there(info):
        remove(storage, info)
        for bad in (False, True):
            Catalog(storage).unmark(info.name, bad=bad)


def _applied(
    storage: Storage,
    choose: Callable[[Sequence[CheckpointInfo]], PrunePlan],
    lease: Lease,
    demoter: Demoter | None,
) -> PrunePlan:
    """Carry out the plan, and what follows from each demotion; return all of it."""
    plan = _removed(storage, choose, lease)
    while demoter is not None and demoter.begin(plan.demote):
        _finish(demoter, lease)
        further = _removed(storage, choose, lease)
        plan = replace(further, drop=(*plan.drop, *further.drop))
    if demoter is not None:
        demoter.close()
    return plan


def _removed(
    storage: Storage, choose: Callable[[Sequence[CheckpointInfo]], PrunePlan], lease: Lease
) -> PrunePlan:
    """Carry out the plan as far as what stays is known to be whole; return that plan."""
    plans: list[PrunePlan] = []

    def droppable(history: Sequence[CheckpointInfo]) -> Sequence[CheckpointInfo]:
        plans.append(choose(history))
        return plans[-1].drop

    inventory = Inventory(storage, watch=_watched)
    drop = inventory.droppable(droppable)
    if not drop:
        return withheld(plans[-1], drop)
    with ProgressLine("deleting", sum(info.size_bytes for info in drop)) as progress:
        for info in drop:
            lease.check()
            _remove(storage, inventory, info)
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
    for name, make in _RULES.items():
        if (given := getattr(arguments, name)) is not None:
            yield make(given)
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
    storage: Storage,
    plan: PrunePlan,
    torn: Sequence[str],
    *,
    light: Callable[[CheckpointInfo, str | None], int] | None = None,
) -> Outcome:
    """Tell what was done; with `light`, the sizes of weights, what would be."""
    dry_run, gone = light is not None, {info.name for info in plan.drop}
    sizes = Counter[int]()
    for info in Inventory(storage).history():
        sizes[info.step] += 0 if info.name in gone or info.marked or info.abandoned else info.size_bytes
    demoted = {info.step: (info, dtype) for info, dtype in plan.demote}
    rows: list[tuple[str, ...]] = []
    for step, why in plan.keep.items():
        word, size = "keep", bytes_text(sizes[step])
        if light is not None and step in demoted:
            word, size = "demote", f"{size} → {bytes_text(light(*demoted[step]))}"
        rows.append((word, str(step), size, ", ".join(why)))
    for info in plan.drop:
        why_not = "no room" if info.name in plan.without_room else _why_left(info) or "no rule keeps it"
        if info.step in plan.keep and info.weights_of is None:
            why_not = "its weights stay"
        rows.append(("drop", str(info.step), bytes_text(info.size_bytes), why_not))
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
            "demote": [asdict(info) for info, _ in plan.demote],
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
