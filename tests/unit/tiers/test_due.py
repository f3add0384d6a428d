"""Which checkpoints are due for a tier that gets every n-th."""

from __future__ import annotations

from ckpt_core.cadence import EverySeconds, EverySteps, OnPreemption
from ckpt_core.tiers.uploading._due import DueRule, SaveNumber


def due_steps(policy, saves, every):
    """The steps that are due of `(step, extra)`, with a restart after each save."""
    rule, number, after, found = DueRule.of(policy), 0, 0, []
    for step, extra in saves:
        noted = SaveNumber(number=number + (not extra), after=after, extra=extra)
        if rule.is_due(step, noted, every):
            found.append(step)
        read = SaveNumber.read(noted.annotations)
        number, after = read.number, step
    return found


def test_with_saves_by_steps_every_tenth_is_at_multiples_whatever_came_between():
    policy = EverySteps(100) | OnPreemption()
    regular = [(step, False) for step in range(100, 3100, 100)]
    assert due_steps(policy, regular, 10) == [1000, 2000, 3000]
    preempted = sorted([*regular, (1234, True), (1777, True)])
    assert due_steps(policy, preempted, 10) == [1000, 2000, 3000]
    lost = [save for save in regular if save[0] not in {500, 2000}]
    assert due_steps(policy, lost, 10) == [1000, 2100, 3000]


def test_with_other_policies_every_tenth_save_counts_over_restarts_and_preemptions_do_not():
    saves = [(7 * number, False) for number in range(1, 31)]
    assert due_steps(EverySeconds(60), saves, 10) == [70, 140, 210]
    assert due_steps(None, sorted([*saves, (71, True), (99, True)]), 10) == [70, 140, 210]


def test_every_checkpoint_is_due_for_every_one_also_without_a_number():
    assert DueRule.of(None).is_due(5, None, 1)
    assert not DueRule.of(None).is_due(5, None, 2)
    for written in ({}, {"upload": 3}, {"upload": {"number": "3", "after": 1}}, {"upload": {"number": 1}}):
        assert SaveNumber.read(written) is None
