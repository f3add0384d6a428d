"""Checkpoints of others become ours: the same state, committed, or nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import lightning
import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file

from ckpt_core import CheckpointManager, EverySteps
from ckpt_core.cli import main
from ckpt_core.commit import Catalog, Lease, verify
from ckpt_core.comparison import compare
from ckpt_core.convert import _importing, export, import_checkpoint
from ckpt_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    RootBusyError,
)
from ckpt_core.storage import LocalStorage, open_storage
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.types import CapturedState
from lightning_ckpt import ShardedCheckpoint
from tests.kit.faults import kill_process
from tests.unit.convert.test_engine import bucket
from tests.unit.convert.test_whole_state import Module, trainer
from tests.unit.training import Run, assert_equal


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a plain loop, and of a Trainer of Lightning."""
    root = tmp_path_factory.mktemp("ours")
    run = Run.make()
    run.steps(3)
    with CheckpointManager(root / "plain") as manager:
        manager.save(8, run.state)
    lightning.seed_everything(0)
    trainer(ShardedCheckpoint(root / "lightning", save=EverySteps(8))).fit(Module(hidden=6))
    return root


def equal(one: Path, other: Path) -> bool:
    name = "step-000000008"
    return compare((open_storage(str(one)), name), (open_storage(str(other)), name)).equal


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("plain", "torch"),
        ("plain", "dcp"),
        ("lightning", "torch"),
        ("lightning", "dcp"),
        ("lightning", "lightning"),
    ],
)
def test_what_was_written_for_others_comes_back_identical(tmp_path, ours, host, kind):
    export(ours / host, tmp_path / "out", to=kind, step=8)
    info = import_checkpoint(tmp_path / "out", tmp_path / "root", step=8 if kind == "dcp" else None)
    assert (info.step, info.name) == (8, "step-000000008")
    assert equal(ours / host, tmp_path / "root")
    assert verify(open_storage(str(tmp_path / "root")), info.name) == []


def test_a_lightning_run_is_taken_over_from_what_came_back(tmp_path, ours):
    export(ours / "lightning", tmp_path / "x.ckpt", to="lightning", step=8)
    import_checkpoint(tmp_path / "x.ckpt", tmp_path / "root")
    weights = []
    for root in (ours / "lightning", tmp_path / "root"):
        module = Module(hidden=6)
        fit = trainer(ShardedCheckpoint(tmp_path / "next"))
        fit.fit(module, ckpt_path=str(root / "step-000000008"))
        weights.append(module.state_dict())
        assert fit.global_step == 12
    assert_equal(weights[1], weights[0])


def test_a_plain_loop_resumes_from_its_torch_file_with_its_random_numbers(tmp_path, ours):
    export(ours / "plain", tmp_path / "x.pt", to="torch", step=8)
    import_checkpoint(tmp_path / "x.pt", tmp_path / "root")
    losses = []
    for root in (ours / "plain", tmp_path / "root"):
        run = Run.make(5)
        with CheckpointManager(root) as manager:
            assert manager.resume(run.state) == 8
        losses.append(run.steps(3))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("most", [64, 700, 1 << 20])
def test_tensors_are_cut_and_gathered_into_files_of_bounded_size(tmp_path, monkeypatch, most):
    monkeypatch.setattr(_importing, "_FILE_BYTES", most)
    tensors = {"wide": torch.randn(1, 40, 30), "long": torch.randn(501).half(), "scalar": torch.tensor(1)}
    tensors |= {
        "none": torch.empty(0, 4),
        "deep": torch.randn(3, 5, 7, 2).double(),
        "flags": torch.ones(9) > 0,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    import_checkpoint(tmp_path / "model.safetensors", tmp_path / "root", step=1)
    step = tmp_path / "root" / "step-000000001"
    sizes = [path.stat().st_size for path in step.glob("__*_0.distcp")]
    assert len(sizes) > 1 or most > 10_000
    new = {name: torch.zeros_like(each) for name, each in tensors.items()}
    with CheckpointManager(tmp_path / "root") as manager:
        assert manager.verify() == []
        manager.load({"model": new})
    assert_equal(new, tensors)
    again = {"model": {name: torch.zeros_like(each) for name, each in tensors.items()}}
    stock.load(again, checkpoint_id=step, no_dist=True)
    assert_equal(again["model"], tensors)


def test_parts_come_back_as_parts_from_dcp_and_as_one_from_a_file(tmp_path):
    parts = {
        "": {"n": 1},
        "model_0": {"model": {"w": torch.ones(3)}},
        "model_1": {"model": {"w": torch.zeros(2)}},
    }
    with CheckpointManager(tmp_path / "ours") as manager:
        manager.save(8, CapturedState(sharded=parts, shared={"epoch": 2}))
    export(tmp_path / "ours", tmp_path / "dcp", to="dcp", step=8)
    import_checkpoint(tmp_path / "dcp", tmp_path / "root", step=8)
    assert equal(tmp_path / "ours", tmp_path / "root")
    export(tmp_path / "ours", tmp_path / "x.pt", to="torch", step=8)
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found.keys() == {"epoch", "n", "model", "model_1"}
    assert found["model_1"]["model"]["w"].equal(torch.zeros(2))


def test_a_bucket_gets_it_too_and_nothing_of_a_torn_one_counts(tmp_path):
    torch.save({"model": {"w": torch.ones(5)}, "global_step": 4}, tmp_path / "x.pt")
    inner = bucket()
    with pytest.raises(OSError, match="gone"):
        import_checkpoint(
            tmp_path / "x.pt",
            FaultyStorage(inner, [Fault(method="create", key="*/.metadata", error=OSError("gone"))]),
        )
    assert Catalog(inner).committed() == []
    assert import_checkpoint(tmp_path / "x.pt", inner).step == 4
    assert verify(inner, "step-000000004") == []


def test_only_an_import_loads_as_what_others_wrote(tmp_path):
    state = {"model": {"w": torch.ones(2)}}
    with CheckpointManager(tmp_path / "own") as manager:
        manager.save(1, state, annotations={"imported": "by hand"})
        manager.wait()
        assert manager.load(state).world_size == 1
    torch.save(state, tmp_path / "x.pt")
    info = import_checkpoint(tmp_path / "x.pt", tmp_path / "root", step=1)
    with CheckpointManager(tmp_path / "root") as manager:
        found = manager.load(state, name=info.name)
    assert (found.world_size, found.annotations["imported"]["from"]) == (None, str(tmp_path / "x.pt"))


def test_several_steps_are_of_one_run_and_training_goes_on_from_the_last(tmp_path, ours):
    export(ours / "plain", tmp_path / "x.pt", to="torch", step=8)
    for step in (3, 9, 5):
        import_checkpoint(tmp_path / "x.pt", tmp_path / "root", step=step)
    with pytest.raises(CheckpointExistsError, match="step 5 already"):
        import_checkpoint(tmp_path / "x.pt", tmp_path / "root", step=5)
    run = Run.make(5)
    with CheckpointManager(tmp_path / "root") as manager:
        assert [info.step for info in manager.checkpoints()] == [3, 5, 9]
        assert manager.resume(run.state) == 9
        run.steps(1)
        manager.save(10, run.state)
        manager.wait()
        assert [info.step for info in manager.checkpoints()] == [3, 5, 9, 10]


def test_what_cannot_be_imported_is_refused_before_anything_is_written(tmp_path, ours):
    root = tmp_path / "root"
    export(ours / "plain", tmp_path / "dcp", to="dcp", step=8)
    export(ours / "plain", tmp_path / "x.pt", to="torch", step=8)
    (tmp_path / "junk").mkdir()
    for place, error, text in (
        (ours / "plain", ConfigError, "ckpt cp"),
        (ours / "plain" / "step-000000008", ConfigError, "ckpt cp"),
        (tmp_path / "dcp", ConfigError, "--step N"),
        (tmp_path / "junk", CheckpointNotFoundError, "neither"),
        (tmp_path / "nothing", CheckpointNotFoundError, "nothing"),
    ):
        with pytest.raises(error, match=text):
            import_checkpoint(place, root)
    with Lease.acquire(open_storage(str(root)), "a job"), pytest.raises(RootBusyError, match="a job"):
        import_checkpoint(tmp_path / "x.pt", root)
    assert [path.name for path in root.iterdir()] == [".ckpt-suite"]


def test_damage_is_found_and_leaves_nothing(tmp_path, ours):
    export(ours / "plain", tmp_path / "x.pt", to="torch", step=8)
    content = bytearray((tmp_path / "x.pt").read_bytes())
    weight = Run.make().model.frozen.weight.detach().numpy().tobytes()
    content[content.index(weight)] ^= 1
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"x\.pt"):
        import_checkpoint(tmp_path / "x.pt", tmp_path / "root")
    assert [path.name for path in (tmp_path / "root").iterdir()] == [".ckpt-suite"]


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_a_whole_checkpoint_or_none(tmp_path):
    torch.save({"model": {"w": torch.ones(5)}, "global_step": 4}, tmp_path / "x.pt")
    counted = FaultyStorage(LocalStorage(tmp_path / "counted"))
    import_checkpoint(tmp_path / "x.pt", counted)
    first = next(each.number for each in counted.operations if each.method == "make_directory")
    seen = set()
    for number in range(first, len(counted.operations)):
        root = tmp_path / str(number)
        if (pid := os.fork()) == 0:
            fault = Fault(nth=number, before=kill_process)
            import_checkpoint(tmp_path / "x.pt", FaultyStorage(LocalStorage(root), [fault]))
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        catalog = Catalog(open_storage(str(root)))
        whole = [info.step for info in catalog.committed()]
        seen.add(len(whole))
        if not whole:
            import_checkpoint(tmp_path / "x.pt", root)
        assert verify(open_storage(str(root)), "step-000000004") == []
        assert {path.name for path in root.iterdir()} == {".ckpt-suite", "step-000000004"}
    assert seen == {0, 1}


def test_the_command_imports_and_says_what(tmp_path, capsys):
    torch.save({"w": torch.ones(5)}, tmp_path / "x.pt")
    assert main(["import", str(tmp_path / "x.pt"), str(tmp_path / "root")]) == 2
    assert "--step N" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "x.pt"), str(tmp_path / "root"), "--step", "7"]) == 0
    assert "step-000000007" in capsys.readouterr().out
    new = {"model": {"w": torch.zeros(5)}}
    with CheckpointManager(tmp_path / "root") as manager:
        assert manager.load(new).step == 7
    assert new["model"]["w"].equal(torch.ones(5))


def test_a_file_that_says_wrongly_that_it_is_of_ours_raises_no_other_error(tmp_path):
    for number, ours in enumerate(
        [{"state": {}}, {"state": {"a": 1}, "files": 3}, {"state": [], "files": {}}]
    ):
        place = tmp_path / f"{number}.pt"
        torch.save({"model": {"w": torch.ones(1)}, "ckpt_suite": ours}, place)
        with CheckpointManager(tmp_path / "root") as manager, pytest.raises(CheckpointError):
            manager.load({"b": torch.zeros(1)})
        import_checkpoint(place, tmp_path / f"root-{number}", step=1)
