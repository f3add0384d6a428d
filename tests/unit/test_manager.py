"""`CheckpointManager` as users meet it, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_core import (
    CheckpointManager,
    Counters,
    EveryEpochs,
    EverySteps,
    EveryTokens,
    KeepBest,
    KeepEvery,
    KeepLatest,
    OnPreemption,
    TrainState,
)
from ckpt_core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    IncompatibleCheckpointError,
)
from ckpt_core.storage import LocalStorage
from tests.kit.memory import MemoryStorage
from tests.unit.training import LONG, Gate, Run, assert_equal, children, values_of


def steps(checkpoints: CheckpointManager) -> list[int]:
    return [info.step for info in checkpoints.checkpoints()]


def test_counts_of_tokens_and_epochs_go_on_where_a_checkpoint_was_saved(tmp_path):
    """Saved by `save` at step 5, or by the policy: neither is saved twice, and no multiple is missed."""
    run = Run.make()

    def job(begin, until):
        with CheckpointManager(tmp_path, save=EveryTokens(1000) | EveryEpochs(2)) as checkpoints:
            begin(checkpoints)
            for step in range((checkpoints.latest() or Nothing).step + 1, until + 1):
                checkpoints.maybe_save(step, run.state, tokens=step * 300, epochs=step // 3)
            if until == 5:
                checkpoints.save(5, run.state)
        return steps(checkpoints)

    class Nothing:
        step = 0

    assert job(lambda checkpoints: None, 5) == [4, 5]
    assert job(lambda checkpoints: checkpoints.resume(run.state), 7) == [4, 5, 6, 7]
    assert job(lambda checkpoints: checkpoints.load(run.state), 11) == [4, 5, 6, 7, 10]


def test_the_loop_of_the_readme_saves_resumes_and_keeps(tmp_path):
    def job(until: int) -> tuple[int | None, list[str]]:
        run = Run.make()
        torch.manual_seed(7)
        with CheckpointManager(
            tmp_path / "run",
            save=EverySteps(2) | OnPreemption(signals=("SIGUSR1",)),
            keep=KeepLatest(2) | KeepEvery(4),
        ) as checkpoints:
            start = checkpoints.resume(run.state)
            losses = []
            for step in range((start or 0) + 1, until + 1):
                losses.append(run.step())
                checkpoints.maybe_save(step, run.state, metrics={"val_loss": 1.0})
            checkpoints.wait()
            names.append(children(tmp_path / "run"))
        return start, losses

    names: list[list[str]] = []
    start, first = job(until=9)
    assert start is None
    assert names[0] == ["step-000000004", "step-000000006", "step-000000008"]
    start, second = job(until=12)
    assert start == 8
    assert second[0] == first[8]
    assert names[1] == [f"step-{n:09d}" for n in (4, 8, 10, 12)]


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    run = Run.make()
    torch.manual_seed(1)
    losses = run.steps(3)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(3, run.state)
        losses += run.steps(4)
    resumed = Run.make(seed=99)
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(resumed.state) == 3
        assert resumed.steps(4) == losses[3:]
    assert_equal(resumed.tensors(), run.tensors())


@pytest.mark.parametrize("save_at", [0, 2])
def test_saving_does_not_change_training(tmp_path, save_at):
    def train(save: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
        run = Run.make()
        torch.manual_seed(1)
        losses = run.steps(save_at)
        with CheckpointManager(tmp_path) as checkpoints:
            if save:
                checkpoints.save(save_at, run.state)
            losses += run.steps(3)
        return losses, run.tensors()

    (with_save, saved), (without, untouched) = train(save=True), train(save=False)
    assert with_save == without
    assert_equal(saved, untouched)


def test_a_checkpoint_before_the_first_step_is_resumed(tmp_path):
    run = Run.make()
    torch.manual_seed(4)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(0, run.state)
    losses, resumed = run.steps(3), Run.make(seed=9)
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(resumed.state) == 0
        assert resumed.steps(3) == losses


def test_the_state_saved_is_that_of_the_call_whatever_comes_after(tmp_path):
    gate, live = Gate(), {"w": torch.zeros(1000), "n": [1]}
    with CheckpointManager(gate.before(LocalStorage(tmp_path))) as checkpoints:
        handle = checkpoints.save(1, live)
        handle.staged.result(LONG)
        live["w"].add_(1)
        live["n"].append(2)
        gate.open()
        handle.result(LONG)
        target = {"w": torch.ones(1000), "n": None}
        checkpoints.load(target, step=1)
    assert target["w"].sum() == 0


def test_any_step_can_be_loaded_and_the_newest_by_default(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 5, 3):
            checkpoints.save(step, {"w": torch.full((2,), float(step))})
        for step, expected in ((1, 1), (3, 3), (5, 5), (None, 5)):
            target = {"w": torch.zeros(2)}
            saved = checkpoints.load(target, step=step)
            assert target["w"].tolist() == [expected, expected]
            assert (saved.step, saved.world_size) == (expected, 1)


def test_only_the_items_asked_for_are_loaded(tmp_path):
    run, other = Run.make(), Run.make(seed=5)
    run.steps(2)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(2, run.state)
        optimizer_before = other.optimizer.state_dict()
        checkpoints.load(other.state, items=["model"])
        assert_equal(dict(other.model.state_dict()), dict(run.model.state_dict()))
        assert other.optimizer.state_dict() == optimizer_before
        with pytest.raises(ConfigError, match=r"no such items: nonsense.*model.*optimizer"):
            checkpoints.load(other.state, items=["nonsense"])


def test_what_is_missing_is_said_with_what_is_there(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(Run.make().state) is None
        assert checkpoints.latest() is None
        with pytest.raises(CheckpointNotFoundError, match="nothing has been committed"):
            checkpoints.load({})
        with pytest.raises(CheckpointNotFoundError):
            checkpoints.verify()
        checkpoints.save(4, {"a": 1})
        checkpoints.wait()
        with pytest.raises(CheckpointNotFoundError, match=r"step 3 .*steps there: 4"):
            checkpoints.load({}, step=3)


def test_another_models_checkpoint_is_refused_and_nothing_is_touched(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, TrainState(model=nn.Linear(3, 4)))
        model = nn.Linear(3, 5)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(IncompatibleCheckpointError, match="weight"):
            checkpoints.resume(TrainState(model=model))
    assert_equal(dict(model.state_dict()), before)


def test_a_step_is_committed_only_once(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        first = checkpoints.save(1, {"a": torch.zeros(1)})
        assert checkpoints.save(1, {"a": torch.ones(1)}) is first
        checkpoints.save(2, {"a": torch.zeros(1)})
        with pytest.raises(CheckpointExistsError, match="step-000000001 is committed already"):
            checkpoints.save(1, {"a": torch.ones(1)})
        target = {"a": torch.ones(1)}
        checkpoints.load(target, step=1)
        assert target["a"].item() == 0


def test_a_named_checkpoint_is_replaced_by_the_next_of_that_name(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"a": torch.full((1,), float(step))}, name="last.ckpt")
        checkpoints.wait()
        assert steps(checkpoints) == [2]
        target = {"a": torch.zeros(1)}
        assert checkpoints.load(target, name="last.ckpt").step == 2
        assert target["a"].item() == 2
        assert checkpoints.verify() == []


def test_pruning_happens_after_the_commit_and_never_without_one(tmp_path):
    gate = Gate()
    gate.open()
    with CheckpointManager(gate.before(LocalStorage(tmp_path)), keep=KeepLatest(1)) as checkpoints:
        checkpoints.save(1, {"a": 1})
        checkpoints.wait()
        gate._open.clear()
        handle = checkpoints.save(2, {"a": 2})
        gate.reached.wait(LONG)
        assert steps(checkpoints) == [1]
        gate.open()
        handle.result(LONG)
        checkpoints.wait()
        assert steps(checkpoints) == [2]


def test_the_best_by_a_metric_and_pinned_ones_are_kept(tmp_path):
    with CheckpointManager(tmp_path, keep=KeepLatest(1) | KeepBest("loss", n=1, mode="min")) as checkpoints:
        for step, loss in enumerate([3.0, 1.0, 2.0], start=1):
            checkpoints.save(step, {"a": 1}, metrics={"loss": loss})
            checkpoints.wait()
            if step == 1:
                checkpoints.pin(1, "paper")
        assert steps(checkpoints) == [1, 2, 3]
        plan = checkpoints.prune(dry_run=True)
        assert plan.drop == ()
        checkpoints.unpin(1)
        assert [info.step for info in checkpoints.prune(dry_run=True).drop] == [1]
        assert steps(checkpoints) == [1, 2, 3]
        assert [info.step for info in checkpoints.prune().drop] == [1]
        assert steps(checkpoints) == [2, 3]
        assert checkpoints.latest().metrics == {"loss": 2.0}


def test_what_is_discarded_counts_no_more_even_where_files_of_the_user_stay(tmp_path):
    with CheckpointManager(tmp_path, keep=KeepLatest(2)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"a": step})
            checkpoints.wait()
        (tmp_path / "step-000000002" / "note.txt").write_text("mine")
        checkpoints.pin(1, "paper")
        with pytest.raises(ConfigError, match="pinned"):
            checkpoints.discard("step-000000001")
        checkpoints.unpin(1)
        checkpoints.discard("step-000000002")
        checkpoints.save(3, {"a": 3})
        checkpoints.wait()
        assert steps(checkpoints) == [1, 3]
        assert (tmp_path / "step-000000002" / "note.txt").read_text() == "mine"


def test_verify_finds_a_flipped_bit_and_names_the_file(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": torch.ones(10)})
        checkpoints.save(2, {"a": torch.ones(10)})
        checkpoints.wait()
        assert checkpoints.verify() == []
        path = tmp_path / "step-000000001" / "__0_0.distcp"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        assert checkpoints.verify() == []
        assert [failure.path for failure in checkpoints.verify(1)] == ["__0_0.distcp"]


@pytest.mark.parametrize("root", ["memory://test_manager/run", MemoryStorage()], ids=["url", "storage"])
def test_a_root_can_be_in_memory(root):
    run, resumed = Run.make(), Run.make(seed=3)
    run.steps(2)
    with CheckpointManager(root, keep=KeepLatest(1)) as checkpoints:
        checkpoints.save(1, run.state)
        checkpoints.save(2, run.state)
        checkpoints.wait()
        assert steps(checkpoints) == [2]
        assert checkpoints.resume(resumed.state) == 2
    assert_equal(resumed.tensors(), run.tensors())


def test_several_models_under_one_optimizer_come_back(tmp_path):
    def make(seed: int) -> tuple[dict[str, nn.Module], torch.optim.Optimizer, TrainState]:
        torch.manual_seed(seed)
        models = {"encoder": nn.Linear(4, 3), "decoder": nn.Linear(3, 4)}
        parameters = [p for model in models.values() for p in model.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        return models, optimizer, TrainState(model=models, optimizer=optimizer, counters=Counters(seen=seed))

    models, optimizer, state = make(1)
    for _ in range(2):
        models["decoder"](models["encoder"](torch.ones(2, 4))).sum().backward()
        optimizer.step()
    others, other_optimizer, other_state = make(2)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.resume(other_state)
    for name, model in models.items():
        assert_equal(dict(others[name].state_dict()), dict(model.state_dict()))
    for index, values in optimizer.state_dict()["state"].items():
        assert_equal(other_optimizer.state_dict()["state"][index], values)


def test_tied_parameters_stay_tied_and_frozen_ones_frozen(tmp_path):
    run, resumed = Run.make(), Run.make(seed=3)
    run.steps(1)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, run.state)
        checkpoints.resume(resumed.state)
    assert resumed.model.head.weight is resumed.model.embed.weight
    assert torch.equal(resumed.model.head.weight, run.model.embed.weight)
    assert not resumed.model.frozen.weight.requires_grad
    assert torch.equal(resumed.model.frozen.weight, run.model.frozen.weight)


def test_a_mapping_keeps_plain_values_and_objects(tmp_path):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model, "step": 3, "nested": {"list": [1, "x"], "t": torch.ones(2)}})
        target = {"model": other, "step": 0, "nested": {"list": [0, ""], "t": torch.zeros(2)}}
        checkpoints.load(target)
    assert target["step"] == 3
    assert values_of(target["nested"]) == {"list": [1, "x"], "t": [1.0, 1.0]}
    assert torch.equal(other.weight, model.weight)
