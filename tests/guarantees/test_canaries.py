"""No checkpoint runs code unless pickles are allowed: a canary in every file, at every entry point."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import CheckpointError, CheckpointManager, Counters, TrainState, UnsafeCheckpointError
from ckpt_core.cli import main
from tests.support.canary import Canary, Recorder, plantings, raw, traces_in, zipped
from tests.unit.dcp.test_stock_loads import PLANTED as STOCK_PLANTINGS
from tests.unit.dcp.test_stock_loads import state as stock_state

STEPS = (1, 2)
NEWEST = f"step-{STEPS[-1]:09d}"


def state_of(step: int = 0) -> TrainState:
    torch.manual_seed(step)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer, counters=Counters(seen=step, name="x"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("canaries") / "run"
    with CheckpointManager(root) as manager:
        for step in STEPS:
            manager.save(step, state_of(step))
        manager.pin(1, "a reason")
        manager.mark(1, "a reason")
        manager.unmark(1)
    return root


@pytest.fixture
def recorder(monkeypatch):
    """Fails the test if an unpickler without a guard was reached by a canary, or a canary ran."""
    found = Recorder()
    with found.watching(monkeypatch):
        yield found
    assert found.seen == []


def copy_of(root: Path, target: Path) -> Path:
    shutil.copytree(root, target, dirs_exist_ok=False)
    return target


def told(act) -> None:
    """Do it; whatever is wrong with the checkpoint is told by an error of ours."""
    with suppress(CheckpointError):
        act()


def walk_manager(root: Path, name: str = NEWEST) -> None:
    """Every way in which the core reads a checkpoint."""
    with CheckpointManager(root) as manager:
        told(lambda: manager.load(state_of(), name=name))
        told(lambda: manager.load({"model": torch.nn.Linear(3, 2)}, name=name, strict=False))
        told(lambda: manager.load(state_of(), name=name, items=["counters"]))
        told(lambda: manager.verify(STEPS[-1]))
        told(manager.checkpoints)
        told(lambda: manager.resume(state_of()))
        told(lambda: manager.prune(dry_run=True))


def walk_commands(root: Path, name: str = NEWEST) -> None:
    """Every command; a traceback is an error of ours that nobody has caught."""
    place = str(root / name)
    step = str(STEPS[-1])
    for command in (
        ["ls", str(root)],
        ["show", place],
        ["show", place, "--tensors"],
        ["verify", place, "--strict"],
        ["verify", str(root), "--all"],
        ["pin", f"{root}@{step}", "--reason", "x"],
        ["unpin", f"{root}@{step}"],
        ["mark", f"{root}@{step}", "bad", "--reason", "x", "--and-later"],
        ["mark", f"{root}@{step}", "good"],
        ["prune", str(root), "--keep-latest", "1", "--dry-run"],
        ["prune", str(root), "--damaged", "--take-over"],
    ):
        assert main([*command, "--json"]) in {0, 1, 2, 3}


def test_a_canary_runs_where_nothing_guards(tmp_path):
    """Otherwise the other tests would show nothing."""
    torch.load(_written(tmp_path / "x", zipped(Canary(tmp_path / "traces", "x"))), weights_only=False)
    assert traces_in(tmp_path / "traces") == ["x"]


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("recorder")
def test_no_canary_in_any_file_runs_in_the_manager_or_a_command(saved, tmp_path, capsys):
    traces, count = tmp_path / "traces", 0
    for name, plant in plantings(saved / NEWEST, traces):
        root = copy_of(saved, tmp_path / name)
        plant(root / NEWEST)
        walk_manager(root)
        if "padded" not in name:
            walk_commands(root)
        count += 1
        shutil.rmtree(root)
    capsys.readouterr()
    assert count >= 30
    assert traces_in(traces) == []


@pytest.mark.usefixtures("recorder")
def test_no_canary_in_a_small_file_of_the_root_runs(saved, tmp_path, capsys):
    for name in (".ckpt-suite/pins.json", ".ckpt-suite/damaged.json", ".ckpt-suite/writer.json"):
        root = copy_of(saved, tmp_path / name)
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(raw(Canary(tmp_path / "traces", name)))
        walk_manager(root)
        walk_commands(root)
    capsys.readouterr()
    assert traces_in(tmp_path / "traces") == []


@pytest.mark.usefixtures("recorder")
def test_no_canary_in_a_checkpoint_of_stock_dcp_runs(tmp_path, capsys):
    dcp.save(stock_state(), checkpoint_id=tmp_path / "clean" / "stock", no_dist=True)
    for plant in STOCK_PLANTINGS:
        root = copy_of(tmp_path / "clean", tmp_path / plant.__name__)
        plant(root / "stock", tmp_path / "traces" / plant.__name__)
        with CheckpointManager(root) as manager:
            told(lambda manager=manager: manager.load(stock_state(), name="stock"))
        for command in (["ls", root], ["show", root / "stock", "--tensors"], ["verify", root / "stock"]):
            assert main([*map(str, command), "--json"]) in {0, 1, 3}
    capsys.readouterr()
    assert traces_in(tmp_path / "traces") == []


def test_a_canary_that_was_saved_as_a_value_runs_only_if_pickles_are_allowed(tmp_path, monkeypatch, capsys):
    """The whole checkpoint is as honest as one with any other object in it."""
    root, traces, recorder = tmp_path / "run", tmp_path / "traces", Recorder()
    with CheckpointManager(root) as manager:
        manager.save(1, {"model": torch.nn.Linear(3, 2), "planted": Canary(traces, "value")})
    with recorder.watching(monkeypatch):
        with CheckpointManager(root) as manager:
            for load in (manager.resume, manager.load):
                with pytest.raises(UnsafeCheckpointError, match="allow_pickle=True"):
                    load({"model": torch.nn.Linear(3, 2), "planted": None})
        walk_commands(root, "step-000000001")
    capsys.readouterr()
    assert (recorder.seen, traces_in(traces)) == ([], [])

    with CheckpointManager(root, allow_pickle=True) as manager:
        told(lambda: manager.load({"model": torch.nn.Linear(3, 2), "planted": None}))
    assert traces_in(traces) == ["value"]
