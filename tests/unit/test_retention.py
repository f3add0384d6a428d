"""What to keep: each policy by itself, in combination, and the guarantees of a prune plan."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core.cadence import EverySteps
from ckpt_core.errors import ConfigError
from ckpt_core.options import policy_from
from ckpt_core.policies import AllOf, AnyOf, Not, RetentionPolicy
from ckpt_core.retention import (
    UNRANKED,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepEveryEpochs,
    KeepEveryFraction,
    KeepEverySeconds,
    KeepFor,
    KeepLatest,
    KeepSteps,
    KeepThinned,
    KeepWeights,
    KeepWithin,
    plan_prune,
)
from ckpt_core.types import CheckpointInfo, Lineage, Parent

NOW = 1000.0
COUNT = st.integers(1, 8)
METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats(allow_nan=True), max_size=2)


def info(
    step: int, *, created: float | None = None, pinned: str | None = None, size: int = 0, **metrics: float
):
    when = float(step) if created is None else created
    return CheckpointInfo(
        step=step, name=f"step-{step:09d}", created=when, pinned=pinned, size_bytes=size, metrics=metrics
    )


def marked(damaged: CheckpointInfo) -> CheckpointInfo:
    return replace(damaged, damaged="__0_0.distcp: missing")


def history_of(*steps: int) -> list[CheckpointInfo]:
    return [info(step) for step in steps]


histories = st.dictionaries(
    st.integers(0, 100),
    st.tuples(
        st.floats(0, NOW),
        st.sampled_from([None, None, None, "paper", ""]),
        st.integers(0, 50),
        st.sampled_from([None, 100, 50]),
        METRICS,
    ),
    max_size=14,
).map(
    lambda drawn: [
        replace(info(s, created=c, pinned=p, size=n, **m), epochs=total and s // 10, total_steps=total)
        for s, (c, p, n, total, m) in drawn.items()
    ]
)

judging_alone = st.one_of(
    st.just(KeepAll()),
    st.builds(KeepFor, st.floats(1, 1500)),
    st.builds(KeepSteps, st.sets(st.integers(0, 100), min_size=1)),
)
leaves = st.one_of(
    judging_alone,
    judging_alone.map(lambda policy: ~policy),
    st.builds(KeepLatest, COUNT),
    st.builds(KeepEvery, st.integers(1, 40)),
    st.builds(KeepEveryFraction, st.floats(0.05, 1), total_steps=st.sampled_from([None, 80])),
    st.builds(KeepEveryEpochs, st.integers(1, 4)),
    st.builds(KeepEverySeconds, st.floats(1, 500)),
    st.builds(KeepBest, st.sampled_from(["loss", "accuracy"]), n=COUNT, mode=st.sampled_from(["min", "max"])),
    st.builds(KeepThinned, hourly=COUNT, daily=st.integers(0, 2), weekly=st.integers(0, 2)),
)
unions = st.lists(leaves, min_size=1, max_size=3).map(lambda some: reduce(operator.or_, some))
bounds = st.builds(KeepWithin, st.integers(1, 200))
policies = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
    ),
    max_leaves=5,
)


@given(policy=policies, history=histories)
def test_a_plan_never_empties_a_history_and_accounts_for_every_checkpoint(policy, history):
    plan = plan_prune(policy, history, NOW)
    assert bool(plan.keep) == bool(history)
    assert sorted([*plan.keep, *(dropped.step for dropped in plan.drop)]) == sorted(i.step for i in history)


@given(policy=policies, history=histories.filter(bool))
def test_the_newest_and_the_last_committed_always_stay(policy, history):
    plan = plan_prune(policy, history, NOW)
    assert max(i.step for i in history) in plan.keep
    assert max(history, key=lambda i: (i.created, i.step)).step in plan.keep


@given(policy=policies, history=histories)
def test_pinned_checkpoints_always_stay(policy, history):
    assert {i.step for i in history if i.pinned is not None} <= set(plan_prune(policy, history, NOW).keep)


@given(policy=policies, history=histories, luck=st.randoms(use_true_random=False))
def test_the_damaged_neither_count_nor_go(policy, history, luck):
    """Whatever is marked, even if pinned or the newest, the rest fares as if it were not there."""
    mixed = [marked(i) if luck.random() < 0.5 else i for i in history]
    sound = [i for i in mixed if i.damaged is None]
    plan, without = plan_prune(policy, mixed, NOW), plan_prune(policy, sound, NOW)
    assert (plan.keep, plan.drop) == (without.keep, without.drop)
    assert plan.damaged == tuple(sorted((i for i in mixed if i.damaged is not None), key=lambda i: i.step))
    assert (without.damaged, bool(plan.keep)) == ((), bool(sound))


@given(policy=policies, history=histories)
def test_pruning_twice_is_pruning_once(policy, history):
    first = plan_prune(policy, history, NOW)
    second = plan_prune(policy, [i for i in history if i.step in first.keep], NOW)
    assert second.drop == ()
    assert set(second.keep) == set(first.keep)


@given(policy=policies, history=histories, luck=st.randoms(use_true_random=False))
def test_a_prune_cut_short_and_repeated_never_drops_what_the_whole_one_keeps(policy, history, luck):
    whole = plan_prune(policy, history, NOW)
    left = [i for i in history if i.step in whole.keep or luck.random() < 0.5]
    assert set(plan_prune(policy, left, NOW).keep) >= set(whole.keep)


@given(policy=policies, history=histories, seed=st.integers())
def test_the_order_of_the_history_does_not_matter(policy, history, seed):
    shuffled = random.Random(seed).sample(history, len(history))
    assert policy.keep(shuffled, NOW) == policy.keep(history, NOW)
    one, two = plan_prune(policy, history, NOW), plan_prune(policy, shuffled, NOW)
    assert (one.keep, one.drop) == (two.keep, two.drop)


@given(policy=policies, history=histories)
def test_a_policy_keeps_only_what_there_is(policy, history):
    assert policy.keep(history, NOW) <= {i.step for i in history}


@given(left=policies, right=policies, history=histories)
def test_or_is_union_and_and_is_intersection(left, right, history):
    one, two = left.keep(history, NOW), right.keep(history, NOW)
    assert (left | right).keep(history, NOW) == one | two
    assert (left & right).keep(history, NOW) == one & two


@given(policy=judging_alone, history=histories)
def test_not_is_complement(policy, history):
    assert (~policy).keep(history, NOW) == {i.step for i in history} - policy.keep(history, NOW)


@given(policy=policies, history=histories, luck=st.randoms(use_true_random=False))
def test_what_is_kept_stays_kept_when_others_are_gone(policy, history, luck):
    smaller = [i for i in history if luck.random() < 0.5]
    left = {i.step for i in smaller}
    assert policy.keep(history, NOW) & left <= policy.keep(smaller, NOW)


@given(history=histories, n=COUNT, mode=st.sampled_from(["min", "max"]))
def test_larger_budgets_keep_supersets(history, n, mode):
    assert KeepLatest(n).keep(history, NOW) <= KeepLatest(n + 1).keep(history, NOW)
    best, more = KeepBest("loss", n=n, mode=mode), KeepBest("loss", n=n + 1, mode=mode)
    assert best.keep(history, NOW) <= more.keep(history, NOW)
    assert KeepFor(n * 100).keep(history, NOW) <= KeepFor(n * 100 + 1).keep(history, NOW)


def test_latest_counts_steps_not_times():
    history = [info(1, created=9), info(2, created=8), info(3, created=7)]
    assert KeepLatest(2).keep(history, NOW) == {2, 3}
    assert KeepLatest(9).keep(history, NOW) == {1, 2, 3}


def test_every_keeps_exact_multiples_and_not_the_beginning():
    assert KeepEvery(100).keep(history_of(*range(0, 501, 50)), NOW) == {100, 200, 300, 400, 500}


def test_every_keeps_the_first_past_a_multiple_when_saves_miss_it():
    assert KeepEvery(100).keep(history_of(60, 130, 170, 310, 399, 402), NOW) == {130, 310, 402}


def test_every_seconds_keeps_the_first_committed_of_each_span():
    history = [info(5, created=59), info(4, created=0), info(6, created=60), info(9, created=200)]
    assert KeepEverySeconds(60).keep(history, NOW) == {4, 6, 9}


def test_best_takes_lowest_or_highest_and_of_equals_the_newer():
    history = [info(1, loss=3.0), info(2, loss=1.0), info(3, loss=1.0), info(4, loss=2.0)]
    assert KeepBest("loss").keep(history, NOW) == {3}
    assert KeepBest("loss", n=3).keep(history, NOW) == {2, 3, 4}
    assert KeepBest("loss", mode="max").keep(history, NOW) == {1}
    assert KeepBest("loss", n=2, mode="max").keep(history, NOW) == {1, 4}


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_never_takes_nan_or_a_missing_metric(mode):
    history = [info(1, loss=math.nan), info(2), info(3, loss=5.0), info(4, accuracy=0.0)]
    assert KeepBest("loss", n=4, mode=mode).keep(history, NOW) == {3}
    assert KeepBest("perplexity", mode=mode).keep(history, NOW) == frozenset()


def test_newer_than_and_steps_judge_each_checkpoint_alone():
    history = [info(1, created=NOW - 10), info(2, created=NOW - 9.5), info(3, created=NOW + 5)]
    assert KeepFor(10).keep(history, NOW) == {2, 3}
    assert KeepSteps({1, 7}).keep(history, NOW) == {1}
    assert (KeepLatest(3) & ~KeepSteps([2])).keep(history, NOW) == {1, 3}


def test_a_plan_says_why_each_stays_and_lists_drops_from_the_lowest():
    history = [*history_of(30, 10, 20, 50), info(40, pinned="paper")]
    plan = plan_prune(KeepLatest(1) | KeepSteps([20, 50]), history, NOW)
    assert plan.keep == {
        20: ("KeepSteps(steps=(20, 50))",),
        40: ("pinned: paper",),
        50: ("newest", "KeepLatest(n=1)", "KeepSteps(steps=(20, 50))"),
    }
    assert [dropped.step for dropped in plan.drop] == [10, 30]


def test_training_that_went_back_keeps_what_it_commits():
    history = [info(500, created=1), info(600, created=2), info(400, created=3)]
    plan = plan_prune(KeepLatest(1), history, NOW)
    assert plan.keep == {400: ("committed last",), 600: ("newest", "KeepLatest(n=1)")}


def test_keep_latest_keeps_as_many_sound_ones_as_it_says_beside_the_damaged():
    history = [*history_of(1, 2, 3, 4), marked(info(5)), marked(info(6, pinned="paper"))]
    plan = plan_prune(KeepLatest(3), history, NOW)
    assert set(plan.keep) == {2, 3, 4}
    assert "newest" in plan.keep[4]
    assert ([i.step for i in plan.drop], [i.step for i in plan.damaged]) == ([1], [5, 6])


def test_a_damaged_checkpoint_does_not_protect_or_condemn_a_sound_one_of_its_step():
    sound = replace(info(4), name="checkpoint-4")
    assert plan_prune(KeepLatest(1), [info(3), sound, marked(info(4))], NOW).drop == (info(3),)
    assert plan_prune(KeepLatest(1), [info(5), sound, marked(info(4))], NOW).drop == (sound,)


@given(policy=policies, history=histories, gone=histories)
def test_pruning_abandoned_ones_twice_is_pruning_once_and_changes_nothing_else(policy, history, gone):
    left = [replace(each, name=f"old-{each.name}", abandoned=True) for each in gone]
    plan = plan_prune(policy, [*history, *left], NOW, abandoned="prune")
    assert plan.keep == plan_prune(policy, history, NOW).keep
    rest = [each for each in [*history, *left] if each not in plan.drop]
    again = plan_prune(policy, rest, NOW, abandoned="prune")
    assert (again.drop, set(again.keep)) == ((), set(plan.keep))


@pytest.mark.parametrize("policy", [KeepLatest(3), KeepBest("loss", n=3), KeepBest("loss", mode="max", n=3)])
def test_abandoned_ones_go_one_by_one_as_others_take_their_places(policy):
    left = [replace(info(step, loss=0.5), abandoned=True) for step in (70, 80, 90)]
    present = [info(step, created=100.0 + step, loss=0.5) for step in (1, 2, 3)]
    stays = []
    for saves in (1, 2, 3):
        plan = plan_prune(policy, [*left, *present[:saves]], NOW, abandoned="prune")
        stays.append([each.step for each in plan.abandoned])
        assert len(plan.keep) == saves
    assert stays == [[90, 80], [90], []]


@pytest.mark.parametrize(
    ("policy", "stays"),
    [
        # Saves of the new run: 1, then 2, and so on up to 7; the earlier run left 2, 4, 6 and 8.
        (KeepEvery(2), [{2, 4, 6, 8}, {4, 6, 8}, {4, 6, 8}, {6, 8}, {6, 8}, {8}, {8}]),
        (KeepEvery(4), [{4, 8}, {4, 8}, {4, 8}, {8}, {8}, {8}, {8}]),
        (KeepSteps([4, 8]), [{4, 8}, {4, 8}, {4, 8}, {8}, {8}, {8}, {8}]),
        (KeepEvery(4) | KeepLatest(2), [{4, 8}, {4, 8}, {4, 8}, {8}, {8}, {8}, {8}]),
        (KeepEvery(2) & KeepSteps([4, 8]), [{4, 8}, {4, 8}, {4, 8}, {8}, {8}, {8}, {8}]),
    ],
)
def test_what_goes_by_steps_gives_the_places_of_abandoned_ones_away_step_by_step(policy, stays):
    left = [replace(info(step), name=f"old-{step}", abandoned=True) for step in (2, 4, 6, 8)]
    found = []
    for saves in range(1, 8):
        present = [info(step, created=100.0 + step) for step in range(1, saves + 1)]
        found.append(
            {i.step for i in plan_prune(policy, [*left, *present], NOW, abandoned="prune").abandoned}
        )
    assert found == stays


def test_of_two_abandoned_lineages_the_later_has_the_place():
    older = [replace(info(step), name=f"a-{step}", abandoned=True) for step in (2, 4)]
    later = [
        replace(info(step), name=f"b-{step}", abandoned=True, lineage=Lineage(id="b" * 8, number=1))
        for step in (3, 6)
    ]
    plan = plan_prune(KeepEvery(2), [*older, *later, info(1)], NOW, abandoned="prune")
    assert {each.name for each in plan.abandoned} == {"b-3", "a-4", "b-6"}


@pytest.mark.parametrize(
    "policy",
    [KeepBest("typo"), KeepBest("typo", mode="max", n=2), KeepBest("typo") & KeepLatest(1)],
)
def test_nothing_goes_where_the_policy_cannot_tell_which_is_the_best(policy):
    history = [info(step, loss=float(step)) for step in (1, 2, 3)]
    plan = plan_prune(policy, history, NOW)
    assert (set(plan.keep), plan.drop) == ({1, 2, 3}, ())
    assert plan.keep[1] == (UNRANKED,)
    first_number = [*history, info(4, typo=1.0), info(5)]
    assert 1 in {each.step for each in plan_prune(policy, first_number, NOW).drop}
    bounded = plan_prune(policy | KeepLatest(2), history, NOW)
    assert set(bounded.keep) == {2, 3}, "what another policy keeps is what it keeps"


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_no_number_is_never_the_best(mode, value):
    history = [info(1, loss=2.0), info(2, loss=value), info(3, loss=2.5), info(4)]
    assert KeepBest("loss", mode=mode).keep(history, NOW) == {1 if mode == "min" else 3}
    assert KeepBest("loss", mode=mode, n=4).keep(history, NOW) == {1, 3}
    diverged = [info(step, loss=value) for step in (1, 2, 3)]
    assert plan_prune(KeepBest("loss", mode=mode), diverged, NOW).drop == ()


def test_an_empty_history_makes_an_empty_plan():
    plan = plan_prune(KeepLatest(1), [], NOW)
    assert (dict(plan.keep), plan.drop) == ({}, ())


def test_the_opposite_of_a_comparison_is_refused_because_it_would_eat_the_history():
    for policy in (KeepLatest(3), KeepBest("loss"), KeepEvery(5), KeepSteps([1]) | KeepLatest(1)):
        with pytest.raises(ConfigError, match="more at every prune"):
            operator.invert(policy)


def test_chains_of_one_combinator_stay_flat():
    a, b, c = KeepLatest(1), KeepEvery(2), KeepAll()
    assert a | b | c == a | (b | c) == AnyOf((a, b, c))
    assert a & b & c == AllOf((a, b, c))
    assert ~~c == Not(Not(c))


def test_a_policy_of_the_users_own_combines_with_ours():
    class KeepOdd(RetentionPolicy):
        def keep(self, history, now):
            return frozenset(i.step for i in history if i.step % 2)

    plan = plan_prune(KeepOdd() & KeepLatest(3), history_of(1, 2, 3, 4, 5), NOW)
    assert set(plan.keep) == {3, 5}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: KeepLatest(0), "n must be a whole number of at least 1, not 0"),
        (lambda: KeepLatest(True), "not True"),
        (lambda: KeepEvery(-5), "steps"),
        (lambda: KeepEverySeconds(0), "above 0"),
        (lambda: KeepFor(math.inf), "above 0"),
        (lambda: KeepSteps([]), "non-empty"),
        (
            lambda: KeepBest("", n=0, mode="lowest"),
            "metric must .*; n must .*; mode must be one of 'min', 'max'",
        ),
        (lambda: KeepBest(3), "metric"),
        (KeepThinned, "one of hourly, daily and weekly"),
        (lambda: KeepThinned(hourly=-1), "hourly must be"),
        (lambda: KeepWithin("2 apples"), "KeepWithin: size must be"),
        (lambda: KeepWithin(None), "size must be given"),
        (lambda: KeepLatest(3) | EverySteps(5), "RetentionPolicy"),
        (lambda: KeepLatest(3) & None, "RetentionPolicy"),
        (lambda: Not("x"), "RetentionPolicy"),
    ],
)
def test_wrong_arguments_are_named(build, words):
    with pytest.raises(ConfigError, match=words):
        build()


def total(some: Iterable[CheckpointInfo]) -> int:
    return sum(each.size_bytes for each in some)


@settings(max_examples=300)
@given(policy=policies, bound=bounds, history=histories, luck=st.randoms(use_true_random=False))
def test_a_budget_is_kept_unless_what_must_stay_is_more(policy, bound, history, luck):
    marked_too = [marked(each) if luck.random() < 0.1 else each for each in history]
    mixed = [replace(each, abandoned=True) if luck.random() < 0.2 else each for each in marked_too]
    plan = plan_prune(policy & bound, mixed, NOW, abandoned=luck.choice(["keep", "prune"]))
    stay = [each for each in mixed if each not in plan.drop]
    free = plan_prune(KeepSteps([1_000]), mixed, NOW, abandoned="prune")
    must = [each for each in mixed if each not in free.drop]
    assert total(stay) <= max(bound.most_bytes, total(must))
    present = [each for each in mixed if each.usable and not each.abandoned]
    assert any(each in stay for each in present) or not present, "a tier keeps one to resume from"


@settings(max_examples=300)
@given(policy=unions, bound=bounds, history=histories, luck=st.randoms(use_true_random=False))
def test_a_prune_to_a_budget_cut_short_and_repeated_never_drops_what_the_whole_one_keeps(
    policy, bound, history, luck
):
    whole = plan_prune(policy & bound, history, NOW)
    left = [i for i in history if i.step in whole.keep or luck.random() < 0.5]
    again = plan_prune(policy & bound, left, NOW)
    assert set(again.keep) >= set(whole.keep)
    kept = [i for i in history if i.step in whole.keep]
    assert plan_prune(policy & bound, kept, NOW).drop == ()


@given(policy=policies, history=histories)
def test_a_budget_with_room_for_all_changes_nothing(policy, history):
    bounded, free = (plan_prune(p, history, NOW) for p in (policy & KeepWithin("1 GB"), policy))
    assert (set(bounded.keep), bounded.drop, bounded.without_room) == (set(free.keep), free.drop, ())


def test_a_budget_takes_from_the_last_rule_first_and_of_a_rule_what_it_wants_least():
    history = [info(step, size=10, loss=abs(step - 3.0)) for step in range(1, 9)]
    policy = KeepBest("loss", n=3) | KeepEvery(1)
    plan = plan_prune(policy & KeepWithin(40), history, NOW)
    assert set(plan.keep) == {8, 3, 2, 4}, "the newest, then the best three"
    assert plan.keep[3] == ("KeepBest(metric='loss', n=3, mode='min')", "KeepEvery(steps=1)")
    assert set(plan.without_room) == {each.name for each in plan.drop}
    assert set(plan_prune(policy & KeepWithin(20), history, NOW).keep) == {8, 3}
    assert set(plan_prune(policy & KeepWithin(60), history, NOW).keep) == {8, 3, 2, 4, 7, 6}


def test_a_budget_alone_keeps_the_newest_and_counts_what_is_pinned_and_marked():
    history = [info(step, size=10) for step in range(1, 6)]
    assert set(plan_prune(KeepWithin(30), history, NOW).keep) == {5, 4, 3}
    assert plan_prune(KeepWithin(30), history, NOW).keep[4] == ("KeepWithin(size=30)",)
    assert plan_prune(KeepWithin(5), history, NOW).keep == {5: ("newest",)}, "it always stays, by no rule"
    history[0], history[3] = info(1, size=10, pinned="paper"), marked(history[3])
    assert set(plan_prune(KeepWithin(30), history, NOW).keep) == {5, 1}
    assert plan_prune(KeepWithin(10), history, NOW).keep == {5: ("newest",), 1: ("pinned: paper",)}
    assert set(plan_prune(KeepWithin(40) & KeepWithin("1 TB"), history, NOW).keep) == {5, 3, 1}


def test_a_budget_that_other_rules_could_exceed_is_refused_with_the_line_to_write():
    with pytest.raises(ConfigError, match=r"write \(a \| b\) & KeepWithin\(size='2 TB'\)"):
        _ = KeepLatest(1) | KeepWithin("2 TB")
    with pytest.raises(ConfigError, match="at every prune"):
        _ = ~KeepWithin("2 TB")
    with pytest.raises(ConfigError, match=r"write \(a \| b\)"):
        _ = (KeepLatest(2) & KeepWithin("2 TB")) | KeepBest("loss")


@pytest.mark.parametrize(
    "written",
    [
        [{"latest": 2, "within": 30}, {"every": 10}],
        {"any": {"latest": 2, "within": 30}, "every": 10},
        {"all_of": [{"latest": 2}, {"within": 30}], "every": 10},
        [{"latest": 2}, {"every": 10, "within": 30}],
        [{"within": 30}, {"any": [{"latest": 2, "within": "1 TB"}]}, {"every": 10}],
    ],
)
def test_a_budget_in_one_of_several_rules_bounds_all_of_them_and_joins_none_by_and(written):
    history = [info(step, size=10) for step in (10, 11, 12, 13, 14)]
    policy = policy_from(written, "keep")
    assert set(plan_prune(policy, history, NOW).keep) == {14, 13, 10}
    assert policy.most_bytes == 30


def test_thinned_keeps_the_newest_of_the_last_hours_days_and_weeks_that_have_any():
    monday = 1_795_996_800  # 2026-11-30, 00:00 UTC
    hours = [info(step, created=monday + 1800 * step) for step in range(96)]
    two_a_day = KeepThinned(hourly=2, daily=2).keep(hours, NOW)
    assert two_a_day == {95, 93, 47}
    sunday = [info(1, created=monday - 1), info(2, created=monday), info(3, created=monday + 1)]
    assert KeepThinned(weekly=4).keep(sunday, NOW) == {1, 3}
    gap = [info(1, created=monday), info(2, created=monday + 40 * 86_400)]
    assert KeepThinned(daily=2).keep(gap, NOW) == {1, 2}, "days without a checkpoint do not count"


def weights_of(whole: CheckpointInfo, size: int) -> CheckpointInfo:
    return replace(
        whole, name=f"{whole.name}.weights", save_id=f"w{whole.save_id}", size_bytes=size,
        weights_of=Parent.of(whole),
    )  # fmt: skip


demoting = st.tuples(unions, st.lists(st.builds(KeepWeights, leaves), min_size=1, max_size=2)).map(
    lambda drawn: reduce(operator.or_, [drawn[0], *drawn[1]])
)


@settings(max_examples=300)
@given(policy=demoting, bound=bounds, history=histories, luck=st.randoms(use_true_random=False))
def test_a_budget_with_demotion_is_kept_and_one_to_resume_from_always_stays(policy, bound, history, luck):
    """Prunes are cut short, weights cannot be made or are larger than foreseen; in the end it holds."""
    there = [replace(each, save_id=str(each.step)) for each in history]
    there = [marked(each) if luck.random() < 0.1 else each for each in there]
    failed = {each.save_id for each in there if luck.random() < 0.2}
    sizes = {each.save_id: luck.randint(0, each.size_bytes) for each in there}

    def foreseen(whole: CheckpointInfo, dtype: str | None) -> int:
        return whole.size_bytes if whole.save_id in failed else sizes[whole.save_id] * 3 // 4

    could_resume = any(each.usable for each in there)
    for round_ in range(30):
        plan = plan_prune(policy & bound, there, NOW, weights_bytes=foreseen)
        calm = round_ > 4
        for each in plan.drop:
            if calm or luck.random() < 0.5:
                there.remove(each)
                assert not could_resume or any(left.usable for left in there)
        todo = [whole for whole, _ in plan.demote if whole.save_id not in failed and whole in there]
        assert all(whole.pinned is None for whole in todo)
        there += [weights_of(whole, sizes[whole.save_id]) for whole in todo if calm or luck.random() < 0.5]
        if calm and not plan.drop and not todo:
            break
    else:
        pytest.fail("prunes go on for ever")
    must = total(each for each in there if not each.usable and each.weights_of is None)
    kept = [each for each in there if not each.marked]
    free = plan_prune(KeepSteps([1_000]), kept, NOW)
    must += total(each for each in kept if each not in free.drop)
    assert total(there) <= max(bound.most_bytes, must)


def test_what_only_a_rule_for_weights_keeps_is_demoted_in_the_dtype_of_the_first():
    history = [replace(info(step, size=10), save_id=str(step)) for step in range(1, 9)]
    policy = KeepLatest(2) | KeepWeights(KeepEvery(4), dtype="bf16") | KeepWeights(KeepEvery(2))
    plan = plan_prune(policy, history, NOW)
    assert [(whole.step, dtype) for whole, dtype in plan.demote] == [(2, None), (4, "bf16"), (6, None)]
    assert [each.step for each in plan.drop] == [1, 3, 5]
    assert "KeepWeights(policy=KeepEvery(steps=4), dtype='bf16')" in plan.keep[4]
    there = [*history[1:], weights_of(history[3], 2)]
    again = plan_prune(policy, there, NOW)
    assert (again.superseded, [each.name for each in again.drop if each.step == 4]) == (
        ("step-000000004",), ["step-000000004"],
    )  # fmt: skip
    light = [weights_of(each, 2) for each in history[1:6:2]]
    after = plan_prune(policy, [*light, *history[6:]], NOW)
    assert (after.drop, after.demote) == ((), ())
    assert plan_prune(KeepLatest(2), [*light, *history[6:]], NOW).drop == tuple(light), (
        "weights count nowhere"
    )


def test_weights_count_as_what_they_will_take():
    history = [replace(info(step, size=100), save_id=str(step)) for step in range(1, 7)]
    policy = (KeepLatest(1) | KeepWeights(KeepEvery(1))) & KeepWithin(150)
    plan = plan_prune(policy, history, NOW, weights_bytes=lambda whole, dtype: 20)
    assert sorted(plan.keep) == [4, 5, 6]
    assert [whole.step for whole, _ in plan.demote] == [4, 5]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: KeepWeights(KeepWithin(5)), "bound"),
        (lambda: KeepWeights(KeepWeights(KeepLatest(1))), "weights in it"),
        (lambda: KeepWeights(KeepLatest(1), dtype="int8"), "dtype"),
        (lambda: ~KeepWeights(KeepLatest(1)), "negate"),
        (lambda: KeepEveryFraction(2), "between"),
        (lambda: KeepEveryEpochs(0), "n must"),
    ],
)
def test_rules_of_weights_and_milestones_name_what_is_wrong(build, words):
    with pytest.raises(ConfigError, match=words):
        build()


def test_fractions_go_by_the_length_that_the_newest_knows_and_epochs_by_their_ends():
    history = [replace(info(step), epochs=step // 25, total_steps=100) for step in range(1, 101)]
    assert KeepEveryFraction(0.1).keep(history, NOW) == set(range(10, 101, 10))
    assert KeepEveryEpochs(2).keep(history, NOW) == {50, 100}
    longer = [*history, replace(info(101), total_steps=200)]
    assert KeepEveryFraction(0.1).keep(longer, NOW) == {20, 40, 60, 80, 100}
    assert KeepEveryFraction(0.5, total_steps=100).keep(longer, NOW) == {50, 100}
    unknown = [info(step) for step in range(5)]
    for policy in (KeepEveryFraction(0.1), KeepEveryEpochs(1)):
        assert policy.keep(unknown, NOW) == set(range(5)), "all stay where nothing is known"
