"""Saves that fail on one of several ranks: the same error everywhere, nothing lost, and a way on."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt_core import CheckpointManager
from ckpt_core.errors import CheckpointError, ConfigError, SaveError
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage
from tests.distributed.manager_jobs import build, full_state, train_step
from tests.kit.faults import kill_process
from tests.kit.own_files import beside_own
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

DEADLINE = 2.0


def describe(error: CheckpointError) -> dict[str, Any]:
    return {"kind": type(error).__name__, "text": str(error), **vars(error)}


def state_of(strategy: str) -> Any:
    from ckpt_core import TrainState

    model, optimizer, scheduler = build(strategy)
    train_step(model, optimizer, scheduler)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler)


def faulty_on(rank: int, root: str, fault: Fault) -> Storage:
    storage = LocalStorage(Path(root))
    return FaultyStorage(storage, [fault]) if dist.get_rank() == rank else storage


def steps(checkpoints: CheckpointManager) -> list[int]:
    return [info.step for info in checkpoints.checkpoints()]


def disk_full_on_one_rank(root: str, deliver: str) -> dict[str, Any]:
    no_space = OSError(errno.ENOSPC, "No space left on device")
    fault = Fault(method="create", key="*step-000000002*/__1_0.distcp", error=no_space, nth=0)
    state = state_of("fsdp2")
    with CheckpointManager(faulty_on(1, root, fault), deadline_seconds=60) as checkpoints:
        checkpoints.save(1, state)
        handle = checkpoints.save(2, state)
        if dist.get_rank() == 0 and deliver == "save":
            # Where only one rank has taken the error, every rank raises before they go on together.
            with pytest.raises(SaveError):
                handle.result(60)
        calls = {"wait": checkpoints.wait, "save": lambda: checkpoints.save(3, state)}
        with pytest.raises(SaveError) as caught:
            calls[deliver]()
        assert handle.committed.exception(0) is caught.value
        after_failure = steps(checkpoints)
        checkpoints.save(3, state).result(60)
        checkpoints.wait()
        target = state_of("fsdp2")
        assert checkpoints.resume(target) == 3
        return {"error": describe(caught.value), "after": after_failure, "end": steps(checkpoints)}


@pytest.mark.parametrize("deliver", ["save", pytest.param("wait", marks=pytest.mark.slow)])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all_and_the_next_save_works(tmp_path, deliver):
    first, second = run_ranks(disk_full_on_one_rank, 2, str(tmp_path), deliver)
    assert first["error"] == second["error"]
    error = first["error"]
    assert (error["kind"], error["step"], error["phase"]) == ("SaveError", 2, "write")
    assert list(error["failures"]) == [1]
    assert "step 2 was not saved" in error["text"]
    assert "rank 1" in error["text"]
    assert "No space left on device" in error["text"]
    for found in (first, second):
        assert found["after"] == [1]
        assert found["end"] == [1, 3]
    assert sorted(beside_own(tmp_path)) == [
        "step-000000001",
        "step-000000003",
    ]


def dies_in_flight(root: str, who: int) -> dict[str, Any]:
    fault = Fault(method="write", key=f"*step-000000002*/__{who}_0.distcp", before=kill_process)
    state = state_of("fsdp2")
    checkpoints = CheckpointManager(faulty_on(who, root, fault), deadline_seconds=DEADLINE)
    checkpoints.save(1, state).result(60)
    checkpoints.save(2, state)
    with pytest.raises(SaveError) as caught:
        checkpoints.wait()
    found = {"error": describe(caught.value), "after": steps(checkpoints)}
    checkpoints.close()
    return found


def resumes(root: str) -> dict[str, Any]:
    from ckpt_core import TrainState

    model, optimizer, scheduler = build("fsdp2")
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        step = checkpoints.resume(state)
        tensors = full_state(model, optimizer)
        checkpoints.save(2, state)
        checkpoints.wait()
        return {"step": step, "tensors": tensors, "end": steps(checkpoints)}


@pytest.mark.parametrize("who", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_killed_in_flight_is_named_and_a_new_job_resumes_from_the_checkpoint_before(tmp_path, who):
    survivor = run_ranks(dies_in_flight, 2, str(tmp_path), who, expect_death=[who])[1 - who]
    assert survivor["after"] == [1]
    assert f"rank(s) {who} did not arrive within" in survivor["error"]["text"]
    assert survivor["error"]["step"] == 2
    first, second = run_ranks(resumes, 2, str(tmp_path))
    for found in (first, second):
        assert found["step"] == 1
        assert found["end"] == [1, 2]
    assert first["tensors"].keys() == second["tensors"].keys()
    # What the killed save left is gone; a checkpoint of that step is there in its place.
    assert sorted(beside_own(tmp_path)) == [
        "step-000000001",
        "step-000000002",
    ]


def asks_for_different_things(root: str) -> list[dict[str, Any]]:
    rank, errors = dist.get_rank(), []
    tensor = torch.ones(2)
    with CheckpointManager(root, deadline_seconds=30) as checkpoints:
        with pytest.raises(ConfigError) as caught:
            checkpoints.save(1 + rank, {"a": tensor})
        errors.append(describe(caught.value))
        broken = tensor if rank == 0 else tensor.to_sparse()
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(3, {"a": broken})
        errors.append(describe(caught.value))
        assert steps(checkpoints) == []
        checkpoints.save(4, {"a": tensor}).result(30)
    return errors


def test_ranks_that_ask_for_different_things_are_all_told_and_nothing_is_written(tmp_path):
    first, second = run_ranks(asks_for_different_things, 2, str(tmp_path))
    assert first == second
    different, broken = first
    assert "ranks ask for different saves" in different["text"]
    assert "step-000000001" in different["text"]
    assert "step-000000002" in different["text"]
    assert "rank 1" in broken["text"]
    assert "a is a torch.sparse_coo tensor" in broken["text"]
    assert sorted(beside_own(tmp_path)) == ["step-000000004"]


def one_finishes_late(root: str) -> list[int | None]:
    """Rank 1 writes slowly; with `skip`, both ranks must skip the same saves."""
    gate = dist.distributed_c10d._get_default_store()
    fault = Fault(
        method="create", key="*step-000000001*/__1_0.distcp", before=lambda _: gate.clone().wait(["open"])
    )
    state = state_of("fsdp2")
    with CheckpointManager(
        faulty_on(1, root, fault), back_pressure="skip", deadline_seconds=60
    ) as checkpoints:
        handles = [checkpoints.save(1, state), checkpoints.save(2, state)]
        gate.set("open", "")
        handles[0].result(60)
        checkpoints.wait()
        dist.barrier()
        handles.append(checkpoints.save(3, state))
        checkpoints.wait()
        return [handle and handle.step for handle in handles]


def test_all_ranks_skip_while_any_rank_is_still_writing(tmp_path):
    assert run_ranks(one_finishes_late, 2, str(tmp_path)) == [[1, None, 3]] * 2
