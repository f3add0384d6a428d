"""`on_exception="save"`: the last whole step is committed, exactly, or the error says why it is not."""

from __future__ import annotations

import pytest
import torch

from ckpt_core import CheckpointManager, CheckpointOptions, ConfigError
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.types import CapturedState
from tests.guarantees.exception_jobs import FAILING, Places, TroubleError, fail_and_resume, fail_one, train
from tests.kit.ranks import run_ranks

SAVED, BEFORE = FAILING - 1, 4
"""The last whole step, and the last one that the save policy has saved."""


class Exhausted(torch.OutOfMemoryError):
    """As an allocation on a device fails."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), Places("nowhere"))


@pytest.mark.parametrize(
    "error", [TroubleError, KeyboardInterrupt, Exhausted], ids=lambda each: each.__name__
)
@pytest.mark.parametrize("place", ["forward", "loader", "hook"])
def test_a_step_that_was_not_finished_leaves_nothing_in_the_one_that_is_saved(tmp_path, whole, place, error):
    with pytest.raises(error, match=f"in {place}") as raised:
        train(tmp_path, Places(place, error))
    assert raised.value.__notes__ == [f"step {SAVED} is saved"]
    report = {}
    assert all(map(torch.equal, whole, train(tmp_path, Places("nowhere"), report=report)))
    assert report["began"] == SAVED


@pytest.mark.parametrize("place", ["optimizer", "after the optimizer"])
def test_what_an_optimizer_has_begun_to_change_is_not_saved_and_the_error_says_so(tmp_path, whole, place):
    with pytest.raises(TroubleError) as raised:
        train(tmp_path, Places(place))
    assert "an optimizer step has begun after step 6" in raised.value.__notes__[0]
    report = {}
    assert all(map(torch.equal, whole, train(tmp_path, Places("nowhere"), report=report)))
    assert report["began"] == BEFORE


def test_statistics_that_the_forward_has_changed_are_not_saved_as_those_of_the_step_before(tmp_path):
    expected = train(tmp_path / "whole", Places("nowhere"), norm=True)
    with pytest.raises(TroubleError) as raised:
        train(tmp_path / "run", Places("forward"), norm=True)
    assert "buffers or other tensors have changed after step 6" in raised.value.__notes__[0]
    assert all(map(torch.equal, expected, train(tmp_path / "run", Places("nowhere"), norm=True)))


def test_within_an_accumulation_window_the_step_before_it_is_saved_and_the_window_made_again(tmp_path):
    expected = train(tmp_path / "whole", Places("nowhere"), window=3)
    with pytest.raises(TroubleError) as raised:
        train(tmp_path / "run", Places("window"), window=3)
    assert raised.value.__notes__ == [f"step {SAVED} is saved"]
    assert all(map(torch.equal, expected, train(tmp_path / "run", Places("nowhere"), window=3)))


def fail_after(step, root, meanwhile=lambda: None, state=None, **options):
    """End a block by an exception after one step; the notes on it."""

    def block():
        with CheckpointManager(root, **options) as manager:
            manager.maybe_save(step, state or {"weight": torch.ones(3)})
            meanwhile()
            raise TroubleError

    with pytest.raises(TroubleError) as raised:
        block()
    return getattr(raised.value, "__notes__", [])


def test_the_step_of_a_regular_save_is_not_saved_twice(tmp_path):
    assert fail_after(2, tmp_path, on_exception="save", save=2) == ["step 2 is saved"]
    assert [info.step for info in CheckpointManager(tmp_path).checkpoints()] == [2]


def test_before_the_first_step_there_is_nothing_to_save(tmp_path):
    with pytest.raises(TroubleError) as raised, CheckpointManager(tmp_path, on_exception="save"):
        raise TroubleError
    assert "no step was finished" in raised.value.__notes__[0]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("save", [None, 1], ids=["the last", "a regular one"])
def test_a_failed_save_does_not_hide_the_error_that_ended_the_training(tmp_path, on_error, save):
    fault = Fault(method="create", key="*COMMITTED", error=OSError("no such luck"))
    storage = FaultyStorage(LocalStorage(tmp_path), [fault])
    notes = fail_after(1, storage, on_exception="save", on_error=on_error, save=save)
    assert "the last whole step was not saved" in notes[0]
    assert "no such luck" in notes[0]


def test_without_the_option_nothing_is_saved_and_nothing_added_to_the_error(tmp_path):
    assert fail_after(1, tmp_path, save=4) == []
    assert CheckpointManager(tmp_path).checkpoints() == []


@pytest.mark.parametrize(("failing", "saved"), [(1, True), (2, False)], ids=["first", "second"])
def test_a_closure_may_fail_before_its_optimizer_has_changed_anything(tmp_path, failing, saved):
    """LBFGS calls it several times in a step, and changes weights between."""
    weight, calls = torch.nn.Parameter(torch.ones(3)), [0]
    optimizer = torch.optim.LBFGS([weight], max_iter=5)

    def closure():
        calls[0] += 1
        if calls[0] == failing:
            raise TroubleError
        optimizer.zero_grad()
        loss = (weight - torch.arange(3.0)).square().sum()
        loss.backward()
        return loss

    captured = CapturedState(sharded={"": {"weight": weight}}, optimizers=[optimizer])

    (note,) = fail_after(1, tmp_path, lambda: optimizer.step(closure), state=captured, on_exception="save")
    assert (note == "step 1 is saved") is saved


def test_other_words_are_refused():
    with pytest.raises(ConfigError, match="on_exception must be"):
        CheckpointOptions(on_exception="warn")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("place", ["forward", "loader"])
def test_an_error_on_all_ranks_saves_the_last_whole_step_on_all(tmp_path, place):
    for name, began, notes, same in run_ranks(fail_and_resume, 2, str(tmp_path), place, (0, 1)):
        assert (name, began, same) == ("TroubleError", SAVED, True)
        assert notes == [f"step {SAVED} is saved"]


@pytest.mark.slow
@pytest.mark.distributed
def test_an_error_on_one_rank_is_told_in_bounded_time_and_nothing_is_lost(tmp_path):
    """The other rank waits for it in a collective of the training, and fails when this one has ended."""
    found = run_ranks(fail_one, 2, str(tmp_path))
    assert found[1] == ("TroubleError", True)
    assert found[0][1], "its own error says so, too"
    assert [info.step for info in CheckpointManager(tmp_path / "run").checkpoints()] == [BEFORE]
    assert CheckpointManager(tmp_path / "run").verify() == []
