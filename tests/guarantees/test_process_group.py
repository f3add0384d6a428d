"""The process group of a manager may be made late, lost, made again, inherited, or not be there."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt_core import CheckpointManager, EverySeconds, EverySteps, TrainState
from ckpt_core.coordination import Solo
from ckpt_core.errors import CheckpointError, ConfigError
from tests.kit.ranks import run_ranks

DEADLINE = 20.0


_groups = itertools.count()


def make_group() -> None:
    """Make the default group, over keys of its own: torch would meet the addresses of the last one."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"group {next(_groups)}", server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


def sharded(seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return TrainState(model=model)


def whole(state: TrainState) -> torch.Tensor:
    return state.model.weight.full_tensor().detach()


def error_of(act: Callable[[], Any]) -> str:
    """What a call raised, as "Kind: text"; "" if nothing."""
    try:
        act()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def manager(root: str, name: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(Path(root) / name, deadline_seconds=DEADLINE, **options)


def group_made_after_the_manager(root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    checkpoints = manager(root, "late", save=EverySteps(1) | EverySeconds(900))
    alone = manager(root, "solo")
    found["without a group"] = [
        error_of(lambda: alone.save(1, {"x": torch.ones(2)})),
        error_of(lambda: alone.resume({"x": torch.ones(2)})),
        error_of(lambda: alone.prewarm({"x": torch.ones(2)})),
    ]
    make_group()
    state = sharded()
    found["resume"] = checkpoints.resume(state)
    found["world"] = checkpoints.maybe_save(1, state).result(60).world_size
    target = sharded(7)
    checkpoints.load(target, step=1)
    found["equal"] = bool(torch.equal(whole(target), whole(state)))
    alone.close()
    checkpoints.close()
    return found


def group_destroyed(root: str) -> dict[str, Any]:
    """A group that is made again takes managers of its own."""
    found: dict[str, Any] = {}
    checkpoints, lonely = manager(root, "again"), manager(root, "lonely")
    first = sharded(1)
    flying = checkpoints.save(1, first)
    lonely.save(1, sharded())
    lonely.wait()
    wanted = whole(first)
    dist.destroy_process_group()
    found["committed without its group"] = flying.result(60).world_size
    found["save"] = error_of(lambda: lonely.save(2, {"x": torch.ones(2)}))
    found["load"] = error_of(lambda: lonely.load({"x": torch.ones(2)}))
    found["close"] = error_of(lonely.close)
    make_group()
    found["made again"] = error_of(lambda: checkpoints.save(2, sharded(2)))
    checkpoints.close()
    with manager(root, "again") as other:
        state = sharded(2)
        other.load(state, step=1)
        found["loaded"] = bool(torch.equal(whole(state), wanted))
        found["saved"] = other.save(2, state).result(60).world_size
        found["steps"] = [info.step for info in other.checkpoints()]
    return found


def made_on_one_rank_only(root: str) -> dict[str, Any]:
    """One rank is replaced, as it were: its manager is newer than the other's."""
    checkpoints = manager(root, "replaced")
    checkpoints.save(1, sharded())
    checkpoints.wait()
    rank = dist.get_rank()
    dist.destroy_process_group()
    make_group()
    values = {"x": torch.ones(2)}
    told = error_of(
        lambda: (
            checkpoints.save(2, values)
            if rank == 0
            else CheckpointManager(Path(root) / "replaced", deadline_seconds=5)
        )
    )
    return {"told": told, "close": error_of(checkpoints.close)}


def wrong_argument_on_one_rank(root: str) -> list[str]:
    """Each rank makes one mistake that the other does not make; then both are right."""
    rank, values = dist.get_rank(), {"x": torch.ones(2)}
    with manager(root, "wrong") as checkpoints:
        loss: Any = ["low", 0.5]
        told = [
            error_of(lambda: checkpoints.save(1, values, metrics={"loss": loss[rank]})),
            error_of(lambda: checkpoints.save(1, values if rank == 0 else "values")),
        ]
        told.append(error_of(lambda: checkpoints.resume(values if rank == 1 else 5)))
        checkpoints.save(1, values, metrics={"loss": 0.5})
        return told


def roots_differ(root: str) -> list[str]:
    """Not the group's fault, but as quiet: each rank writes to another directory."""
    state = sharded()
    with manager(root, f"rank-{dist.get_rank()}") as checkpoints:
        return [error_of(lambda: checkpoints.save(1, state)), error_of(lambda: checkpoints.resume(state))]


def one_root_by_two_names(root: str) -> int:
    link = Path(root) / "link"
    if dist.get_rank() == 1:
        link.symlink_to(Path(root) / "target")
    with manager(root, "link" if dist.get_rank() else "target") as checkpoints:
        return checkpoints.save(1, sharded()).result(60).world_size


def forked_in_a_group(root: str) -> dict[str, str]:
    checkpoints = manager(root, "forked")
    state = sharded()
    checkpoints.save(1, state)
    told = in_a_fork(
        lambda: {
            "save": error_of(lambda: checkpoints.save(2, state)),
            "load": error_of(lambda: checkpoints.load(state)),
            "new": error_of(lambda: manager(root, "child")),
            "alone": error_of(lambda: CheckpointManager(Path(root) / "child", coordinator=Solo())),
            "close": error_of(checkpoints.close),
        }
    )
    checkpoints.save(3, state)
    checkpoints.close()
    return told


def all_cases(root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in (
        group_made_after_the_manager,
        group_destroyed,
        forked_in_a_group,
        wrong_argument_on_one_rank,
        roots_differ,
        one_root_by_two_names,
        made_on_one_rank_only,
    ):
        found[case.__name__] = case(root)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    root = tmp_path_factory.mktemp("groups")
    return run_ranks(all_cases, 2, str(root), process_group=False, timeout_seconds=200), root


def in_a_fork(act: Callable[[], Any]) -> Any:
    """What `act` gave in a forked child, which must not hang."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(15)
        try:
            os.write(writing, pickle.dumps(act()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        content = stream.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return pickle.loads(content)


@pytest.mark.distributed
def test_a_manager_made_before_the_group_saves_with_the_group(ranks):
    for found in ranks[0]:
        late = found["group_made_after_the_manager"]
        assert (late["resume"], late["world"], late["equal"]) == (None, 2, True)


@pytest.mark.distributed
def test_torchruns_variables_without_a_group_are_refused_before_anything_is_written(ranks):
    for found in ranks[0]:
        for told in found["group_made_after_the_manager"]["without a group"]:
            assert told.startswith("ConfigError")
            assert "one of 2 ranks" in told
            assert "init_process_group" in told
    assert not (ranks[1] / "solo").exists()


@pytest.mark.distributed
def test_a_group_that_was_destroyed_is_told_and_one_made_again_takes_new_managers(ranks):
    for found in ranks[0]:
        case = found["group_destroyed"]
        assert case["committed without its group"] == 2
        for act in ("save", "load", "made again"):
            assert case[act].startswith("ConfigError")
            assert "was destroyed" in case[act]
            assert "new ones, on every rank" in case[act]
        assert case["close"] == ""
        assert (case["loaded"], case["saved"]) == (True, 2)
        assert case["steps"] == [1, 2]


@pytest.mark.distributed
def test_ranks_of_which_one_was_replaced_are_all_told_in_time(ranks):
    old, new = (found["made_on_one_rank_only"]["told"] for found in ranks[0])
    assert old.startswith("ConfigError")
    assert "new ones, on every rank" in old
    assert new.startswith("CoordinationError")
    assert "the 2 ranks could not connect to one another" in new


@pytest.mark.distributed
def test_a_wrong_argument_on_one_rank_is_told_to_all_and_costs_that_save_only(ranks):
    for found in ranks[0]:
        metrics, state, resumed = found["wrong_argument_on_one_rank"]
        assert "rank 0: ConfigError: metrics" in metrics
        assert "rank 1: ConfigError: a str is no training state" in state
        assert resumed.startswith("ConfigError: rank 0: a int is no training state")
    with CheckpointManager(ranks[1] / "wrong", coordinator=Solo()) as checkpoints:
        assert [info.step for info in checkpoints.checkpoints()] == [1]


@pytest.mark.distributed
def test_ranks_with_different_roots_are_told_which(ranks):
    for found in ranks[0]:
        for told in found["roots_differ"]:
            assert told.startswith("ConfigError")
            assert str(ranks[1] / "rank-0") in told
            assert str(ranks[1] / "rank-1") in told
        assert found["one_root_by_two_names"] == 2


@pytest.mark.distributed
def test_a_fork_of_a_rank_is_told_at_once_and_harms_nobody(ranks):
    for found in ranks[0]:
        told = found["forked_in_a_group"]
        for act in ("save", "load"):
            assert told[act].startswith("ConfigError")
            assert "forked from" in told[act]
        assert "had a process group already" in told["new"]
        assert (told["alone"], told["close"]) == ("", "")
    with CheckpointManager(ranks[1] / "forked", coordinator=Solo()) as checkpoints:
        assert [info.step for info in checkpoints.checkpoints()] == [1, 3]


def test_a_fork_after_a_save_is_told_at_once_and_the_parent_goes_on(tmp_path):
    values = {"x": torch.arange(3.0)}
    with CheckpointManager(tmp_path / "run", save=EverySteps(1)) as checkpoints:
        handle = checkpoints.save(1, values)

        def in_child() -> list[str]:
            acts = [
                lambda: checkpoints.save(2, values),
                lambda: checkpoints.maybe_save(2, values),
                lambda: checkpoints.load(values),
                lambda: checkpoints.resume(values),
                lambda: checkpoints.prewarm(values),
                checkpoints.prune,
                lambda: checkpoints.pin(1, "x"),
                checkpoints.wait,
                checkpoints.wait_staged,
                lambda: handle.result(60),
            ]
            told = [error_of(act) for act in acts]
            checkpoints.close()
            return told

        told = in_a_fork(in_child)
        assert all(text.startswith("ConfigError") and "forked from" in text for text in told), told
        assert (tmp_path / "run" / ".ckpt-suite/writer.json").exists()
        checkpoints.save(2, values).result(60)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.resume({"x": torch.zeros(3)}) == 2


def test_a_fork_may_save_to_a_root_of_its_own(tmp_path):
    values = {"x": torch.arange(3.0)}
    with CheckpointManager(tmp_path / "parent") as checkpoints:
        checkpoints.save(1, values)

        def in_child() -> str:
            def save() -> None:
                with CheckpointManager(tmp_path / "child") as own:
                    own.save(5, values)

            return error_of(save)

        assert in_a_fork(in_child) == ""
    with CheckpointManager(tmp_path / "child") as checkpoints:
        assert checkpoints.resume({"x": torch.zeros(3)}) == 5


def test_one_process_launched_as_several_may_say_that_it_is_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    values = {"x": torch.arange(3.0)}
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(ConfigError, match=r"one of 4 ranks.*Solo\(\)"):
            checkpoints.save(1, values)
        assert list(tmp_path.iterdir()) == []
    with CheckpointManager(tmp_path, coordinator=Solo()) as checkpoints:
        checkpoints.save(1, values)
    # Reading takes nothing from anybody: each process gets the whole.
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.load({"x": torch.zeros(3)}).step == 1


@pytest.mark.parametrize("size", ["", "one", "-2", "1"])
def test_variables_that_say_nothing_are_no_launcher(tmp_path, monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", "0")
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": torch.ones(1)})


def test_a_group_of_one_may_come_and_go(tmp_path):
    values = {"x": torch.arange(3.0)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, values)
        for step in (2, 3):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            checkpoints.save(step, values)
            dist.destroy_process_group()
        checkpoints.save(4, values)
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2, 3, 4]
