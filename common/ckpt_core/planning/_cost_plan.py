"""What checkpoints of a training cost: bytes, times, interval, overhead and money."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias, final, get_args

from ckpt_core.cadence import FailureRate, SaveCosts, SavePolicy, expected_overhead, optimal_interval
from ckpt_core.errors import ConfigError
from ckpt_core.planning._known_storages import StorageProfile
from ckpt_core.planning._month import PlannedSave, RetentionCost, retention_cost, saves_at, saves_of
from ckpt_core.planning._numbers import HOUR, MONTH, PlanAssumption, PlanNumbers
from ckpt_core.planning._planned_uploads import PlannedUpload, TierLosses, UploadTimes, uploads_of
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
        uploads: further tiers, the first one first.
        replicas: files that hold the same bytes, as the option of a save.
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
    uploads: Sequence[PlannedUpload] = ()
    replicas: int = 1
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
        if self.layout.ep > 1 and not self.model.experts:
            raise ConfigError(f"ep is {self.layout.ep}, and {self.model.name} has no experts that are known")
        if self.numbers.node_loss and not self.uploads:
            raise ConfigError(
                "node_loss: without an upload tier such a failure leaves nothing: give --upload"
            )


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
class UploadCost:
    """What one upload tier holds and costs.

    Attributes:
        upload: the tier.
        times: of uploads.
        losses: where failures leave this tier only.
        count: uploads in a month.
        overhead: share of the time lost where failures leave this tier only, at the interval planned.
        retention: what is kept there.
    """

    upload: PlannedUpload
    times: UploadTimes
    losses: TierLosses
    count: int
    overhead: float
    retention: RetentionCost


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
        uploads: the upload tiers.
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
    uploads: Sequence[UploadCost]
    assumptions: Sequence[PlanAssumption]

    @property
    def bytes_per_parameter(self) -> float:
        """The bytes of a checkpoint per parameter."""
        return self.size_bytes / self.terms.model.parameters

    @property
    def held_bytes(self) -> int:
        """What a rank holds of the state, of the largest."""
        return self.terms.layout.held(self.size_bytes, _expert_bytes(self.terms, self.size_bytes))

    @property
    def written_bytes(self) -> int:
        """What a writing rank writes, of the largest."""
        return self.terms.replicas * _written(self.terms, self.size_bytes)

    def overhead_at(self, interval: float) -> float:
        """Return the share of the time lost at an interval between saves."""
        return _overhead(interval, self.times, self.mtbf, terms=self.terms, size_bytes=self.size_bytes)


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
    recommended = _recommended(terms, times, mtbf=mtbf, size_bytes=size)
    saves = _saves(terms, recommended, times, mtbf=mtbf, size_bytes=size)
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
            retention_cost(
                (name, terms.keep[name]),
                terms.storage,
                saves,
                restores=month.failures * (1 - terms.numbers.node_loss),
                size_bytes=size * terms.replicas,
                restored_bytes=size,
            )
            for name in terms.keep
        ],
        uploads=[
            _upload_cost(each, terms, times, saves, mtbf=mtbf, size_bytes=size) for each in terms.uploads
        ],
        assumptions=_assumptions(terms),
    )


def _recommended(terms: PlanTerms, times: SaveTimes, *, mtbf: float, size_bytes: int) -> float:
    """Return the seconds between saves that lose least."""
    best = optimal_interval(cost=times.cost, durable=times.durable, mtbf=mtbf)
    if terms.numbers.node_loss:
        # Two kinds of failures: no closed form, but one minimum.
        low, high = math.log(max(times.durable, times.stall)), math.log(max(best, times.durable) * 4)
        while high - low > 1e-4:
            third = (high - low) / 3
            losses = [
                _overhead(math.exp(each), times, mtbf, terms=terms, size_bytes=size_bytes)
                for each in (low + third, high - third)
            ]
            low, high = (low, high - third) if losses[0] <= losses[1] else (low + third, high)
        best = math.exp(low)
    return max(best, terms.numbers.step_seconds)


def save_times(terms: PlanTerms, size_bytes: int) -> SaveTimes:
    """Compute how long a save and a restore of so many bytes take."""
    numbers, layout, storage = terms.numbers, terms.layout, terms.storage
    copy = _written(terms, size_bytes) / numbers.staging_rate
    rate = storage.write_rate(layout)
    write = terms.replicas * size_bytes / rate + storage.commit_seconds
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


def _expert_bytes(terms: PlanTerms, size_bytes: int) -> int:
    """Return the bytes of experts: their share of the parameters."""
    return round(size_bytes * terms.model.experts / terms.model.parameters)


def _written(terms: PlanTerms, size_bytes: int) -> int:
    """Return the bytes of the state that a writing rank copies, of the largest."""
    return terms.layout.written(size_bytes, _expert_bytes(terms, size_bytes))


def _outage(terms: PlanTerms, times: SaveTimes) -> float:
    return terms.numbers.restart_seconds + times.restore


def _overhead(interval: float, times: SaveTimes, mtbf: float, *, terms: PlanTerms, size_bytes: int) -> float:
    """Return the share of the time lost, by failures of both kinds."""
    near = expected_overhead(
        interval, cost=times.cost, durable=times.durable, mtbf=mtbf, restart=_outage(terms, times)
    )
    share = terms.numbers.node_loss
    if not share:
        return near
    far = _losses(terms.uploads[0], terms, times, mtbf=mtbf, size_bytes=size_bytes).overhead(interval)
    return (1 - share) * near + share * far


def _upload_times(upload: PlannedUpload, terms: PlanTerms, times: SaveTimes, size_bytes: int) -> UploadTimes:
    rate = upload.rate(terms.layout, terms.storage)
    seconds = terms.replicas * size_bytes / rate + upload.storage.commit_seconds
    return UploadTimes(
        upload=seconds,
        uploaded=times.durable + seconds,
        rate=rate,
        restore=size_bytes / upload.storage.read_rate(terms.layout),
    )


def _losses(
    upload: PlannedUpload, terms: PlanTerms, times: SaveTimes, *, mtbf: float, size_bytes: int
) -> TierLosses:
    own = _upload_times(upload, terms, times, size_bytes)
    return TierLosses(
        cost=times.cost,
        times=own,
        every=upload.every,
        mtbf=mtbf,
        restart=terms.numbers.restart_seconds + own.restore,
    )


def _upload_cost(
    upload: PlannedUpload,
    terms: PlanTerms,
    times: SaveTimes,
    saves: Sequence[PlannedSave],
    *,
    mtbf: float,
    size_bytes: int,
) -> UploadCost:
    losses = _losses(upload, terms, times, mtbf=mtbf, size_bytes=size_bytes)
    sent = uploads_of(saves, upload.every, losses.times)
    is_first = upload is terms.uploads[0]
    return UploadCost(
        upload=upload,
        times=losses.times,
        losses=losses,
        count=len(sent),
        overhead=losses.overhead(_interval_of(terms, saves)),
        retention=retention_cost(
            (upload.keep_text, upload.keep),
            upload.storage,
            sent,
            restores=MONTH / mtbf * terms.numbers.node_loss if is_first else 0.0,
            size_bytes=size_bytes * terms.replicas,
            restored_bytes=size_bytes,
        ),
    )


def _interval_of(terms: PlanTerms, saves: Sequence[PlannedSave]) -> float:
    return MONTH / len(saves) if isinstance(terms.save, SavePolicy) else saves[0].time


def _saves(
    terms: PlanTerms, recommended: float, times: SaveTimes, *, mtbf: float, size_bytes: int
) -> list[PlannedSave]:
    step = terms.numbers.step_seconds
    if isinstance(terms.save, SavePolicy):
        costs = SaveCosts(
            stall=times.stall,
            slowdown=times.cost - times.stall,
            durable=times.durable,
            uploaded=_upload_times(terms.uploads[0], terms, times, size_bytes).uploaded
            if terms.uploads
            else None,
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
    interval = _interval_of(terms, saves)
    overhead = _overhead(interval, times, mtbf, terms=terms, size_bytes=size_bytes)
    dollars = terms.layout.ranks * terms.numbers.gpu_hour / HOUR
    return SavesOfMonth(
        interval=interval,
        overhead=overhead,
        count=len(saves),
        stalled=times.stall / interval,
        saving=times.cost / interval,
        failures=MONTH / mtbf,
        written_bytes=float(len(saves)) * size_bytes * terms.replicas,
        idle_dollars=len(saves) * times.stall * dollars,
        lost_dollars=overhead * MONTH * dollars,
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
    for upload in terms.uploads:
        far = upload.storage
        text = f"{far.write / _GB:g} GB/s write, {far.read / _GB:g} GB/s read, per {far.rate_of}"
        found.append(PlanAssumption(f"upload tier {upload.name}", text, far.source, "--upload"))
    if not terms.uploads:
        found = [each for each in found if each.option != "--node-loss"]
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
