"""What checkpoints of a training cost: bytes, times, interval, overhead and money."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final, get_args

from ckpt_core.cadence import FailureRate, SaveCosts, SavePolicy, expected_overhead, optimal_interval
from ckpt_core.errors import ConfigError
from ckpt_core.planning._known_storages import StorageProfile
from ckpt_core.planning._month import KeptMonth, PlannedSave, kept_of, saves_at, saves_of
from ckpt_core.planning._numbers import HOUR, MONTH, PlanAssumption, PlanNumbers
from ckpt_core.planning._rank_layout import RankLayout
from ckpt_core.planning._shapes import ModelShape
from ckpt_core.planning._state_sizes import StateComponent, TrainedState, optimizer_note, state_components
from ckpt_core.retention import RetentionPolicy

SaveMode: TypeAlias = Literal["blocking", "overlapped", "sync"]
SAVE_MODES: Final[tuple[SaveMode, ...]] = get_args(SaveMode)

_GB: Final = 1e9
_STATE_TENSORS: Final[Mapping[str, int]] = {"none": 0, "sgd": 0, "sgd-momentum": 1, "lion": 1, "muon": 1}
_TWO_MOMENTS_AND_STEP: Final = 3


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTerms:
    """What is to be planned.

    Attributes:
        model: the shapes.
        state: optimizer and dtypes.
        layout: ranks, and how the state lies on them.
        storage: where checkpoints go.
        numbers: of machine, training and market.
        mode: a save blocks until it has copied ("blocking"), only for what the next optimizer step waits for
            ("overlapped"), or until it is durable ("sync", as other libraries do).
        mtbf: seconds between failures of the job; None: by the failures per GPU and hour.
        save: when to save: seconds between the starts of two saves, a policy, or None for the optimum.
        keep: retention policies by their text.
        measured: what is known instead of computed: `size_bytes`, `optimizer_bytes`, `stall_seconds`,
            `durable_seconds`, `restore_seconds`.
        given: names of numbers that a user gave.
    """

    model: ModelShape
    state: TrainedState
    layout: RankLayout
    storage: StorageProfile
    numbers: PlanNumbers = field(default_factory=PlanNumbers)
    mode: SaveMode = "blocking"
    mtbf: float | None = None
    save: float | SavePolicy | None = None
    keep: Mapping[str, RetentionPolicy] = field(default_factory=dict[str, RetentionPolicy])
    measured: Mapping[str, float] = field(default_factory=dict[str, float])
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.mode not in SAVE_MODES:
            raise ConfigError(f"mode must be one of {', '.join(SAVE_MODES)}, not {self.mode!r}")
        wrong = [name for name, value in self.measured.items() if not (0 < value < math.inf)]
        wrong += ["mtbf"] if self.mtbf is not None and not (0 < self.mtbf < math.inf) else []
        wrong += ["save"] if isinstance(self.save, int | float) and not (0 < self.save < math.inf) else []
        if wrong:
            raise ConfigError(f"plan: {', '.join(wrong)} must be above 0 and finite")


class SaveTimes(NamedTuple):
    """Seconds of one save, and of a restore.

    Attributes:
        stall: training is blocked.
        durable: from the decision to the commit.
        cost: training time lost: the stall, and the slowdown until it is durable.
        restore: reading a checkpoint back.
        write_rate: bytes per second of all writers together.
    """

    stall: float
    durable: float
    cost: float
    restore: float
    write_rate: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SavesOfMonth:
    """The saves of 30 days.

    Attributes:
        interval: seconds between the starts of two saves.
        overhead: share of the time that is lost, with failures.
        count: saves.
        stalled: share of the time for which training is blocked.
        saving: share of the time that saves cost, with slowdown.
        failures: expected ones.
        written_bytes: by all saves.
        idle_dollars: for GPUs while they stall.
        lost_dollars: for GPUs while no training happens, by saves and failures.
    """

    interval: float
    overhead: float
    count: int
    stalled: float
    saving: float
    failures: float
    written_bytes: float
    idle_dollars: float
    lost_dollars: float

    @property
    def goodput(self) -> float:
        """The share of the time in which training makes progress."""
        return 1 - self.overhead


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionCost:
    """What one retention policy costs in a month.

    Attributes:
        kept: checkpoints.
        peak_bytes: most bytes at the same time.
        mean_bytes: bytes kept on average over the month.
        storage_dollars: for keeping them.
        request_dollars: for the requests of saves and restores.
        egress_dollars: for the bytes of restores.
    """

    kept: KeptMonth
    peak_bytes: float
    mean_bytes: float
    storage_dollars: float
    request_dollars: float
    egress_dollars: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CostPlan:
    """The plan: what checkpoints of a training cost.

    Attributes:
        terms: what was planned.
        components: of a checkpoint.
        size_bytes: of a checkpoint.
        times: of a save and a restore.
        mtbf: seconds between failures of the job.
        recommended: seconds between the starts of two saves that lose least.
        month: the saves of a month at the interval planned.
        retention: what each policy keeps and costs.
        assumptions: all of them.
    """

    terms: PlanTerms
    components: Sequence[StateComponent]
    size_bytes: int
    times: SaveTimes
    mtbf: float
    recommended: float
    month: SavesOfMonth
    retention: Sequence[RetentionCost]
    assumptions: Sequence[PlanAssumption]

    @property
    def bytes_per_parameter(self) -> float:
        """The bytes of a checkpoint per parameter."""
        return self.size_bytes / self.terms.model.parameters

    def overhead_at(self, interval: float) -> float:
        """Return the share of the time lost at an interval between saves."""
        return _overhead(interval, self.times, self.mtbf, self.terms)


def make_plan(terms: PlanTerms) -> CostPlan:
    """Plan the checkpoints of a training.

    Raises:
        ConfigError: a policy cannot be planned.
    """
    components = state_components(
        terms.model,
        terms.state,
        optimizer_bytes=terms.measured.get("optimizer_bytes"),
        others=_others(terms),
    )
    size = round(terms.measured.get("size_bytes", sum(each.size_bytes for each in components)))
    times = save_times(terms, size)
    mtbf = _mtbf(terms)
    best = optimal_interval(cost=times.cost, durable=times.durable, mtbf=mtbf)
    recommended = max(best, terms.numbers.step_seconds)
    saves = _saves(terms, recommended, times, mtbf=mtbf)
    month = _month_of(terms, saves, times, mtbf=mtbf, size_bytes=size)
    return CostPlan(
        terms=terms,
        components=components,
        size_bytes=size,
        times=times,
        mtbf=mtbf,
        recommended=recommended,
        month=month,
        retention=[
            _retention(terms, name, saves, failures=month.failures, size_bytes=size) for name in terms.keep
        ],
        assumptions=_assumptions(terms),
    )


def save_times(terms: PlanTerms, size_bytes: int) -> SaveTimes:
    """Compute how long a save and a restore of so many bytes take."""
    numbers, layout, storage = terms.numbers, terms.layout, terms.storage
    copy = layout.written(size_bytes) / numbers.staging_rate
    rate = storage.write_rate(layout)
    write = size_bytes / rate + storage.commit_seconds
    durable = numbers.call_seconds + (copy + write if terms.mode == "blocking" else max(copy, write))
    stall = numbers.call_seconds + copy
    if terms.mode == "overlapped":
        stall = numbers.call_seconds + max(0.0, copy - numbers.step_seconds)
    durable = terms.measured.get("durable_seconds", durable)
    stall = terms.measured.get("stall_seconds", durable if terms.mode == "sync" else stall)
    durable = max(durable, stall)
    return SaveTimes(
        stall=stall,
        durable=durable,
        cost=stall + numbers.slowdown * (durable - stall),
        restore=terms.measured.get("restore_seconds", size_bytes / storage.read_rate(layout)),
        write_rate=rate,
    )


def _others(terms: PlanTerms) -> int:
    """Return the bytes of per-rank values, and of metadata where tensors are known."""
    numbers, layout = terms.numbers, terms.layout
    tensors = terms.model.tensors or 0
    kinds = 1 + int(terms.state.master is not None)
    kinds += _STATE_TENSORS.get(terms.state.optimizer, _TWO_MOMENTS_AND_STEP)
    chunks = tensors * kinds * layout.sharded * layout.tp
    return round(layout.ranks * numbers.rank_bytes + chunks * numbers.chunk_bytes)


def _mtbf(terms: PlanTerms) -> float:
    if terms.mtbf is not None:
        return terms.mtbf
    rate = terms.numbers.failures_per_gpu_hour * terms.layout.ranks
    if rate == 0:
        raise ConfigError("plan: without failures there is no best interval: failures_per_gpu_hour is 0")
    return HOUR / rate


def _outage(terms: PlanTerms, times: SaveTimes) -> float:
    return terms.numbers.restart_seconds + times.restore


def _overhead(interval: float, times: SaveTimes, mtbf: float, terms: PlanTerms) -> float:
    return expected_overhead(
        interval, cost=times.cost, durable=times.durable, mtbf=mtbf, restart=_outage(terms, times)
    )


def _saves(terms: PlanTerms, recommended: float, times: SaveTimes, *, mtbf: float) -> list[PlannedSave]:
    step = terms.numbers.step_seconds
    if isinstance(terms.save, SavePolicy):
        costs = SaveCosts(
            stall=times.stall,
            slowdown=times.cost - times.stall,
            durable=times.durable,
            uploaded=None,
            saves=1,
            lost=0.0,
            step=step,
        )
        return saves_of(terms.save, costs, FailureRate(mtbf, "the plan's"))
    interval = recommended if terms.save is None else terms.save
    if interval < times.stall:
        raise ConfigError(
            f"a save every {interval:g} s cannot be: each blocks training for {times.stall:.3g} s; give a "
            "longer interval, or faster storage"
        )
    return saves_at(interval, step)


def _month_of(
    terms: PlanTerms, saves: Sequence[PlannedSave], times: SaveTimes, *, mtbf: float, size_bytes: int
) -> SavesOfMonth:
    if not saves:
        raise ConfigError("plan: not one save is made in a month of 30 days: save more often")
    interval = MONTH / len(saves) if isinstance(terms.save, SavePolicy) else saves[0].time
    overhead = _overhead(interval, times, mtbf, terms)
    dollars = terms.layout.ranks * terms.numbers.gpu_hour / HOUR
    return SavesOfMonth(
        interval=interval,
        overhead=overhead,
        count=len(saves),
        stalled=times.stall / interval,
        saving=times.cost / interval,
        failures=MONTH / mtbf,
        written_bytes=float(len(saves)) * size_bytes,
        idle_dollars=len(saves) * times.stall * dollars,
        lost_dollars=overhead * MONTH * dollars,
    )


def _retention(
    terms: PlanTerms, name: str, saves: Sequence[PlannedSave], *, failures: float, size_bytes: int
) -> RetentionCost:
    kept, storage = kept_of(terms.keep[name], name, saves), terms.storage
    parts = math.ceil(size_bytes / storage.part_bytes) if storage.part_bytes else 0
    puts, gets = parts * len(saves), parts * failures
    return RetentionCost(
        kept=kept,
        peak_bytes=float(kept.peak) * size_bytes,
        mean_bytes=kept.mean * size_bytes,
        storage_dollars=kept.mean * size_bytes / _GB * storage.gb_month,
        request_dollars=(puts * storage.put_price + gets * storage.get_price) / 1000,
        egress_dollars=failures * size_bytes / _GB * storage.egress,
    )


def _assumptions(terms: PlanTerms) -> list[PlanAssumption]:
    found = terms.numbers.assumptions(dict.fromkeys(terms.given))
    if terms.mtbf is not None:
        found = [each for each in found if each.option != "--failures-per-gpu-hour"]
        found.append(
            PlanAssumption("time between failures of the job", f"{terms.mtbf:g} s", "given", "--mtbf")
        )
    storage = terms.storage
    rates = f"{storage.write / _GB:g} GB/s write, {storage.read / _GB:g} GB/s read, per {storage.rate_of}"
    found.append(PlanAssumption(f"storage {storage.name}", rates, storage.source, "--storage"))
    prices = (
        f"${storage.gb_month:g} per GB and month, ${storage.put_price:g} and ${storage.get_price:g} per "
        f"1,000 requests, ${storage.egress:g} per GB restored"
    )
    options = "--gb-month --put-price --get-price --egress"
    found.append(PlanAssumption("prices of storage", prices, storage.source, options))
    if note := optimizer_note(terms.model, terms.state.optimizer):
        found.append(PlanAssumption("shapes", note, "assumed", "MODEL config.json"))
    if terms.model.tensors is None:
        found.append(
            PlanAssumption("metadata", "none counted", "a number has no tensors", "MODEL config.json")
        )
    found += [
        PlanAssumption(name.replace("_", " "), f"{value:g}", "given", f"--{name.replace('_', '-')}")
        for name, value in terms.measured.items()
    ]
    return found


def with_storage(storage: StorageProfile, changes: Mapping[str, Any]) -> StorageProfile:
    """Return a storage with some figures replaced."""
    known = {name: value for name, value in changes.items() if value is not None}
    if not known:
        return storage
    replaced = " ".join(sorted(known))
    return replace(storage, **known, source=f"{storage.source}; given: {replaced}")
