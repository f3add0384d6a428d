"""A tensor is compared as a whole, however many ranks saved it and however they divided it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_core import CheckpointManager
from ckpt_core.cli import main
from tests.kit.ranks import run_ranks
from tests.unit.dcp.wrappers import Blocks

pytestmark = pytest.mark.distributed

SHAPES = {"even": (8, 6), "uneven": (5, 3, 7), "flat": (11,), "tiny": (1, 2)}


def whole(change: float = 0.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    tensors["uneven"][4, 2, 6] += change
    return tensors


def save_divided(root: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layouts: dict[str, Any] = {"rows": Shard(0), "columns": Shard(1), "everywhere": Replicate()}
    for name, placement in layouts.items():
        with CheckpointManager(f"{root}/{name}") as checkpoints:
            state = {
                key: distribute_tensor(
                    tensor, mesh, [Shard(0) if key == "flat" and name == "columns" else placement]
                )
                for key, tensor in whole(change=1.0 if name == "columns" else 0.0).items()
            }
            checkpoints.save(1, state)
    made = Blocks.filled(4, 16, 8)
    sharded = DTensor.from_local(made, mesh, [Shard(0)], run_check=False)
    for name, value in {"blocks-halves": sharded, "blocks-whole": Blocks.filled(8, 16, 8)}.items():
        safe = torch.serialization.safe_globals([Blocks])
        with safe, CheckpointManager(f"{root}/{name}") as checkpoints:
            checkpoints.save(1, {"blocks": value, "plain": torch.zeros(3)})


def test_checkpoints_of_other_ranks_and_layouts_are_compared_by_their_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(save_divided, 2, str(tmp_path))
    with CheckpointManager(tmp_path / "one") as checkpoints:
        checkpoints.save(1, whole())

    def diff(a: str, b: str) -> tuple[int, dict[str, Any]]:
        code = main(["diff", str(tmp_path / a), str(tmp_path / b), "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, found = diff("rows", "one")
    assert (found["tensors"], found["num_read"]) == ([], 3)  # "tiny" has one row, on one rank
    assert {each["name"].partition(":")[0] for each in found["values"]} <= {"rank-00000", "rank-00001"}
    assert diff("everywhere", "one")[1]["num_read"] == 0
    for other in ("one", "rows", "everywhere"):
        code, found = diff(other, "columns")
        assert code == 1
        assert [(each["name"], each["changed"]) for each in found["tensors"]] == [("uneven", 1)]
        assert found["tensors"][0]["max_abs"] == pytest.approx(1.0)
    code, found = diff("blocks-halves", "blocks-whole")
    assert (code, found["undecided"], found["tensors"], found["num_tensors"]) == (2, ["blocks"], [], 2)
    assert diff("blocks-halves", "blocks-halves")[0] == 0
