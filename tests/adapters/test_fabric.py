"""Fabric: its `save` and `load`, made by the core."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core import CheckpointManager, EverySteps, EveryTokens, KeepLatest, TrainState
from ckpt_core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IncompatibleCheckpointError,
    SaveError,
    UnsafeCheckpointError,
)
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from lightning_ckpt import ShardedCheckpointIO, setup_fabric
from tests.adapters.fabric_jobs import Training, net, resumed_on_ranks, whole
from tests.kit.ranks import run_ranks
from tests.scripts import run_python
from tests.unit.data.test_hidden import KeepsIterator, ReadsAhead
from tests.unit.data.test_passes import STYLES

# Fabric warns of few workers.
pytestmark = pytest.mark.filterwarnings("ignore")


def names(root: Path) -> list[str]:
    return sorted(marker.parent.name for marker in root.glob("*/COMMITTED"))


def lineages(root: Path) -> int:
    return len({info.lineage.id for info in CheckpointManager(root).checkpoints(abandoned=True)})


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Training, list[float]]:
    """A training saved at step 3, and the losses of the three steps after it."""
    root = tmp_path_factory.mktemp("trained") / "run"
    training = Training(root)
    training.run(3)
    training.state |= {"settings": {"lr": 0.5, 2: [1, None]}, "ema": torch.arange(3.0)}
    training.fabric.save(root / "three", training.state)
    losses = training.run(3)
    training.checkpoints.close()
    return root, training, losses


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_a_resumed_training_is_the_uninterrupted_one(trained, package):
    root, _, losses = trained
    resumed = Training(root, package=package, seed=99)
    remainder = resumed.fabric.load("last", resumed.state)
    assert resumed.state["step"] == 3
    assert remainder.keys() == {"settings", "ema"}
    assert remainder["settings"] == {"lr": 0.5, 2: [1, None]}
    assert torch.equal(remainder["ema"], torch.arange(3.0))
    assert resumed.run(3) == losses
    resumed.checkpoints.close()


def test_the_same_script_serves_the_first_run_and_later_ones(tmp_path, caplog):
    steps = []
    for _ in range(3):
        save = EverySteps(5) | EveryTokens(100)
        training = Training(tmp_path / "run", options={"save": save, "keep": KeepLatest(2)})
        with caplog.at_level(logging.INFO, "ckpt_core"):
            training.fabric.load("last", training.state)
        steps.append(training.state["step"])
        for _ in range(5):
            training.run(1)
            step = training.state["step"]
            training.checkpoints.maybe_save(step, training.state, tokens=50 * step)
        training.checkpoints.close()
    assert steps == [0, 5, 10]
    assert names(tmp_path / "run") == ["step-000000014", "step-000000015"]
    assert lineages(tmp_path / "run") == 1
    assert "training starts afresh" in caplog.text
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_save_returns_before_it_is_written(tmp_path):
    written = threading.Event()
    blocked = Fault(method="write_pieces", before=lambda _: written.wait(60))
    training = Training(FaultyStorage(LocalStorage(tmp_path), [blocked]))
    handle = training.checkpoints.save(tmp_path / "now", training.state)
    assert not handle.done()
    training.run(1)
    written.set()
    training.checkpoints.wait()
    assert handle.done()
    assert names(tmp_path) == ["now"]
    training.checkpoints.close()


def test_plain_modules_load_what_fabric_saved(trained, tmp_path):
    root, *_ = trained
    fresh = Training(tmp_path)
    fresh.fabric.load(root, fresh.state)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with CheckpointManager(root) as manager:
        manager.load(TrainState(model=model, optimizer=optimizer, rng=False))
    assert whole(model) == whole(fresh.state["model"])
    assert optimizer.state_dict()["state"][0]["step"] == 3
    weights = {"model": {name: torch.empty_like(value) for name, value in net().state_dict().items()}}
    torch.distributed.checkpoint.load(weights, checkpoint_id=root / "three", no_dist=True)
    assert torch.equal(weights["model"]["0.weight"], model.state_dict()["0.weight"])
    raw = net()
    fresh.fabric.load_raw(root / "three", raw)
    assert whole(raw) == whole(model)
    fresh.checkpoints.close()


def test_fabric_loads_what_plain_modules_saved(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with CheckpointManager(tmp_path / "plain") as manager:
        manager.save(8, TrainState(model=model, optimizer=optimizer))
    training = Training(tmp_path / "run", seed=3)
    part = {key: training.state[key] for key in ("model", "optimizer")}
    training.fabric.load(tmp_path / "plain", part)
    assert whole(training.state["model"]._forward_module) == whole(model)
    training.checkpoints.close()


def test_a_part_is_loaded_and_the_rest_stays(trained, tmp_path):
    root, *_ = trained
    fresh = Training(tmp_path, seed=1)
    before = fresh.state["schedule"].state_dict()
    generators = torch.get_rng_state()
    remainder = fresh.fabric.load(root / "three", {"model": fresh.state["model"]})
    assert remainder["step"] == 3
    assert remainder["schedule"]["last_epoch"] == 3
    assert fresh.state["schedule"].state_dict() == before
    assert torch.equal(torch.get_rng_state(), generators), "only a resume puts them back"
    everything = fresh.fabric.load(root / "three")
    assert everything.keys() == {"model", "optimizer", "schedule", "step", "settings", "ema"}
    loaded = fresh.state["model"]._forward_module.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in everything["model"].items())
    fresh.checkpoints.close()


@pytest.mark.parametrize("key", ["step_of_nothing", "other_model"])
def test_strict_refuses_what_the_checkpoint_lacks(trained, tmp_path, key):
    root, *_ = trained
    fresh = Training(tmp_path)
    extra = {"step_of_nothing": 5, "other_model": nn.Linear(2, 2)}[key]
    before = whole(fresh.state["model"]._forward_module)
    with pytest.raises(IncompatibleCheckpointError, match=key):
        fresh.fabric.load(root / "three", {**fresh.state, key: extra})
    assert whole(fresh.state["model"]._forward_module) == before
    fresh.fabric.load(root / "three", {**fresh.state, key: extra}, strict=False)
    assert whole(fresh.state["model"]._forward_module) != before
    fresh.checkpoints.close()


def test_strict_refuses_another_model_and_strict_false_takes_what_fits(trained, tmp_path):
    root, *_ = trained
    fresh = Training(tmp_path)
    longer = nn.Sequential(*net(), nn.Linear(2, 2))
    with pytest.raises(IncompatibleCheckpointError, match=r"model\.4\.weight"):
        fresh.fabric.load(root / "three", {"model": longer})
    with pytest.raises(IncompatibleCheckpointError, match=r"model\.3\.weight"):
        fresh.fabric.load(root / "three", {"model": net()[:3]})
    kept = longer[4].weight.detach().clone()
    fresh.fabric.load(root / "three", {"model": longer}, strict=False)
    assert torch.equal(longer[4].weight, kept)
    assert whole(nn.Sequential(*longer[:4])) == whole(trained_model(fresh, root))
    fresh.checkpoints.close()


def trained_model(training: Training, root: Path) -> nn.Module:
    model = net()
    training.fabric.load_raw(root / "three", model)
    return model


def test_a_filter_leaves_names_out(tmp_path):
    training = Training(tmp_path)
    state = {**training.state, "settings": {"lr": 1, "secret": 2}}
    filters = {
        "model": lambda name, _: "bias" not in name,
        "settings": lambda name, _: name != "secret",
    }
    training.fabric.save(tmp_path / "few", state, filter=filters)
    found = training.fabric.load(tmp_path / "few")
    assert found["settings"] == {"lr": 1}
    assert {name for name in net().state_dict() if "bias" not in name} == found["model"].keys()
    with pytest.raises(IncompatibleCheckpointError, match="bias"):
        training.fabric.load(tmp_path / "few", {"model": net()})
    training.fabric.load(tmp_path / "few", {"model": net()}, strict=False)
    for wrong in ({"optimizer": lambda *_: True}, {"nothing": lambda *_: True}, {"model": 3}, [3]):
        with pytest.raises(ConfigError, match="filter"):
            training.fabric.save(tmp_path / "few", state, filter=wrong)
    training.checkpoints.close()


def test_several_models_with_an_optimizer_each_and_one_of_both(tmp_path):
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        one, two = nn.Linear(3, 2), nn.Linear(2, 3)
        both = torch.optim.Adam([*one.parameters(), *two.parameters()])
        state = {"one": one, "two": two, "of_one": torch.optim.SGD(one.parameters(), 0.1, 0.9), "both": both}
        two(one(torch.randn(4, 3))).sum().backward()
        state["of_one"].step()
        both.step()
        return state

    fabric = Fabric(accelerator="cpu", devices=1)
    checkpoints = setup_fabric(fabric, tmp_path)
    saved, live = make(0), make(1)
    fabric.save(tmp_path / "both", saved)
    fabric.load(tmp_path / "both", live)
    assert whole(live["two"]) == whole(saved["two"])
    for key in ("of_one", "both"):
        mine, theirs = (each[key].state_dict()["state"] for each in (live, saved))
        assert all(torch.equal(mine[n][k], theirs[n][k]) for n in theirs for k in theirs[n])
    part = make(2)
    fabric.load(tmp_path / "both", {"one": part["one"], "of_one": part["of_one"]})
    assert whole(part["one"]) == whole(saved["one"])
    checkpoints.close()


def test_large_values_are_sharded_and_loaded_by_name_only(tmp_path):
    fabric = Fabric(accelerator="cpu", devices=1)
    checkpoints = setup_fabric(fabric, tmp_path)
    large = {"a": torch.randn(1 << 19), "b": [torch.randn(3), 4]}
    fabric.save(
        tmp_path / "x",
        {"model": nn.Linear(2, 2), "ema": large, "rng": 5, "optimizer": "none", "gradients": 3},
    )
    state: dict[str, Any] = {"model": nn.Linear(2, 2)}
    assert fabric.load(tmp_path / "x", state) == {"rng": 5, "optimizer": "none", "gradients": 3}
    state |= {"ema": {"a": torch.zeros(1 << 19), "b": [torch.zeros(3), 0]}}
    fabric.load(tmp_path / "x", state)
    assert torch.equal(state["ema"]["a"], large["a"])
    assert state["ema"]["b"][1] == 4
    assert torch.equal(fabric.load(tmp_path / "x")["ema"]["a"], large["a"])
    checkpoints.close()


def test_saves_without_a_step_are_counted_and_names_are_replaced(tmp_path):
    for run in range(2):
        fabric = Fabric(accelerator="cpu", devices=1)
        checkpoints = setup_fabric(fabric, tmp_path, keep=KeepLatest(2))
        state = {"model": nn.Linear(2, 2)}
        fabric.load("last", state)
        for name in ("a", "b", "last"):
            fabric.save(tmp_path / name, state)
        checkpoints.close()
        assert names(tmp_path) == ["b", "last"]
        found = [info.step for info in CheckpointManager(tmp_path).checkpoints()]
        assert found == [2 + 3 * run - run, 3 + 3 * run - run] or found == [5, 6]
    assert lineages(tmp_path) == 1


def test_the_key_of_the_step_can_be_another(tmp_path):
    fabric = Fabric(accelerator="cpu", devices=1)
    checkpoints = setup_fabric(fabric, tmp_path, step="iter_num")
    fabric.save(tmp_path / "a", {"model": nn.Linear(2, 2), "iter_num": 41, "step": 3})
    fabric.save(tmp_path / "elsewhere" / "b", {"model": nn.Linear(2, 2), "iter_num": torch.tensor(42)})
    checkpoints.close()
    assert CheckpointManager(tmp_path).latest().step == 41
    assert CheckpointManager(tmp_path / "elsewhere").latest().step == 42


def test_looking_at_a_checkpoint_in_the_middle_of_a_run_does_not_turn_it(tmp_path):
    training = Training(tmp_path / "run")
    for name in ("one", "two"):
        training.run(1)
        training.fabric.save(tmp_path / "run" / name, training.state)
    training.fabric.load(tmp_path / "run" / "one", {"model": net()})
    training.fabric.load(tmp_path / "run" / "one")
    training.run(1)
    training.fabric.save(tmp_path / "run" / "three", training.state)
    training.checkpoints.close()
    assert lineages(tmp_path / "run") == 1


def test_going_back_to_a_checkpoint_begins_a_lineage(tmp_path):
    training = Training(tmp_path / "run")
    for name in ("one", "two"):
        training.run(1)
        training.fabric.save(tmp_path / "run" / name, training.state)
    training.fabric.load(tmp_path / "run" / "one", training.state)
    training.run(2)
    training.fabric.save(tmp_path / "run" / "three", training.state)
    training.checkpoints.close()
    present = [info.name for info in CheckpointManager(tmp_path / "run").checkpoints()]
    assert present == ["one", "three"]


def test_files_of_fabric_load_and_never_run_code(tmp_path, trained):
    model = net()
    Fabric(accelerator="cpu", devices=1).save(tmp_path / "stock.ckpt", {"model": model, "step": 4})
    fresh = Training(tmp_path / "run", seed=4)
    state = {"model": fresh.state["model"], "step": 0}
    fresh.fabric.load(tmp_path / "stock.ckpt", state)
    assert (whole(fresh.state["model"]._forward_module), state["step"]) == (whole(model), 4)
    torch.save(model.state_dict(), tmp_path / "raw.pt")
    raw = net()
    fresh.fabric.load_raw(tmp_path / "raw.pt", raw)
    assert whole(raw) == whole(model)
    torch.save({"model": model.state_dict(), "path": Path("x")}, tmp_path / "pickle.ckpt")
    with pytest.raises(UnsafeCheckpointError):
        fresh.fabric.load(tmp_path / "pickle.ckpt", {"model": fresh.state["model"]})
    fresh.fabric.load(tmp_path / "pickle.ckpt", {"model": fresh.state["model"]}, weights_only=False)
    fresh.checkpoints.close()


def test_what_cannot_be_meant_is_refused(tmp_path, trained):
    root, *_ = trained
    with pytest.raises(ConfigError, match=r"setup_fabric\("):
        Fabric(accelerator="cpu", devices=1, plugins=[ShardedCheckpointIO(tmp_path / "run")])
    with pytest.raises(ConfigError, match="ShardedCheckpoint"):
        setup_fabric(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), tmp_path)
    with pytest.raises(ConfigError, match="every_stepz"):
        setup_fabric(Fabric(accelerator="cpu", devices=1), tmp_path, save={"every_stepz": 3})
    training = Training(root)
    state = training.state
    with pytest.raises(ConfigError, match="is the root"):
        training.fabric.save(root, state)
    with pytest.raises(SaveError, match="add the model"):
        training.fabric.save(root / "x", {"optimizer": state["optimizer"]})
    with pytest.raises(ConfigError, match="must be names"):
        training.fabric.save(root / "x", {3: state["model"]})
    with pytest.raises(ConfigError, match="another key"):
        training.fabric.save(root / "x", {"items": state["model"]})
    with pytest.raises(ConfigError, match="with its model"):
        training.fabric.load_raw(root / "three", state["optimizer"])
    with pytest.raises(CheckpointNotFoundError):
        training.fabric.load(tmp_path / "nothing", state)
    training.checkpoints.close()
    assert names(root) == ["three"]


def test_a_second_setup_and_a_close_leave_nothing_behind(tmp_path):
    fabric = Fabric(accelerator="cpu", devices=1)
    first = setup_fabric(fabric, tmp_path / "run")
    fabric.save(tmp_path / "run" / "a", {"model": nn.Linear(2, 2)})
    second = setup_fabric(fabric, tmp_path / "run")
    first.close()
    fabric.load("last", {"model": nn.Linear(2, 2)})
    fabric.save(tmp_path / "run" / "b", {"model": nn.Linear(2, 2)})
    second.close()
    second.close()
    fabric.save(tmp_path / "stock.ckpt", {"model": nn.Linear(2, 2)})
    assert (tmp_path / "stock.ckpt").is_file()
    assert names(tmp_path / "run") == ["a", "b"]


@pytest.mark.slow
def test_a_script_that_just_ends_has_saved_and_given_its_root_back(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import torch
from lightning.fabric import Fabric
from lightning_ckpt import setup_fabric
fabric = Fabric(accelerator="cpu", devices=1)
setup_fabric(fabric, "run")
model = fabric.setup(torch.nn.Linear(2, 2))
fabric.save("run/a", {"model": model})
""")
    done = run_python(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "run") == ["a"]
    assert not (tmp_path / "run" / ".ckpt-suite/writer.json").exists()


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("at", [3, 6])
def test_the_position_in_the_data_is_kept(tmp_path, kind, at):
    """Also at the last batch of an epoch; Fabric sets the sampler's epoch from a count of its own."""

    def batches(seed: int, *, save_at: int | None = None) -> list[list[int]]:
        torch.manual_seed(seed)
        fabric = Fabric(accelerator="cpu", devices=1)
        checkpoints = setup_fabric(fabric, tmp_path / "run")
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0)
        loader = fabric.setup_dataloaders(kind(range(12), batch_size=2, sampler=sampler))
        model = nn.Linear(1, 1)
        state = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters()),
            "loader": loader,
            "epoch": 0,
        }
        fabric.load("last", state)
        seen = []
        for epoch in range(state["epoch"], 4):
            for number, batch in enumerate(loader, 1):
                seen.append(batch.tolist())
                if epoch == 1 and number == save_at:
                    fabric.save(tmp_path / "run" / "here", {**state, "epoch": epoch})
        checkpoints.close()
        return seen

    whole_run = batches(0, save_at=at)
    assert len({str(whole_run[first : first + 6]) for first in range(0, 24, 6)}) == 4
    assert batches(9) == whole_run[6 + at :]


@pytest.mark.parametrize(
    "style", ["zip of equals", "zip, the longer first", "zip, the shorter first", "validating"]
)
def test_what_is_read_together_resumes_together(tmp_path, style):
    """Also where a pass that Fabric begins with its first batch is never begun, and after a validation."""

    def steps(seed: int, *, at: int = 0, after_epoch: bool = False) -> list[Any]:
        torch.manual_seed(seed)
        fabric = Fabric(accelerator="cpu", devices=1)
        checkpoints = setup_fabric(fabric, tmp_path / f"run {at} {after_epoch}")
        made = {
            name: DataLoader(range(size), batch_size=2, shuffle=True)
            for name, size in {"long": 12, "twin": 11, "short": 8, "validation": 6}.items()
        }
        live = dict(zip(made, fabric.setup_dataloaders(*made.values()), strict=True))
        model = nn.Linear(1, 1)
        state = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "epoch": 0, **live}
        fabric.load("last", state)
        if seed:
            torch.rand(3)
            with torch.no_grad():
                list(live["validation"])
        seen = []
        for epoch in range(state["epoch"], 3):
            for batch in STYLES[style](live):
                seen.append((str(batch), torch.rand(()).item()))
                if len(seen) == at and not after_epoch:
                    fabric.save(tmp_path / f"run {at} {after_epoch}" / "here", {**state, "epoch": epoch})
            if len(seen) == at and after_epoch:
                fabric.save(tmp_path / f"run {at} {after_epoch}" / "here", {**state, "epoch": epoch + 1})
        checkpoints.close()
        return seen

    epoch = 4 if "short" in style or "longer" in style else 6
    for place in (epoch - 1, False), (epoch, False), (epoch, True), (epoch + 2, False):
        whole_run = steps(0, at=place[0], after_epoch=place[1])
        assert len(whole_run) == 3 * epoch
        assert steps(9, at=place[0], after_epoch=place[1]) == whole_run[place[0] :], place


@pytest.mark.parametrize("given", [False, True])
def test_a_loader_that_the_state_lacks_is_told_once_and_none_that_validates(tmp_path, caplog, given):
    training = Training(tmp_path)
    train, validation = training.fabric.setup_dataloaders(DataLoader(range(4)), DataLoader(range(4)))
    state = {**training.state, **({"loader": train} if given else {})}
    with torch.no_grad():
        for _ in validation:
            training.fabric.save(tmp_path / "validating", {"model": state["model"]})
    for number, _ in enumerate(train):
        training.checkpoints.save(tmp_path / f"at {number}", state)
    training.checkpoints.close()
    told = caplog.text.count('give fabric.save(path, {..., "loader": loader}), and the same to fabric.load')
    assert told == (not given)


@pytest.mark.distributed
def test_sharded_trainings_resume_exactly_and_on_other_strategies(tmp_path):
    cases = {"fsdp2": ["ddp", "fsdp"], "fsdp": ["fsdp2"], "ddp": []}
    per_rank = run_ranks(resumed_on_ranks, 2, str(tmp_path), cases, process_group=False, timeout_seconds=240)
    for strategy, others in cases.items():
        for found in (each[strategy] for each in per_rank):
            assert found["exact"], strategy
            assert [found[other] for other in others] == [found["saved"]] * len(others), strategy
        model = net()
        with CheckpointManager(tmp_path / strategy) as manager:
            manager.load({"model": model}, name="three")
        assert whole(model) == per_rank[0][strategy]["saved"]


def test_a_loader_that_hides_its_position_is_refused_by_the_first_save(tmp_path):
    for kind in (KeepsIterator, ReadsAhead):
        training = Training(tmp_path / kind.__name__)
        loader = training.fabric.setup_dataloaders(kind(range(12), batch_size=2))
        begun = iter(loader)
        next(begun)
        with pytest.raises(ConfigError, match=f"a {kind.__name__} cannot tell its position"):
            training.fabric.save(tmp_path / kind.__name__ / "one", {**training.state, "loader": loader})
        training.checkpoints.close()
