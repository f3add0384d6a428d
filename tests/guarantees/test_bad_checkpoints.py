"""P3: a committed checkpoint is never lost, a bad one never chosen."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, KeepLatest, TrainState
from ckpt_core.commit import Catalog
from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.storage import LocalStorage

FLIPS = 64
SEED = 20260101
NEWEST, BEFORE = 3, 2


def state_of(step):
    torch.manual_seed(step)
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=step / 10, momentum=0.9)
    model.weight.grad = torch.randn(3, 4)
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer)


def values(state):
    (optimizer,) = state.optimizers
    (momentum,) = (buffers["momentum_buffer"].tolist() for buffers in optimizer.state.values())
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    weights = {name: tensor.tolist() for name, tensor in state.model.state_dict().items()}
    return weights, momentum, learning_rates, torch.get_rng_state().tolist()


EXPECTED = {step: values(state_of(step)) for step in range(5)}


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    with CheckpointManager(root) as checkpoints:
        for step in (1, BEFORE, NEWEST):
            checkpoints.save(step, state_of(step))
    return root


def resumed(root, **options):
    """The step that a fresh job resumes, having made sure that its values are that step's."""
    state = state_of(0)
    with CheckpointManager(root, **options) as checkpoints:
        step = checkpoints.resume(state)
    assert values(state) == EXPECTED[step], f"step {step} was resumed with other values"
    return step


def flip(path, chance):
    """Change one bit of a file; returns what it was before."""
    before = path.read_bytes()
    position = chance.randrange(len(before))
    changed = before[position] ^ (1 << chance.randrange(8))
    path.write_bytes(before[:position] + bytes([changed]) + before[position + 1 :])
    return before


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["read", "full"])
def test_a_bad_checkpoint_is_never_chosen(run, verify):
    """Whichever bit of the newest checkpoint flips, the one before it is resumed instead."""
    chance = random.Random(SEED)
    files = sorted(path for path in (run / f"step-{NEWEST:09d}").iterdir())
    assert [path.name for path in files] == [
        ".metadata", "COMMITTED", "__0_0.distcp", "__0_1.distcp", "chunks-00000.json.z", "manifest.json",
        "rank-00000.json", "shared.json",
    ]  # fmt: skip
    for number in range(FLIPS):
        path = files[number % len(files)]
        content = flip(path, chance)
        found = resumed(run, verify=verify)
        assert found == BEFORE, f"a flip in {path.name} passed"
        path.write_bytes(content)
    assert resumed(run, verify=verify) == NEWEST


def test_rotten_pins_never_stop_a_resume_and_protect_everything_while_they_cannot_be_read(run):
    with CheckpointManager(run) as checkpoints:
        checkpoints.pin(1, "paper")
    chance, pins = random.Random(SEED), run / ".ckpt-suite/pins.json"
    for _ in range(20):
        content = flip(pins, chance)
        assert resumed(run) == NEWEST
        with CheckpointManager(run, keep=KeepLatest(1)) as checkpoints:
            dropped = {info.step for info in checkpoints.prune(dry_run=True).drop}
        try:
            Catalog(LocalStorage(run)).pins()
        except CorruptCheckpointError:
            assert dropped == set()
        assert NEWEST not in dropped
        pins.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["COMMITTED", "manifest.json", ".metadata", "__0_0.distcp", "rank-00000.json"]
)
def test_a_damaged_checkpoint_is_in_nobodys_way_and_is_kept_for_a_look(run, name):
    damaged = run / f"step-{NEWEST:09d}"
    flip(damaged / name, random.Random(SEED))
    evidence = (damaged / name).read_bytes()
    state = state_of(0)
    with CheckpointManager(run, keep=KeepLatest(3)) as checkpoints:
        assert checkpoints.resume(state) == BEFORE
        checkpoints.save(NEWEST, state_of(NEWEST)).result()
        checkpoints.wait()
    assert resumed(run) == NEWEST
    # A directory whose marker says nothing makes way for the new one.
    kept = next(run.glob(f".replaced-*-{damaged.name}~"), damaged)
    assert (kept / name).read_bytes() == evidence


def test_a_run_whose_every_checkpoint_is_damaged_does_not_start_over_in_silence(run):
    chance = random.Random(SEED)
    for directory, name in zip(
        sorted(run.glob("step-*")), ("COMMITTED", "manifest.json", "__0_0.distcp"), strict=True
    ):
        flip(directory / name, chance)
    state, before = state_of(4), EXPECTED[4]
    refusal = pytest.raises(
        CorruptCheckpointError, match=rf"{run} is damaged: .*look at each with `ckpt verify`"
    )
    with CheckpointManager(run) as checkpoints, refusal:
        checkpoints.resume(state)
    assert values(state) == before


@pytest.mark.parametrize("change", ["truncated", "emptied", "deleted", "swapped"])
def test_files_that_are_cut_lost_or_exchanged_are_noticed(run, change):
    for path in sorted((run / f"step-{NEWEST:09d}").iterdir()):
        content = path.read_bytes()
        other = run / f"step-{BEFORE:09d}" / path.name
        if change == "deleted":
            path.unlink()
        elif change == "swapped":
            path.write_bytes(other.read_bytes())
        else:
            path.write_bytes(content[:-1] if change == "truncated" else b"")
        same = path.exists() and path.read_bytes() == content
        assert resumed(run) == (NEWEST if same else BEFORE), path.name
        path.write_bytes(content)


def test_a_checkpoint_that_lost_its_marker_is_not_one(run):
    (run / f"step-{NEWEST:09d}" / "COMMITTED").unlink()
    assert resumed(run) == BEFORE


def test_a_copied_checkpoint_says_which_step_it_really_is(run, tmp_path):
    shutil.copytree(run / "step-000000001", run / "step-000000009")
    assert resumed(run) == NEWEST
    assert max(info.step for info in Catalog(LocalStorage(run)).committed()) == NEWEST


def test_pruning_with_a_rotten_marker_deletes_nothing_newer(run):
    """A step in a marker is what retention goes by; rot must not make an old checkpoint the newest."""
    marker = run / "step-000000001" / "COMMITTED"
    marker.write_bytes(marker.read_bytes().replace(b'"step":1', b'"step":9'))
    with CheckpointManager(run, keep=KeepLatest(1)) as checkpoints:
        checkpoints.prune()
    assert resumed(run) == NEWEST
    assert Path(marker).exists(), "what cannot be read is for a person to judge"
