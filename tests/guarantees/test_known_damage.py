"""Damage that can be known is acted on: sound checkpoints never go in favour of a damaged one."""

from __future__ import annotations

import logging

import pytest
import torch

from ckpt_core import CheckpointManager, KeepBest, KeepLatest
from ckpt_core.commit import Catalog
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.telemetry import Event, Sink
from ckpt_core.testing import Fault, FaultyStorage
from tests.support.payloads import first_payload
from tests.unit.commit.checkpoints import bucket_like, posix_like


@pytest.fixture(params=[posix_like, bucket_like])
def storage(request) -> Storage:
    return request.param()


def state_of(step: int):
    return {"w": torch.full((64,), float(step))}


def save_all(storage, *steps, **options):
    with CheckpointManager(storage, **options) as manager:
        if steps[0] > 1:
            manager.resume(state_of(0))
        for step in steps:
            manager.save(step, state_of(step), metrics={"m": float(step)})
            manager.wait()


def flip(storage, step):
    key = f"step-{step:09d}/__0_0.distcp"
    content = bytearray(storage.read_bytes(key))
    content[first_payload(content) + 10] ^= 1
    storage.replace(key, bytes(content))


def steps(storage):
    return [info.step for info in Catalog(storage).committed()]


def damaged(storage):
    return [info.step for info in Catalog(storage).committed() if info.damaged is not None]


@pytest.mark.parametrize("verified_before", [True, False])
def test_a_prune_in_the_process_that_saved_never_leaves_only_a_damaged_one(storage, verified_before):
    with CheckpointManager(storage, keep=None) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_of(step))
        manager.wait()
        flip(storage, 4)
        if verified_before:
            assert manager.verify() != []
            assert damaged(storage) == [4]
    with CheckpointManager(storage, keep=KeepLatest(1)) as manager:
        assert [info.step for info in manager.prune().drop] == [1, 2]
        assert (steps(storage), damaged(storage)) == ([3, 4], [4])
        assert manager.resume(state := state_of(0)) == 3
        assert state["w"][0] == 3


def test_verify_takes_the_mark_from_what_is_whole(storage):
    save_all(storage, 1, 2)
    Catalog(storage).mark_damaged("step-000000002", "said somebody")
    with CheckpointManager(storage) as manager:
        assert manager.verify() == []
        assert damaged(storage) == []


class LyingDevice(Sink):
    """Changes what was committed before anybody reads it back."""

    def __init__(self, root: Storage, step: int) -> None:
        self._root, self._step, self.lied = root, step, False

    def emit(self, event: Event) -> None:
        ended = (event.name, event.phase) == ("save.commit", "finished")
        if ended and event.attributes["step"] == self._step:
            flip(self._root, self._step)
            self.lied = True


def test_what_a_lying_device_kept_of_the_newest_save_costs_no_older_one(tmp_path, caplog):
    root = LocalStorage(tmp_path)
    device = LyingDevice(root, step=2)
    with (
        CheckpointManager(root, keep=KeepLatest(1), sinks=[device]) as manager,
        caplog.at_level(logging.ERROR),
    ):
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
        manager.wait()
        assert device.lied
        assert (steps(root), damaged(root)) == ([1, 2], [2])
        assert "older checkpoints are kept in its place" in caplog.text
        manager.save(3, state_of(3))
        manager.wait()
        assert steps(root) == [2, 3]


def test_only_one_of_those_that_stay_is_read_back_and_only_once(tmp_path):
    storage = FaultyStorage(LocalStorage(tmp_path))

    def opened_data() -> int:
        return sum(o.method == "open" and o.key.endswith("__0_0.distcp") for o in storage.operations)

    with CheckpointManager(storage, keep=KeepLatest(3)) as manager:
        for step in range(1, 13):
            manager.save(step, state_of(step))
            manager.wait()
    assert steps(storage) == [10, 11, 12]
    assert opened_data() == 3


def test_verify_off_trusts_what_this_process_has_written(tmp_path):
    storage = FaultyStorage(LocalStorage(tmp_path))
    with CheckpointManager(storage, keep=KeepLatest(1), verify="off") as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        manager.wait()
    assert steps(storage) == [3]
    assert not [o for o in storage.operations if o.method == "open" and o.key.endswith(".distcp")]


def test_what_is_damaged_counts_although_its_mark_cannot_be_written(tmp_path):
    root = LocalStorage(tmp_path)
    save_all(root, 1, 2, 3)
    flip(root, 3)
    refusal = Fault(method="replace", key=".ckpt-suite/damaged.json", error=PermissionError("no"))
    with CheckpointManager(FaultyStorage(root, [refusal] * 3), keep=KeepLatest(1)) as manager:
        assert [info.step for info in manager.prune().drop] == [1]
    assert steps(root) == [2, 3]


def test_an_error_while_verifying_deletes_nothing_and_marks_nothing(tmp_path, caplog):
    root = LocalStorage(tmp_path)
    save_all(root, 1)
    unwell = Fault(method="open", key="step-000000002/__0_0.distcp", error=ConnectionError("gone"))
    with CheckpointManager(FaultyStorage(root, [unwell]), keep=KeepLatest(1)) as manager:
        manager.resume(state_of(0))
        manager.save(2, state_of(2))
        manager.wait()
    assert (steps(root), damaged(root)) == ([1, 2], [])
    assert "were not all removed" in caplog.text


def test_the_best_goes_for_no_damaged_one_either(storage):
    save_all(storage, 1, 2, 3, keep=None)
    flip(storage, 3)
    with CheckpointManager(storage, keep=KeepBest("m", mode="max")) as manager:
        manager.prune()
    assert steps(storage) == [2, 3]


def test_retention_sees_marks_pins_and_deletions_of_others_between_saves(storage):
    with CheckpointManager(storage, keep=KeepLatest(2)) as manager:
        for step in range(1, 3):
            manager.save(step, state_of(step))
        manager.wait()
        Catalog(storage).pin(1, "paper")
        Catalog(storage).mark_bad("step-000000002", "spike")
        for step in range(3, 6):
            manager.save(step, state_of(step))
        manager.wait()
        assert steps(storage) == [1, 2, 4, 5]
        storage.delete("step-000000004")
        Catalog(storage).unpin(1)
        manager.save(6, state_of(6))
        manager.wait()
        assert steps(storage) == [2, 5, 6]


def test_a_metric_that_no_checkpoint_has_is_told_once_with_those_that_there_are(tmp_path, caplog):
    with CheckpointManager(tmp_path, keep=KeepLatest(1) | KeepBest("val_los")) as manager:
        for step in range(1, 5):
            manager.save(step, state_of(step), metrics={"val_loss": 1.0, "accuracy": 0.5})
        manager.wait()
        assert [info.step for info in manager.checkpoints()] == [4]
    (told,) = [r.getMessage() for r in caplog.records if "a number for the metric" in r.getMessage()]
    assert "'val_los'" in told
    assert "accuracy, val_loss" in told


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_nothing_is_pruned_while_nothing_can_be_ranked(storage, value):
    with CheckpointManager(storage, keep=KeepBest("val_loss")) as manager:
        for step in range(1, 7):
            measured = {4: 0.5}.get(step, value)
            metrics = {} if measured is None else {"val_loss": measured}
            manager.save(step, state_of(step), metrics=metrics).result()
            manager.wait()
            manager.prune()
            assert steps(storage) == (list(range(1, step + 1)) if step < 4 else sorted({4, step}))
