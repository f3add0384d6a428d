"""Mutated bytes: every reader gives a value or refuses; all: `python -m tests.reliability --only fuzz`."""

from __future__ import annotations

import pytest

from ckpt_core.errors import CorruptCheckpointError
from tests.reliability import fuzz
from tests.reliability.fuzzing import mutations
from tests.reliability.fuzzing.readers import READERS, Reader
from tests.reliability.sampling import sample

pytestmark = pytest.mark.reliability


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_raises_anything_but_our_errors_or_gives_a_wrong_value(reader):
    found = [(number, *fuzz.attempt(reader, fuzz.mutation(reader, 3, number))) for number in range(60)]
    assert [each for each in found if each[1] not in {"read", "refused"}] == []


def test_a_mutation_is_the_same_in_every_process_and_of_many_kinds():
    made = [fuzz.mutation("marker", 3, number) for number in range(50)]
    assert [each.content for each in made] == [fuzz.mutation("marker", 3, n).content for n in range(50)]
    assert len({each.content for each in made}) > 45
    assert {each.forged for each in made} == {True, False}


def broken(kind):
    """A reader with a defect of that kind, for bytes other than the honest ones."""

    def read(content):
        if content == b"{}":
            return 1
        if kind == "exception":
            raise KeyError("x")
        if kind == "refused":
            raise CorruptCheckpointError("x")
        if kind == "memory":
            raise MemoryError
        return 2

    return Reader(read=read, seeds=lambda: [b"{}"], checked=True)


@pytest.mark.parametrize("kind", ["exception", "refused", "memory", "wrong"])
def test_what_a_reader_does_is_called_what_it_is(monkeypatch, kind):
    monkeypatch.setitem(READERS, "broken", broken(kind))
    made = mutations.Mutation(origin=b"{}", content=b"{", forged=False)
    assert fuzz.attempt("broken", made)[0] == kind


@pytest.mark.slow
def test_no_reader_crashes_hangs_runs_code_or_takes_a_gibibyte(tmp_path):
    outcomes = sample(tmp_path, "fuzz", count=300)
    for reader in READERS:
        assert sum(each.times for each in outcomes if each.sweep.startswith(f"forgery, {reader}: ")) == 300
