"""A run of torch.save, Lightning, Accelerate or the Trainer goes on in a plain loop, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckpt_core import CheckpointManager, Counters, TrainState
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from tests.archives import unpack
from tests.unit.sources.test_torch_save import bits, described, read_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
TOTAL, TAKEN = 8, 3


def data() -> TensorDataset:
    return TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1))


def parts(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
    batches = [batch for (batch,) in DataLoader(data(), batch_size=2)]
    for step in steps:
        model(batches[step]).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def taken_over(source: Path, tmp_path: Path, form: str, model: nn.Module | None = None) -> tuple[Any, ...]:
    """Another model, optimizer and scheduler, into which a place is loaded."""
    model = net(5) if model is None else model
    optimizer, scheduler = parts(model)
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with CheckpointManager(tmp_path / "ours") as checkpoints:
        checkpoints.load(named if form == "a mapping" else TrainState(**named), source=source)
    return model, optimizer, scheduler


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert bits(a) == bits(b), name


FORMS = pytest.mark.parametrize("form", ["a mapping", "a TrainState"])


@FORMS
@pytest.mark.parametrize("names", [("model", "optimizer", "scheduler"), ("net", "optim", "lr_scheduler")])
def test_a_dict_of_state_dicts_is_taken_over(tmp_path, form, names):
    model = net()
    optimizer, scheduler = parts(model)
    train(model, optimizer, scheduler, range(TAKEN))
    states = [each.state_dict() for each in (model, optimizer, scheduler)]
    states[0] = {f"_orig_mod.{name}": each for name, each in states[0].items()}  # as nanoGPT saves it
    (tmp_path / "run").mkdir()
    torch.save({**dict(zip(names, states, strict=True)), "iter_num": TAKEN}, tmp_path / "run/ckpt.pt")
    live = taken_over(tmp_path / "run/ckpt.pt", tmp_path, form)
    for one in ((model, optimizer, scheduler), live):
        torch.manual_seed(7)
        train(*one, range(TAKEN, TOTAL))
    assert_same(model, live[0])
    assert live[2].state_dict() == scheduler.state_dict()


def test_plain_values_beside_the_state_are_loaded_too(tmp_path):
    (tmp_path / "run").mkdir()
    torch.save(
        {"model": {"w": torch.ones(2)}, "iter_num": 7, "config": {"lr": 0.1}}, tmp_path / "run/ckpt.pt"
    )
    state: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "iter_num": 0, "config": {"lr": None}}
    with CheckpointManager(tmp_path / "ours") as checkpoints:
        checkpoints.load(state, source=tmp_path / "run/ckpt.pt")
    assert state["model"]["w"].tolist() == [1, 1]
    assert (state["iter_num"], state["config"]) == (7, {"lr": 0.1})


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"place": Path("a"), "width": 6})
        self.net = net()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = parts(self.net)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.fixture(scope="module")
def lightning_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning") / "run"
    trainer = lightning.Trainer(
        max_steps=TAKEN,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="last")],
    )
    module = Module()
    trainer.fit(module, DataLoader(data(), batch_size=2))
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt", module


@FORMS
def test_a_checkpoint_of_lightning_is_taken_over(lightning_file, tmp_path, form):
    place, module = lightning_file
    assert described(place).step == TAKEN
    model, optimizer, scheduler = taken_over(place, tmp_path, form, nn.ModuleDict({"net": net(5)}))
    expected = torch.load(place, weights_only=False)
    assert_same(model["net"], module.net)
    assert scheduler.state_dict() == expected["lr_schedulers"][0]
    states = optimizer.state_dict()["state"], expected["optimizer_states"][0]["state"]
    for number, state in states[1].items():
        for key, each in state.items():
            assert bits(states[0][number][key]) == bits(each)
    assert optimizer.state_dict()["param_groups"] == expected["optimizer_states"][0]["param_groups"]


@pytest.fixture(scope="module")
def accelerate_folder(tmp_path_factory):
    """A folder, and the model as it is after all steps."""
    folder = tmp_path_factory.mktemp("accelerate") / "run"
    accelerator, model = Accelerator(cpu=True), net()
    optimizer, scheduler = parts(model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(Counters(epoch=2))
    train(model, optimizer, scheduler, range(TAKEN))
    accelerator.save_state(str(folder))
    train(model, optimizer, scheduler, range(TAKEN, TOTAL))
    return folder, model


def test_a_folder_of_accelerate_goes_on_with_its_random_numbers(accelerate_folder, tmp_path):
    folder, expected = accelerate_folder
    torch.manual_seed(99)
    live = taken_over(folder, tmp_path, "a TrainState")
    train(*live, range(TAKEN, TOTAL))  # with dropout
    assert_same(live[0], expected)
    layout = described(folder)
    assert layout.values["custom_checkpoint_0", "epoch"] == 2
    assert "random_states" not in {path[0] for path in layout.values}


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        attention_dropout=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        row = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


@pytest.fixture(scope="module")
def trainer_folder(tmp_path_factory):
    arguments = TrainingArguments(
        str(tmp_path_factory.mktemp("trainer") / "run"),
        max_steps=TAKEN, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_steps=1, save_steps=TAKEN, lr_scheduler_type="cosine",
    )  # fmt: skip
    trainer = Trainer(llama(), arguments, train_dataset=Tokens())
    trainer.train()
    return Path(arguments.output_dir) / f"checkpoint-{TAKEN}", trainer


def test_a_checkpoint_of_the_trainer_is_taken_over_whole(trainer_folder, tmp_path):
    folder, trainer = trainer_folder
    other = Trainer(llama(), trainer.args, train_dataset=Tokens())
    other.create_optimizer_and_scheduler(20)
    torch.manual_seed(99)
    state = TrainState(model=other.model, optimizer=other.optimizer, scheduler=other.lr_scheduler)
    with CheckpointManager(tmp_path / "ours") as checkpoints:
        checkpoints.load(state, source=folder)
    assert_same(other.model, trainer.model)
    assert other.lr_scheduler.state_dict() == trainer.lr_scheduler.state_dict()
    expected = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    for number, each in other.optimizer.state_dict()["state"].items():
        assert {key: bits(value) for key, value in each.items()} == {
            key: bits(value) for key, value in expected[number].items()
        }
    generators = torch.load(folder / "rng_state.pth", weights_only=False)
    assert torch.equal(torch.get_rng_state(), generators["cpu"])
    layout = described(folder)
    assert (layout.step, layout.values["trainer_state",]["max_steps"]) == (TAKEN, TAKEN)


def test_weights_in_shards_of_torch_save_are_one_model(tmp_path):
    folder, state = tmp_path / "hf", net().state_dict()
    folder.mkdir()
    names = list(state)
    places = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(places.values()):
        torch.save({name: state[name] for name in names if places[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    found = read_tensors(folder)
    assert {name: bits(each) for name, each in found.items()} == {f"model.{n}": bits(state[n]) for n in names}
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"00002-of-00002.*missing"):
        described(folder)


def test_what_deepspeed_saved_under_the_trainer_is_a_part_of_its_checkpoint(trainer_folder, tmp_path):
    unpack(Path(__file__).with_name("deepspeed.tar.xz"), tmp_path)
    folder = tmp_path / "stage2-fp32"
    for name in ("trainer_state.json", "scheduler.pt", "rng_state.pth"):
        shutil.copy(trainer_folder[0] / name, folder)
    layout = described(folder)
    assert {path[0] for path in (*layout.tensors, *layout.values)} >= {
        "model", "master", "optimizer", "scheduler", "rng.0", "trainer_state",
    }  # fmt: skip
    assert "Trainer, with a checkpoint of DeepSpeed's ZeRO stage 2" in layout.kind


def write(name: str, content: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content) if isinstance(content, bytes) else torch.save(
            content, folder / name
        )

    return change


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-50])


def other_optimizer(folder: Path) -> None:
    """The state of an optimizer of other parameters, as many."""
    other = nn.Sequential(nn.Linear(5, 6), nn.Dropout(), nn.Linear(6, 1))
    optimizer, _ = parts(other)
    other(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut("model.safetensors"), "model.safetensors"),
        (cut("optimizer.bin"), "optimizer.bin"),
        (write("scheduler.bin", b"PK\3\4"), "scheduler.bin"),
        (lambda folder: os.mkfifo(folder / "scaler.pt"), r"scaler\.pt"),
        (write("optimizer_2.bin", {"state": {}, "param_groups": []}), "number 1 is missing"),
        (write("random_states_2.pkl", {"step": 1}), "number 1 is missing"),
        (write("random_states_0.pkl", {"random_state": 1, "torch_manual_seed": torch.ones(3)}), "rng.0"),
        (write("pytorch_model_fsdp_rank0.bin", {}), "FULL_STATE_DICT"),
        (write("custom_checkpoint_0.pkl", {"x": Module}), "Module.*none was executed"),
        (other_optimizer, r"optimizer numbers parameters.*\(6, 5\)"),
        (
            write("optimizer.bin", {"state": {}, "param_groups": [{"params": [0]}]}),
            r"groups of \[1\]|kind of optim",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_folder_that_is_not_whole_is_refused_before_anything_is_touched(
    accelerate_folder, tmp_path, change, says
):
    folder = tmp_path / "run"
    shutil.copytree(accelerate_folder[0], folder)
    change(folder)
    model = net(5)
    before = {name: bits(each) for name, each in model.state_dict().items()}
    generators = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=says):
        taken_over(folder, tmp_path, "a TrainState", model)
    assert {name: bits(each) for name, each in model.state_dict().items()} == before
    assert torch.equal(torch.get_rng_state(), generators)


def test_state_that_does_not_fit_is_refused_before_anything_is_touched(lightning_file, tmp_path):
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 2))})
    before = model["net"][0].weight.clone()
    with pytest.raises(IncompatibleCheckpointError, match=r"net\.2\.weight"):
        taken_over(lightning_file[0], tmp_path, "a mapping", model)
    assert torch.equal(model["net"][0].weight, before)


def test_shards_of_fsdp_and_what_lies_beside_them_are_one_state(accelerate_folder, tmp_path):
    folder, expected = accelerate_folder
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    model, optimizer, scheduler = taken_over(folder, tmp_path, "a TrainState")
    (copy / "optimizer.bin").unlink()  # as Accelerate writes SHARDED_STATE_DICT
    dcp.save({"model": model.state_dict()}, checkpoint_id=copy / "pytorch_model_fsdp_0", no_dist=True)
    named = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": named}, checkpoint_id=copy / "optimizer_0", no_dist=True)
    torch.manual_seed(99)
    live = taken_over(copy, tmp_path, "a TrainState")
    assert live[2].state_dict() == scheduler.state_dict()
    train(*live, range(TAKEN, TOTAL))
    assert_same(live[0], expected)
    shutil.copytree(copy / "pytorch_model_fsdp_0", copy / "pytorch_model_fsdp_1")
    both = [net(1), net(2)]
    with CheckpointManager(tmp_path / "both") as manager:
        manager.load(TrainState(model=both), source=copy, items=["model"])
    assert_same(both[0], model)
    assert_same(both[1], model)
    (copy / "pytorch_model_fsdp_1").rename(copy / "step_1")
    with pytest.raises(IncompatibleCheckpointError, match=r"several of.*give one of these"):
        taken_over(copy, tmp_path, "a TrainState")


def test_a_directory_of_files_by_items_and_one_rank_is_one_state(tmp_path):
    model, live, folder = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), tmp_path / "step"
    folder.mkdir()
    torch.save(model.state_dict(), folder / "model_0.pt")
    torch.save(7, folder / "step_0.pt")
    (folder / "metadata.pkl").write_bytes(b"is not read")
    with CheckpointManager(tmp_path / "run") as manager:
        found = manager.load(TrainState(model=live), source=folder, items=["model"])
        assert (found.step, live.weight.tolist()) == (7, model.weight.tolist())
        torch.save(model.state_dict(), folder / "model_1.pt")
        with pytest.raises(
            IncompatibleCheckpointError, match=r"several ranks.*model_1\.pt.*CheckpointManager"
        ):
            manager.load(TrainState(model=live), source=folder, items=["model"])
        (folder / "notes.txt").write_text("")
        with pytest.raises(CheckpointNotFoundError, match="any other format"):
            manager.load(TrainState(model=live), source=folder, items=["model"])
