"""`replicas=2` in a host: whichever of its files is lost, also small ones that the host itself reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import accelerate_ckpt
from tests.adapters.accelerate_jobs import Job, prepared, step, weights

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_any_file_of_a_checkpoint_of_accelerate_may_be_lost_and_hooks_read_whole_ones(tmp_path: Path) -> None:
    made, net, *rest = prepared(Job(strategy="single", world=1, root=str(tmp_path)), replicas=2)
    read: list[str] = []

    def save_hook(models: list[torch.nn.Module], _: list[object], directory: str) -> None:
        Path(directory, "of_a_hook.txt").write_text("whole")

    def load_hook(models: list[torch.nn.Module], directory: str) -> None:
        read.append(Path(directory, "of_a_hook.txt").read_text())

    made.register_save_state_pre_hook(save_hook)
    made.register_load_state_pre_hook(load_hook)
    step(made, net, *rest)
    place = tmp_path / "checkpoint-1"
    made.save_state(str(place))
    accelerate_ckpt.checkpoints(made).wait()
    saved = weights(net)
    files = [path for path in place.rglob("*") if path.is_file() and path.name != "COMMITTED"]
    twins = [path for path in files if path.suffix == ".replica"]
    assert {path.with_suffix("") for path in twins} == set(files) - set(twins)
    for path in files:
        content = path.read_bytes()
        path.unlink()
        step(made, net, *rest)
        made.load_state(str(place))
        assert weights(net) == saved, path
        path.write_bytes(content)
    assert read == ["whole"] * len(files)
    made.end_training()
