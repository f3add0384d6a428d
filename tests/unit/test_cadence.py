"""When to save: each policy by itself, in combination, and over whole simulated runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.cadence import (
    AtSteps,
    EveryEpochs,
    EveryFraction,
    EverySeconds,
    EverySteps,
    EveryTokens,
    OnPreemption,
    decide,
    preemptions,
)
from ckpt_core.errors import ConfigError
from ckpt_core.policies import PREEMPTION, AllOf, AnyOf, CadenceContext, Not, SavePolicy
from ckpt_core.retention import KeepLatest

STRIDES = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def at(step: int, **facts) -> CadenceContext:
    return CadenceContext(step=step, **{"now": 0.0, "started": 0.0, **facts})


def run(policy: SavePolicy, steps: list[int], *, total_steps: int | None = None) -> list[int]:
    """The steps saved in a run that decides at `steps`, one second per step, every save at once."""
    saved: list[int] = []
    previous = None
    for step in steps:
        last = saved[-1] if saved else None
        context = at(
            step,
            now=float(step),
            previous_step=previous,
            last_save_step=last,
            last_save_time=None if last is None else float(last),
            total_steps=total_steps,
        )
        if decide(policy, context):
            saved.append(step)
        previous = step
    return saved


def walk(strides: list[int]) -> list[int]:
    return [sum(strides[: i + 1]) for i in range(len(strides))]


def first_at_or_after(boundaries: list[int], steps: list[int]) -> list[int]:
    """What an ideal cadence saves: for each boundary the first decision that can see it."""
    return sorted({min(s for s in steps if s >= b) for b in boundaries if b <= steps[-1]})


@given(n=st.integers(1, 50), offset=st.integers(0, 60), strides=STRIDES)
def test_every_steps_fires_once_per_boundary_whatever_the_stride(n, offset, strides):
    steps = [0, *walk(strides)]
    boundaries = [b for b in range(offset, steps[-1] + 1, n) if b > 0]
    assert run(EverySteps(n, offset=offset), steps) == first_at_or_after(boundaries, steps)


@given(targets=st.sets(st.integers(1, 500), min_size=1), strides=STRIDES)
def test_at_steps_fires_once_per_step_named_whatever_the_stride(targets, strides):
    steps = [0, *walk(strides)]
    assert run(AtSteps(targets), steps) == first_at_or_after(sorted(targets), steps)


@given(parts=st.integers(1, 30), total=st.integers(30, 2000), strides=STRIDES)
def test_every_fraction_fires_once_per_part_whatever_the_stride(parts, total, strides):
    steps = [0, *walk(strides)]
    boundaries = [-(-k * total // parts) for k in range(1, parts * steps[-1] // total + 1)]
    assert run(EveryFraction(1 / parts), steps, total_steps=total) == first_at_or_after(boundaries, steps)


def test_every_fraction_of_a_tenth_saves_ten_times_and_ends_at_the_end():
    assert run(EveryFraction(0.1, total_steps=1000), list(range(1001))) == list(range(100, 1001, 100))


@given(seconds=st.integers(1, 100), strides=STRIDES)
def test_every_seconds_never_waits_longer_than_asked_and_never_saves_sooner(seconds, strides):
    steps = [0, *walk(strides)]
    saved = run(EverySeconds(seconds), steps)
    for earlier, later in zip([0, *saved], saved, strict=False):
        assert later - earlier >= seconds
        assert later == min(step for step in steps if step - earlier >= seconds)
    assert steps[-1] - (saved[-1] if saved else 0) < seconds or steps[-1] in saved


policies = st.recursive(
    st.one_of(
        st.builds(EverySteps, st.integers(1, 20), offset=st.integers(0, 20)),
        st.builds(AtSteps, st.sets(st.integers(0, 200), min_size=1)),
        st.builds(EverySeconds, st.floats(0.5, 50)),
        st.builds(EveryFraction, st.floats(0.01, 1), total_steps=st.integers(1, 500)),
        st.builds(EveryEpochs, st.integers(1, 5)),
        st.builds(EveryTokens, st.integers(1, 500)),
        st.just(OnPreemption()),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        inner.map(lambda policy: ~policy),
    ),
    max_leaves=5,
)
contexts = st.builds(
    CadenceContext,
    step=st.integers(0, 300),
    now=st.floats(0, 1000),
    started=st.floats(0, 1000),
    previous_step=st.none() | st.integers(0, 300),
    last_save_step=st.none() | st.integers(0, 300),
    last_save_time=st.none() | st.floats(0, 1000),
    signals=st.sampled_from([frozenset[str](), frozenset({PREEMPTION})]),
    counts=st.fixed_dictionaries({"epochs": st.integers(0, 10), "tokens": st.integers(0, 2000)}),
    since_counts=st.fixed_dictionaries(
        {}, optional={"epochs": st.integers(0, 10), "tokens": st.integers(0, 2000)}
    ),
)


@given(policy=policies, context=contexts)
def test_no_policy_saves_a_step_twice(policy, context):
    if context.step == context.last_save_step:
        assert decide(policy, context) is None


@given(left=policies, right=policies, context=contexts)
def test_combinators_are_the_logic_they_spell(left, right, context):
    one, two = left.decide(context), right.decide(context)
    assert bool((left | right).decide(context)) == (bool(one) or bool(two))
    assert bool((left & right).decide(context)) == (bool(one) and bool(two))
    assert bool((~left).decide(context)) == (not one)


@given(policy=policies, context=contexts, other=contexts)
def test_a_policy_that_needs_no_agreement_ignores_time_and_signals(policy, context, other):
    if not policy.needs_agreement:
        elsewhere = CadenceContext(
            step=context.step,
            previous_step=context.previous_step,
            last_save_step=context.last_save_step,
            now=other.now,
            started=other.started,
            last_save_time=other.last_save_time,
            signals=other.signals,
            counts=context.counts,
            since_counts=context.since_counts,
        )
        assert decide(policy, context) == decide(policy, elsewhere)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (EverySteps(5), False),
        (AtSteps([5]), False),
        (EveryFraction(0.5), False),
        (EveryEpochs(5), False),
        (EveryTokens(5), False),
        (EverySeconds(5), True),
        (OnPreemption(), True),
        (EverySteps(5) | AtSteps([1]), False),
        (EverySteps(5) | EverySeconds(5), True),
        (EverySteps(5) & ~OnPreemption(), True),
    ],
)
def test_only_rank_local_facts_need_agreement(policy, expected):
    assert policy.needs_agreement is expected


def test_a_policy_of_the_users_own_is_assumed_to_need_agreement():
    class WhenLucky(SavePolicy):
        def decide(self, context: CadenceContext) -> str | None:
            return "lucky" if context.step == 7 else None

    assert WhenLucky().needs_agreement
    assert decide(WhenLucky() | EverySteps(5), at(7)) == "lucky"


def test_step_zero_is_no_boundary_but_can_be_named():
    assert decide(EverySteps(5), at(0)) is None
    assert decide(AtSteps([0]), at(0)) == "at step 0"


def test_the_first_decision_after_a_resume_sees_a_boundary_that_was_jumped_over():
    assert decide(EverySteps(100), at(205, last_save_step=190))
    assert decide(EverySteps(100), at(205, last_save_step=200)) is None


def test_an_explicit_save_past_the_boundary_satisfies_it():
    assert decide(EverySteps(100), at(105, previous_step=95, last_save_step=101)) is None
    assert decide(EverySteps(100), at(105, previous_step=95, last_save_step=90)) == "every 100 steps"


def test_going_back_to_an_earlier_step_neither_blocks_nor_floods_the_cadence():
    assert decide(EverySteps(100), at(250, previous_step=900, last_save_step=900)) is None
    assert decide(EverySteps(100), at(300, previous_step=900, last_save_step=900)) == "every 100 steps"


def test_a_boundary_asked_for_twice_stays_due_until_it_is_saved():
    assert decide(EverySteps(100), at(100, previous_step=100)) == "every 100 steps"


def test_every_seconds_counts_from_the_start_until_there_is_a_save():
    assert decide(EverySeconds(10), at(1, now=105, started=100)) is None
    assert decide(EverySeconds(10), at(1, now=110, started=100)) == "every 10 s"
    assert decide(EverySeconds(10), at(1, now=110, started=0, last_save_step=0, last_save_time=105)) is None


def test_preemption_fires_and_every_combination_tells_what_announces_it():
    one, other = OnPreemption(("SIGUSR2",)), OnPreemption((), file="stop", stop=False)
    assert preemptions(EverySteps(5) | (one & ~other)) == (one, other)
    assert preemptions(EverySteps(5) | EverySeconds(5)) == ()
    assert OnPreemption().signals == ("SIGTERM", "SIGUSR1")
    assert decide(OnPreemption(), at(3, signals=frozenset({PREEMPTION}))) == "preemption"
    assert decide(OnPreemption(), at(3)) is None


def test_the_reason_names_every_policy_that_fired():
    context = at(100, now=50, signals=frozenset({PREEMPTION}))
    assert (
        decide(EverySteps(100) | EverySeconds(900) | OnPreemption(), context) == "every 100 steps, preemption"
    )
    assert decide(EverySteps(100) & EverySeconds(50), context) == "every 100 steps and every 50 s"
    assert decide(~AtSteps([3]), context) == "not AtSteps(steps=(3,))"


def test_every_combination_tells_which_counts_it_needs():
    assert (EverySteps(5) | (EveryEpochs(1) & ~EveryTokens(9))).counts == {"epochs", "tokens"}
    assert (EverySteps(5) | ~EverySeconds(5)).counts == frozenset()


def test_a_count_that_is_unknown_is_asked_for_by_name():
    with pytest.raises(ConfigError, match=r"EveryTokens\(n=5\).* maybe_save\(step, state, tokens=…\)"):
        decide(EverySteps(2) | EveryTokens(5), at(4, counts={"epochs": 1}))


def test_chains_of_one_combinator_stay_flat():
    a, b, c = EverySteps(1), EverySteps(2), EverySteps(3)
    assert a | b | c == a | (b | c) == AnyOf((a, b, c))
    assert a & b & c == AllOf((a, b, c))
    assert ~a == Not(a)


def test_policies_are_values():
    assert AtSteps([3, 1, 3]) == AtSteps((1, 3)) == AtSteps({1, 3})
    assert len({EverySteps(5), EverySteps(5), AtSteps([1]), AtSteps((1,))}) == 2
    with pytest.raises(AttributeError):
        EverySteps(5).n = 6  # type: ignore[misc]


def test_every_fraction_without_a_total_says_what_to_do():
    with pytest.raises(ConfigError, match="total_steps="):
        decide(EveryFraction(0.1), at(5))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: EverySteps(0), "n must be a whole number of at least 1, not 0"),
        (lambda: EverySteps(True), "not True"),
        (lambda: EverySteps(2.0), "not 2.0"),
        (lambda: EverySteps(-1, offset=-1), "n must .*; offset must"),
        (lambda: AtSteps([]), "non-empty"),
        (lambda: AtSteps("12"), "non-empty list"),
        (lambda: AtSteps([1, -2, "x"]), r"\[-2, 'x'\]"),
        (lambda: EverySeconds(float("nan")), "above 0"),
        (lambda: EverySeconds(float("inf")), "above 0"),
        (lambda: EverySeconds(0), "above 0"),
        (lambda: EveryFraction(1.5), "between"),
        (lambda: EveryFraction(1e-9), "between"),
        (lambda: EveryFraction("half"), "finite number"),
        (lambda: EveryFraction(0.5, total_steps=0), "total_steps"),
        (lambda: OnPreemption(()), "non-empty"),
        (lambda: OnPreemption(("SIGKILL", "SIGTERM", "TERM")), r"\['SIGKILL', 'TERM'\]"),
        (lambda: OnPreemption("SIGTERM"), "tuple"),
        (lambda: OnPreemption(file=""), "file must be a non-empty string"),
        (lambda: OnPreemption(when="module.function"), "package.module:function"),
        (lambda: OnPreemption(when=5), "when must be a function"),
        (lambda: OnPreemption(stop="yes"), "stop must be true or false"),
        (lambda: EveryEpochs(0), "EveryEpochs: n must be a whole number of at least 1, not 0"),
        (lambda: EveryTokens(1e9), "EveryTokens: n must be a whole number"),
        (lambda: AnyOf(()), "non-empty"),
        (lambda: EverySteps(5) | KeepLatest(3), "SavePolicy"),
        (lambda: EverySteps(5) & None, "SavePolicy"),
        (lambda: Not(5), "SavePolicy"),
    ],
)
def test_wrong_arguments_are_named(build, words):
    with pytest.raises(ConfigError, match=words):
        build()
