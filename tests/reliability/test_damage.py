"""Every kind of damage, anywhere in a checkpoint of ours or of stock DCP: found, or proved harmless."""

from __future__ import annotations

import random

import pytest

from tests.reliability import damage
from tests.reliability.outcome import Choice, problems

pytestmark = pytest.mark.reliability


@pytest.mark.slow
def test_no_damage_loads_wrong_values(tmp_path):
    outcomes = list(damage.run(Choice(seed=5, count=60), tmp_path))
    assert problems(outcomes) == []
    assert {directory for directory in (damage.OURS, damage.STOCK) if spoilt(outcomes, directory)} == {
        damage.OURS,
        damage.STOCK,
    }


@pytest.mark.slow
def test_no_damage_of_any_kind_loads_wrong_values(tmp_path):
    outcomes = list(damage.run(Choice(seed=6, count=240), tmp_path))
    assert problems(outcomes) == []
    assert {kind for kind in damage.DAMAGES if spoilt(outcomes, kind)} == set(damage.DAMAGES)
    # Of what is ours, only a change that changed nothing can be harmless.
    ours = {each.sweep for each in spoilt(outcomes, damage.OURS) if each.sweep.endswith(damage.HARMLESS)}
    assert ours <= {f"damage, {damage.OURS}, {kind}: {damage.HARMLESS}" for kind in ("hole", "swap")}


def spoilt(outcomes, what):
    return [each for each in outcomes if what in each.sweep]


@pytest.mark.parametrize("kind", damage.DAMAGES)
def test_every_damage_is_one(kind):
    chance = random.Random(1)
    before = chance.randbytes(100_000)
    assert bytes(damage.DAMAGES[kind](bytearray(before), chance)) != before
