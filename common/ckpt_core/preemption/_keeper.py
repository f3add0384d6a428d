"""The clock and the preemptions of a save policy, agreed on by all ranks."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Unpack, cast, final

import torch

from ckpt_core._torch_internals import changes_of
from ckpt_core.cadence import decide, needed_counts, preemptions
from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.policies import PREEMPTION, CadenceContext, Counts, FailureRate, SaveCosts, SavePolicy
from ckpt_core.preemption._sources import PreemptionSources
from ckpt_core.state import leaves
from ckpt_core.types import CapturedState
from ckpt_core.validation import integer, one_of, plain_integer, require


@final
class LastStep:
    """The small values of the last step, and whether its tensors are as they were.

    Data position, generators, schedules and other small values are copied at every step. Tensors are not: an
    optimizer step that has begun since, or any change in place, such as of batch statistics in the forward of
    the next step, makes the step one that cannot be saved any more. `step` is -1 before there is one.
    """

    def __init__(self) -> None:
        self.step, self.state = -1, CapturedState()
        self.arguments: Mapping[str, Any] = {}
        self._problem, self._changes = "no step was finished", list[int]()
        self._hooks: list[Any] = []

    def note(self, step: int, take: Callable[[], CapturedState], *, again: bool = False, **save: Any) -> None:
        """Keep the first state of a step, or the last of those that are noted `again`."""
        if step == self.step and not again:
            return  # perhaps within an accumulation window
        state = take()
        if [*state.optimizers] != [*self.state.optimizers]:
            self.close()
            self._hooks = [each.register_step_pre_hook(self._before_step) for each in state.optimizers]
        per_rank, shared = copy.deepcopy((state.per_rank, state.shared))
        self.step, self.arguments = step, save
        self.state = replace(state, per_rank=per_rank, shared=shared)
        self._problem, self._changes = "", _changes(state)

    def problem(self) -> str:
        """Return why the state is not that of the step any more; "" if it is."""
        if not self._problem and self._changes != _changes(self.state):
            self._problem = f"buffers or other tensors have changed after step {self.step}"
        return self._problem

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _before_step(self, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._note_begun()
            return None

        def noted() -> Any:
            loss = closure()  # forward and backward, before which an optimizer changes nothing
            self._note_begun()
            return loss

        return args[:1], {**kwargs, "closure": noted}

    def _note_begun(self) -> None:
        self._problem = f"an optimizer step has begun after step {self.step}"


def _changes(state: CapturedState) -> list[int]:
    tensors = (value for tree in state.sharded.values() for _, value in leaves(tree))
    return [changes_of(each) for each in tensors if isinstance(each, torch.Tensor)]


_logger = logger_of(__name__)

_MICROSECONDS = 1_000_000
_SAME_SECONDS = 30.0
_SHARE: Final = 0.01
"""Of the time since the last save: for so long ranks decide on the facts that they have."""
_MOST_SECONDS: Final = 1.0
_MOST_STEPS: Final = 16
_USUAL: Final = 3
"""So many saves of a run count instead of what the run before it knew; the first cost more than usual."""
_MARGIN: Final = 2.0
"""The last save of a planned end may take so many times as long as usual."""
_END_SECONDS: Final = 10.0
"""For the end of the program after its last save."""
_UNKNOWN_SECONDS, _UNKNOWN_SHARE = 300.0, 0.25
"""What a save needs before one was measured: so long, at most so much of the time from start to end."""
_SAVE, _STOP = 1, 2
_ANNOUNCED, _NONE = frozenset({PREEMPTION}), frozenset[str]()
_COUNTS: Final = "counts"
"""The annotation that holds the counts of a checkpoint."""
_COSTS: Final = "costs"
"""The annotation that holds what saves had cost until a checkpoint, for the run that continues it."""
_UNKNOWN: Final = ("uploaded", None)


@final
class CadenceKeeper:
    """The state of a save policy. Main thread; collective where the policy needs it.

    The coordinator's clock and the preemptions of all ranks are reduced first; after that each rank evaluates
    the policy on the same facts, so that no decision has to be sent. Facts are good for a hundredth of the
    time since the last save, at most a second: short steps are not worth an exchange each. Schedulers signal
    one rank after another: requests to save and continue within 30 s of one already agreed on count as the
    same one.

    Args:
        listen: whether to install signal handlers now; otherwise at the first check, so that without checks
            no signal is swallowed.
        measured: the costs of saves (a `CostMeter`), for policies that need them; the coordinator's count.
        failures: asks the coordinator how often the job fails, once the root is taken; for policies that need
            it.

    Attributes:
        preempted: whether training must stop, as of the last check.
        pending: whether a preemption still needs its save.
        extra: whether the last decision was to save for a preemption alone.
        upload_seconds: the longest wait for the upload of the last save; 0 if it is not waited for.
        report: called on the coordinator with the interval that the policy finds, when costs have changed.
    """

    def __init__(
        self,
        policy: SavePolicy | None,
        coordinator: Coordinator,
        # Not the time of day, which may be put forward or back in the middle of a run.
        clock: Callable[[], float] = time.monotonic,
        *,
        listen: bool = True,
        measured: Any = None,
        failures: Callable[[], FailureRate] | None = None,
    ) -> None:
        self._policy = policy
        self._measured = measured if policy is not None and policy.needs_costs else None
        self._ask_failures = failures if policy is not None and policy.needs_failures else None
        self._heeds_preemptions = bool(preemptions(policy))
        self._collective = policy is not None and (policy.needs_agreement or policy.needs_costs)
        self._coordinator = coordinator
        self._clock = clock
        self._started = clock()
        self._previous_step: int | None = None
        self._earlier_step: int | None = None
        self._last_save_step: int | None = None
        self._last_save_time: float | None = None
        self._timed = True
        self._counts: Counts = {"epochs": 0, "tokens": 0}
        self._since_counts: Counts = self._counts
        self.progress: dict[str, int] = {}
        self._sources = PreemptionSources(preemptions(policy)) if listen else None
        self._costs: SaveCosts | None = None
        self._earlier_costs: SaveCosts | None = None
        self._failures: FailureRate | None = None
        self._in_flight = False
        self._known = 0
        self._agreed: int | None = None
        self._next = 0
        self._now = self._announced_at = -math.inf
        self.pending = self.preempted = self.extra = False
        self._reported: SaveCosts | None = None
        self.report: Callable[..., None] | None = None
        self.upload_seconds = 0.0

    def check_preemption(self, **counts: Unpack[Counts]) -> str | None:
        """Return "preemption" if a save or stop is due. Collective if the policy has any.

        Counts, if given, are where counting begins.
        """
        if found := self._checked(counts):
            self._counts = self._since_counts = {**self._counts, **found}
        if self._heeds_preemptions:
            self._agree()
            self._agreed = None
        return PREEMPTION if self.preempted or self.pending else None

    def due(self, step: int, total_steps: int | None = None, **counts: Unpack[Counts]) -> str | None:
        """Return the reason to save this step now, or None."""
        found = self._checked(counts, total_steps)
        if self._policy is None:
            return None
        if self._collective:
            self._agree_at(step, last=step == total_steps)
        if step == self._last_save_step:
            self.pending = False  # this step is saved already
        if step != self._previous_step:  # else it is decided once more, as after an evaluation
            self._earlier_step, self._since_counts = self._previous_step, self._counts
        context = CadenceContext(
            step=step,
            now=self._now if self._collective else self._started,
            started=self._started,
            previous_step=self._earlier_step,
            last_save_step=self._last_save_step,
            last_save_time=self._last_save_time,
            total_steps=total_steps,
            signals=_ANNOUNCED if self.pending else _NONE,
            counts=found,
            since_counts=self._since_counts,
            costs=self._known_costs,
            failures=self._failures,
            in_flight=self._in_flight,
        )
        if context.costs != self._reported:
            self._report(context)
        self._previous_step = step
        if found:
            self._counts = {**self._counts, **found}
        self.extra = self.pending and decide(self._policy, context._replace(signals=_NONE)) is None
        return decide(self._policy, context)

    def _checked(self, counts: Mapping[str, Any], total_steps: int | None = None) -> Counts:
        """Return counts as integers, and note the progress; None is the same as no count.

        Raises:
            ConfigError: one of them is no count.
        """
        given = {name: plain_integer(value) for name, value in counts.items() if value is not None}
        require("due", *(_problem(name, value) for name, value in given.items()))
        known = given if total_steps is None else {**given, "total_steps": plain_integer(total_steps)}
        self.progress |= {name: known[name] for name in ("epochs", "total_steps") if name in known}
        return cast("Counts", given)

    def _report(self, context: CadenceContext) -> None:
        costs = self._reported = context.costs
        found = None if self._policy is None else self._policy.interval(context)
        if found is None or costs is None or self.report is None or not self._coordinator.is_coordinator:
            return
        rate = found.failures
        self.report(
            rule=repr(self._policy),
            interval_seconds=found.seconds,
            costs=costs._asdict(),
            mtbf_seconds=None if rate is None else rate.mtbf,
            mtbf_source=None if rate is None else rate.source,
        )

    def saved(self, step: int) -> None:
        """Note that a step was saved, or resumed from.

        Collective the first time if the policy needs the rate of failures: the root is taken now.
        """
        if self._ask_failures is not None:
            ask, self._ask_failures = self._ask_failures, None
            found = self._coordinator.run_on_coordinator(lambda: ask()._asdict(), what="learning")
            self._failures = FailureRate(**found)
        # Without a `due` at this step, ranks agree on the time at the next one.
        self._timed = step == self._previous_step
        self._last_save_time = self._now if self._timed else None
        self._last_save_step = self._previous_step = step
        self._agreed = None
        self.pending = self.extra = False  # this was the requested save

    @property
    def annotations(self) -> dict[str, Any]:
        """The counts and costs that the policy needs, for the manifest of a save."""
        needed = needed_counts(self._policy)
        found = {name: count for name, count in self._counts.items() if name in needed}
        costs = self._known_costs
        return ({_COUNTS: found} if found else {}) | ({} if costs is None else {_COSTS: costs._asdict()})

    def count_from(self, annotations: Callable[[], Mapping[str, Any]]) -> None:
        """Continue where a checkpoint was saved.

        Collective if the policy counts or needs costs.

        Args:
            annotations: reads its annotations, on the coordinator; without counts in them, those of the next
                decision are where counting begins. Costs in them count until this run knows three saves.
        """
        counts = bool(needed_counts(self._policy))
        if not counts and self._measured is None:
            return

        def read() -> tuple[dict[str, int], list[float | None]]:
            found = annotations()
            return _recorded(found), _recorded_costs(found)

        found, costs = self._coordinator.run_on_coordinator(read, what="counting")
        if counts:
            self._counts = self._since_counts = cast("Counts", found)
        if costs:
            self._earlier_costs = SaveCosts(*cast("Any", costs))

    @property
    def _known_costs(self) -> SaveCosts | None:
        own, earlier = self._costs, self._earlier_costs
        if own is None or earlier is None or own.saves >= min(_USUAL, earlier.saves):
            return own or earlier
        return earlier._replace(lost=own.lost)

    @property
    def seconds_left(self) -> float:
        """The seconds until this rank must end, for the job ends then."""
        end = None if self._sources is None else self._sources.ends_at
        return math.inf if end is None else end - time.time() - _END_SECONDS

    def close(self) -> None:
        if self._sources is not None:
            self._sources.close()

    def _agree_at(self, step: int, *, last: bool) -> None:
        """Agree on the facts, unless those of the last agreement are recent enough.

        How many steps that is, every rank computes from facts agreed on.
        """
        agreed, before = self._agreed, self._now
        if agreed is not None and agreed < step < self._next and not last:
            return
        self._agree()
        self._agreed, self._next = step, step + 1
        if agreed is None or step <= agreed or self._now <= before:
            return
        begin = self._started if self._last_save_time is None else self._last_save_time
        patience, taken = min((self._now - begin) * _SHARE, _MOST_SECONDS), step - agreed
        # No more than twice as many as the time is known of: the next steps may be long ones.
        steps = min(int(patience * taken / (self._now - before)), 2 * taken, _MOST_STEPS)
        self._next = step + max(1, steps)

    def _agree(self) -> None:
        sources = self._sources = self._sources or PreemptionSources(preemptions(self._policy))
        self._coordinator.check()  # before anything depends on which rank this is
        own = (self._clock(), self._started) if self._coordinator.is_coordinator else (0.0, 0.0)
        announced, now, started, *measured = self._coordinator.all_reduce_max(
            [
                self._announced(sources),
                *(round(each * _MICROSECONDS) for each in own),
                *self._measured_here(),
            ],
            what="deciding whether to save",
        )
        self._now, self._started = now / _MICROSECONDS, started / _MICROSECONDS
        if measured:
            self._in_flight = bool(measured[0])
            self._costs = _as_costs(measured[1:])
        if not self._timed:
            self._last_save_time, self._timed = self._now, True
        if not announced or self.preempted:
            return
        self._known, self._announced_at = sources.count, self._now
        self.preempted = announced == _STOP
        self.pending = True

    def _measured_here(self) -> Sequence[int]:
        """Return whether a save is in flight here, and the costs; () if not needed.

        They are integers for a maximum over ranks, of which one alone has costs.
        """
        if self._measured is None:
            return ()
        found = [int(self._measured.in_flight)]
        costs = self._measured.costs if self._coordinator.is_coordinator else None
        if costs is None:
            return found + [0] * len(SaveCosts._fields)
        # A time that is not known is 0, so that one of 0 is 1.
        return found + [
            costs.saves if name == "saves" else 0 if value is None else round(value * _MICROSECONDS) + 1
            for name, value in zip(SaveCosts._fields, costs, strict=True)
        ]

    def _announced(self, sources: PreemptionSources) -> int:
        if not self._heeds_preemptions:
            return 0
        if sources.stop or (self._coordinator.is_coordinator and self._is_ending(sources)):
            return _STOP
        if 0 <= self._now - self._announced_at < _SAME_SECONDS:
            self._known = sources.count
        return _SAVE if sources.count > self._known else 0

    def _is_ending(self, sources: PreemptionSources) -> bool:
        """Return whether the end is so near that the last save must begin."""
        end, costs = sources.ends_at, self._known_costs
        if end is None or self.preempted:
            return False
        if costs is None:
            needed = min(_UNKNOWN_SECONDS, (end - sources.began) * _UNKNOWN_SHARE)
        else:
            save = max(costs.durable, min(costs.uploaded or 0.0, self.upload_seconds))
            # One in flight is finished first, and ranks agree at the end of a step, up to a second late.
            rest = costs.durable if self._in_flight else 0.0
            needed = _MARGIN * (save + rest + costs.step) + _MOST_SECONDS
        left = self.seconds_left
        if left <= needed:
            _logger.warning(
                "the job ends in %.0f s: its last save begins now, for which %.0f s are planned%s",
                left + _END_SECONDS, needed + _END_SECONDS, "" if costs else ", as no save was measured yet",
            )  # fmt: skip
        return left <= needed


def _as_costs(integers: Sequence[int]) -> SaveCosts | None:
    """Return the costs in integers; None if no save was measured."""
    named = dict(zip(SaveCosts._fields, integers, strict=True))
    if not (saves := named.pop("saves")):
        return None
    times = {name: (value - 1) / _MICROSECONDS if value else None for name, value in named.items()}
    return SaveCosts(saves=saves, **cast("dict[str, Any]", times))


def _problem(name: str, value: Any) -> str | None:
    return one_of("a count", name, sorted(Counts.__annotations__)) or integer(name, value, minimum=0)


def _recorded(annotations: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts in annotations, which a user may have written, too."""
    found = annotations.get(_COUNTS)
    pairs = found.items() if isinstance(found, Mapping) else ()
    return {name: value for name, value in pairs if _problem(name, value) is None}


def _recorded_costs(annotations: Mapping[str, Any]) -> list[float | None]:
    """Return the costs in annotations; this run has lost nothing yet. [] without any."""
    found = annotations.get(_COSTS)
    if not isinstance(found, Mapping) or set(found) != set(SaveCosts._fields):
        return []
    values: list[Any] = [0.0 if name == "lost" else found[name] for name in SaveCosts._fields]
    needed = [each for name, each in zip(SaveCosts._fields, values, strict=True) if (name, each) != _UNKNOWN]
    return values if all(isinstance(each, int | float) and 0 <= each < math.inf for each in needed) else []
