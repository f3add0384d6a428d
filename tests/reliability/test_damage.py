"""Every kind of damage, anywhere in a checkpoint of ours or of stock DCP: found, or proved harmless."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks import damage


def campaign(tmp_path, trials, seed):
    return damage.run(trials, seed, tmp_path)


def test_no_damage_loads_wrong_values(tmp_path):
    trials = campaign(tmp_path, 60, 5)
    assert [each for each in trials if each.outcome not in {"found", "harmless"}] == []
    assert {each.directory for each in trials} == {damage.OURS, damage.STOCK}


@pytest.mark.slow
def test_no_damage_of_a_thousand_loads_wrong_values(tmp_path):
    trials = campaign(tmp_path, 1000, 6)
    assert [each for each in trials if each.outcome not in {"found", "harmless"}] == []
    assert {each.damage for each in trials} == set(damage.DAMAGES)
    # Of what is ours, only a change that changed nothing can be harmless.
    harmless = {
        each.damage for each in trials if each.outcome == "harmless" and each.directory == damage.OURS
    }
    assert harmless <= {"hole", "swap"}


@pytest.mark.parametrize("kind", damage.DAMAGES)
def test_every_damage_is_one(kind):
    chance = random.Random(1)
    before = chance.randbytes(100_000)
    assert bytes(damage.DAMAGES[kind](bytearray(before), chance)) != before


def test_the_command_line_writes_every_trial(tmp_path, capsys):
    assert damage.main(["--trials", "4", "--json", str(tmp_path / "out.json")]) == 0
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 4
    assert "4 trials" in capsys.readouterr().out
