"""A whole training state in one file of torch.save, a checkpoint of Lightning, and stock DCP."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_core import CheckpointManager, EverySteps
from ckpt_core.commit import verify_stock
from ckpt_core.convert import OutFile, Wanted, export
from ckpt_core.convert._torch_file import Leaf, torch_file
from ckpt_core.dcp import build_archive
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.formats.zips import read_directory
from ckpt_core.storage import open_storage
from lightning_ckpt import ShardedCheckpoint
from tests.unit.training import Run, assert_equal


def write(files: Sequence[OutFile], tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for file in files:
        content, crcs = bytearray(), list[int]()
        for piece in file.pieces:
            if isinstance(piece, Wanted):
                raw = tensors[piece.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                crcs.append(zlib.crc32(raw))
            else:
                raw = piece if isinstance(piece, bytes) else piece.content(crcs)
            content += raw
        (folder / file.path).write_bytes(content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    root = tmp_path_factory.mktemp("root")
    run = Run.make()
    run.steps(3)
    with CheckpointManager(root) as manager:
        manager.save(3, run.state)
    return run, root


DTYPES = [
    torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint32, torch.bool, torch.complex64, torch.int8
]  # fmt: skip


@pytest.mark.parametrize("mmap", [False, True])
def test_one_file_is_read_by_torch_and_by_python_with_every_kind_of_tensor(tmp_path, mmap):
    tensors = {str(dtype): torch.arange(35).reshape(5, 7).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "long": torch.randn(300_000)}
    leaves = {name: Leaf(Wanted(name), each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    plain = {
        "list": [1, (2.5, None, "x")],
        "array": np.arange(3, dtype=np.uint32),
        "one": np.float32(2),
        "tensor": torch.ones(2),
    }
    state = {
        "model": {**leaves, "tied": leaves["long"]},
        "optimizer": {"state": {0: leaves["scalar"]}},
        **plain,
    }
    write([torch_file("x.pt", state)], tensors, tmp_path)
    found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mmap)
    tied = found["model"].pop("tied")
    assert tied.data_ptr() == found["model"]["long"].data_ptr()
    assert found["model"].keys() == tensors.keys()
    for name, each in tensors.items():
        own = found["model"][name]
        assert (own.dtype, own.shape) == (each.dtype, each.shape)
        assert own.reshape(-1).view(torch.uint8).equal(each.reshape(-1).view(torch.uint8))
    assert found["optimizer"] == {"state": {0: tensors["scalar"]}}
    assert found["list"] == plain["list"]
    assert (found["array"].tolist(), found["one"]) == ([0, 1, 2], 2.0)
    assert found["tensor"].equal(torch.ones(2))
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None


def test_a_file_of_more_tensors_than_16_bits_count_is_whole():
    content = b"".join(build_archive(b"", [(0, 0)] * 65_600, offset=0, streamed=True).frames)
    assert len(zipfile.ZipFile(io.BytesIO(content)).namelist()) == 65_604
    assert len(read_directory(lambda at, n: content[at : at + n], len(content)).records) == 65_604


def test_one_file_has_every_key_and_gives_a_plain_loop_its_state_back(tmp_path, saved):
    run, root = saved
    assert export(root, tmp_path / "ckpt.pt", to="torch").step == 3
    found = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert found.keys() == {"model", "optimizer", "scheduler", "rng_seed", "ckpt_suite"}
    ours = found["ckpt_suite"]["state"]["model"]
    assert all(each.data_ptr() == ours[name].data_ptr() for name, each in found["model"].items())
    new = Run.make(5)
    new.model.load_state_dict(found["model"])
    new.optimizer.load_state_dict(found["optimizer"])
    new.scheduler.load_state_dict(found["scheduler"])
    assert_equal(new.tensors(), run.tensors())
    assert new.scheduler.state_dict() == run.scheduler.state_dict()
    assert new.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]


def test_tensors_of_one_place_stay_one_and_views_of_it_become_their_own(tmp_path):
    tied = torch.arange(16.0).view(4, 4)
    model = {"a": tied, "b": tied, "turned": tied.t(), "row": tied[0], "other": tied.clone()}
    torch.save({"model": model, "step": 5}, tmp_path / "x.pt")
    assert export(tmp_path / "x.pt", tmp_path / "y.pt", to="torch").step == 5
    found = torch.load(tmp_path / "y.pt", weights_only=True)["model"]
    assert_equal(found, model)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert len({each.data_ptr() for each in found.values()}) == 4


def test_several_optimizers_and_one_kept_as_an_item_are_in_the_form_of_torch(tmp_path):
    one, two = Run.make(1), Run.make(2)
    one.steps(1)
    two.steps(1)
    with CheckpointManager(tmp_path / "root") as manager:
        state = {"a": one.model, "b": two.model, "first": one.optimizer, "inner": {"second": two.optimizer}}
        manager.save(3, state)
    export(tmp_path / "root", tmp_path / "x.pt", to="torch")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    new = Run.make(3), Run.make(4)
    for each, model, optimizer in zip(new, "ab", (found["first"], found["inner"]["second"]), strict=True):
        each.model.load_state_dict(found[model])
        each.optimizer.load_state_dict(optimizer)
    assert_equal(new[0].tensors(), one.tensors())
    assert_equal(new[1].tensors(), two.tensors())


def test_stock_dcp_and_our_load_read_what_was_written_for_dcp(tmp_path, saved):
    run, root = saved
    export(root, tmp_path / "dcp", to="dcp")
    assert verify_stock(open_storage(str(tmp_path)), "dcp") == []
    target = {"model": Run.make(5).model.state_dict()}
    stock.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_equal(target["model"], run.model.state_dict())
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "x.pt")
    assert_equal(torch.load(tmp_path / "x.pt", weights_only=True)["model"], run.model.state_dict())
    with CheckpointManager(tmp_path) as manager:
        for where in ({"name": "dcp"}, {"source": tmp_path / "dcp"}):
            new = Run.make(7)
            loaded = manager.load(new.state, **where)
            assert_equal(new.tensors(), run.tensors())
            assert new.scheduler.state_dict() == run.scheduler.state_dict()
            assert "rng" in loaded.per_rank


class Module(lightning.LightningModule):
    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def train_dataloader(self) -> Any:
        data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(data, batch_size=8)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["large"] = torch.arange(40_000)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def trainer(*callbacks: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    mine = {"max_epochs": 3, "enable_checkpointing": bool(callbacks), "callbacks": list(callbacks)}
    return lightning.Trainer(accelerator="cpu", devices=1, **quiet, **mine)


def test_stock_lightning_loads_its_checkpoint_and_continues_to_the_same_weights(tmp_path):
    lightning.seed_everything(0)
    module = Module(hidden=6)
    trainer(ShardedCheckpoint(tmp_path / "root", save=EverySteps(8))).fit(module)
    export(tmp_path / "root", tmp_path / "x.ckpt", to="lightning", step=8)
    found = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert found["large"].equal(torch.arange(40_000))
    assert (found["global_step"], found["hyper_parameters"]["hidden"]) == (8, 6)
    assert Module.load_from_checkpoint(tmp_path / "x.ckpt").hparams["hidden"] == 6
    new, taken_over = Module(hidden=6), trainer()
    taken_over.fit(new, ckpt_path=tmp_path / "x.ckpt")
    assert taken_over.global_step == 12
    assert_equal(new.state_dict(), module.state_dict())


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_nothing_is_exported_into_a_checkpoint(tmp_path, saved, to):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, saved[0].state)
    checkpoint = tmp_path / "step-000000001"
    before = sorted(checkpoint.iterdir())
    with pytest.raises(ConfigError, match="is a checkpoint, into which nothing else is written"):
        export(checkpoint, checkpoint / "out", to=to)
    assert sorted(checkpoint.iterdir()) == before


def test_what_no_trainer_of_lightning_saved_is_refused_with_what_it_is(tmp_path, saved):
    with pytest.raises(IncompatibleCheckpointError, match="holds model, optimizer, rng_seed, scheduler"):
        export(saved[1], tmp_path / "x.ckpt", to="lightning")
    with pytest.raises(ConfigError, match="adapters concerns weights alone"):
        export(saved[1], tmp_path / "x.pt", to="torch", adapters="merge")
    with pytest.raises(ConfigError, match=r"nothing in .* matches modell"):
        export(saved[1], tmp_path / "x.pt", to="torch", include=["modell.*"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_part_may_be_written_and_weights_in_another_dtype(tmp_path, saved, to):
    run, root = saved
    export(root, tmp_path / "out", to=to, include=["model.*"], dtype="bf16")
    if to == "dcp":
        dcp_to_torch_save(tmp_path / "out", tmp_path / "x.pt")
    found = torch.load(tmp_path / ("x.pt" if to == "dcp" else "out"), weights_only=True)
    assert found.keys() == {"model"}
    for name, each in run.model.state_dict().items():
        expected = each.bfloat16() if each.is_floating_point() else each
        assert found["model"][name].dtype == expected.dtype
        assert found["model"][name].equal(expected)
