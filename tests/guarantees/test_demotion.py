"""Old checkpoints shrink to their weights: nothing is lost, and no resume takes weights for a state."""

from __future__ import annotations

import contextlib
import json
import secrets

import pytest
import torch

from ckpt_core import (
    CheckpointError,
    CheckpointManager,
    ConfigError,
    IncompatibleCheckpointError,
    KeepEvery,
    KeepEveryEpochs,
    KeepEveryFraction,
    KeepLatest,
    KeepWeights,
    TrainState,
    Upload,
    export,
)
from ckpt_core.cli import main
from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage, open_storage
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.memory import MemoryStorage
from tests.reliability.copies import demotions

KEEP = KeepLatest(1) | KeepWeights(KeepEvery(2), dtype="bf16")


def disk():
    return MemoryStorage(secrets.token_hex(4))


def bucket():
    return open_storage(f"memory://{secrets.token_hex(4)}/run")


class Training:
    """A model, its average and an optimizer."""

    def __init__(self):
        self.model, self.ema = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = TrainState(model=self.model, optimizer=self.optimizer, ema=self.ema)
        self.weights = {}

    def run(self, manager, steps):
        for step in steps:
            self.model(torch.ones(1, 8)).sum().backward()
            self.optimizer.step()
            with torch.no_grad():
                self.ema.weight.lerp_(self.model.weight, 0.5)
            self.weights[step] = self.model.weight.detach().clone(), self.ema.weight.detach().clone()
            manager.save(step, self.state)


def listing(storage):
    survey = Catalog(storage).survey()
    return [i.step for i in survey.committed], [i.step for i in survey.weights]


@pytest.mark.parametrize("place", [disk, bucket])
def test_a_run_keeps_of_old_checkpoints_the_weights_and_resumes_the_whole(place):
    storage, training = place(), Training()
    with CheckpointManager(storage, keep=KEEP) as manager:
        training.run(manager, range(1, 6))
    assert listing(storage) == ([5], [2, 4])
    for info in Catalog(storage).survey().weights:
        assert verify(storage, info.name) == []
        origin = info.weights_of
        assert (origin.step, len(origin.manifest_sha256), origin.name) == (
            info.step,
            64,
            f"step-{info.step:09d}",
        )
    again = Training()
    with CheckpointManager(storage, keep=KEEP) as manager:
        assert [each.step for each in manager.checkpoints()] == [5]
        assert manager.resume(again.state) == 5
        manager.load(again.state, step=4, items=["model", "ema"], cast=True)
        model, ema = training.weights[4]
        assert torch.equal(again.model.weight, model.to(torch.bfloat16).float())
        assert torch.equal(again.ema.weight, ema), "a small tensor beside the model is a value as it is"
        with pytest.raises(IncompatibleCheckpointError, match="optimizer"):
            manager.load(again.state, step=4, cast=True)


def test_weights_alone_are_refused_by_a_resume_and_named(tmp_path):
    training = Training()
    with CheckpointManager(tmp_path / "a") as manager:
        training.run(manager, (1, 2))
    assert main(["demote", f"{tmp_path / 'a'}@1"]) == 0
    name = "step-000000001.weights"
    assert main(["cp", str(tmp_path / "a" / name), str(tmp_path / "b")]) == 0
    manager = CheckpointManager(tmp_path / "b")
    with pytest.raises(IncompatibleCheckpointError, match=f"weights alone: {name}.*init_from="):
        manager.resume(Training().state)
    begun = Training()
    with CheckpointManager(tmp_path / "c", init_from=str(tmp_path / "b" / name)) as manager:
        assert manager.resume(TrainState(model=begun.model)) is None
    assert torch.equal(begun.model.weight, training.weights[1][0])
    export(tmp_path / "b" / name, tmp_path / "out.pt", to="torch", include=["model.*"])
    there = torch.load(tmp_path / "out.pt")["model"]
    assert torch.equal(there["weight"], training.weights[1][0])


@pytest.mark.parametrize("place", [disk, bucket])
def test_a_failure_at_any_operation_of_a_demotion_loses_nothing_and_mixes_nothing(place):
    """A sample of the sweep; a kill is an error here of which nothing is cleaned up."""
    demotions.make_run(inner := place())
    whole = FaultyStorage(inner)
    demotions.demote(whole)
    count = len(whole.operations)
    for nth in range(0, count, max(1, count // 6)):
        demotions.make_run(inner := place())
        with contextlib.suppress(OSError, CheckpointError):
            demotions.demote(FaultyStorage(inner, [Fault(nth=nth, error=OSError("storage is down"))]))
        assert demotions.look(inner) == 2


def test_what_is_pinned_stays_whole_and_so_does_what_a_resume_would_load(tmp_path, capsys):
    with CheckpointManager(tmp_path) as manager:
        Training().run(manager, (1, 2, 3))
        manager.pin(1, "paper")
    for step, why in ((1, "is pinned .paper."), (3, "is what a resume would load")):
        assert main(["demote", f"{tmp_path}@{step}"]) == 2
        assert why.replace(".", "") in capsys.readouterr().err.replace("(", "").replace(")", "")
    assert main(["demote", f"{tmp_path}@2", "--dry-run"]) == 0
    assert listing(LocalStorage(tmp_path)) == ([1, 2, 3], [])
    assert main(["prune", str(tmp_path), "--keep-latest", "1", "--keep-weights-every", "1:bf16"]) == 0
    assert listing(LocalStorage(tmp_path)) == ([1, 3], [2])


def test_what_is_signed_stays_whole_where_its_weights_could_not_be_signed(tmp_path, capsys, caplog):
    def sign(name, manifest):
        return manifest[:8]

    with CheckpointManager(tmp_path, sign_manifest=sign) as manager:
        Training().run(manager, (1, 2, 3))
    assert main(["demote", f"{tmp_path}@1"]) == 2
    assert "is signed" in capsys.readouterr().err
    prune = ["prune", str(tmp_path), "--keep-latest", "1", "--keep-weights-every", "1"]
    assert main([*prune, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not any(line.startswith("demote") for line in shown.splitlines())
    assert shown.count("stays whole: is signed") == 2
    assert main([*prune, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["demote"] == []
    assert main(prune) == 0
    assert caplog.text.count("step-000000001 stays whole for now") == 1
    assert listing(LocalStorage(tmp_path)) == ([1, 2, 3], [])
    with CheckpointManager(tmp_path, keep=KEEP, sign_manifest=sign) as manager:
        manager.resume((again := Training()).state)
        again.run(manager, (4, 5))
    assert listing(LocalStorage(tmp_path)) == ([5], [2, 4])
    for name in ("step-000000002.weights", "step-000000004.weights"):
        manifest = (tmp_path / name / "manifest.json").read_bytes()
        assert (tmp_path / name / "manifest.json.sig").read_bytes() == manifest[:8]


def test_a_report_knows_what_the_save_of_weights_cost(tmp_path, capsys):
    training = Training()
    with CheckpointManager(tmp_path, keep=KEEP) as manager:
        training.run(manager, range(1, 4))
    assert listing(LocalStorage(tmp_path)) == ([3], [2])
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "not in the journal" not in shown
    deleted = [line.split("deleted")[1].strip() for line in shown.splitlines() if " deleted " in line]
    whys = " ".join(deleted)
    assert "demoted: the weights of each stay" in whys, shown
    assert "not kept by" in whys, "step 1, which no rule keeps"


def test_a_tier_makes_weights_of_its_own():
    storage, tier = disk(), bucket()
    with CheckpointManager(
        storage, keep=KeepLatest(1), upload=Upload(tier, keep=KEEP, when_busy="queue")
    ) as m:
        Training().run(m, range(1, 6))
    assert listing(storage) == ([5], [])
    assert listing(tier) == ([5], [2, 4])


def test_milestones_by_fraction_and_epoch_are_known_to_a_listing_and_refused_where_unknown():
    storage = disk()
    keep = KeepEveryFraction(0.5) | KeepEveryEpochs(1)
    state = {"w": torch.ones(4)}
    with CheckpointManager(storage, keep=keep) as manager:
        with pytest.raises(ConfigError, match="epochs and total_steps must be known"):
            manager.save(1, state)
        for step in range(1, 9):
            assert manager.due(step, total_steps=8, epochs=step // 3) is None
            manager.save(step, state)
    infos = Catalog(storage).committed()
    assert [(info.step, info.epochs, info.total_steps) for info in infos] == [
        (3, 1, 8), (4, 1, 8), (6, 2, 8), (8, 2, 8),
    ]  # fmt: skip
