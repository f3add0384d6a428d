"""`init_from` in every host: a first start begins with weights of others, a resume never looks at them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import accelerate_ckpt
from ckpt_core import CheckpointManager, CheckpointOptions, TrainState
from ckpt_core.cli import main
from ckpt_core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from lightning_ckpt import ShardedCheckpoint, setup_fabric
from tests.adapters.accelerate_jobs import forget_accelerators
from tests.adapters.trainer_jobs import Tokens
from tests.kit.ranks import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_accelerate")]

ROWS = torch.ones(8, 3)
STEPS = 2


class Net(pl.LightningModule):
    """Steps change nothing, so that what a run ends with is what it began with."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(rows))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class ForTrainer(nn.Module):
    """The same, as the Hugging Face Trainer calls it."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.body, self.head = net.body, net.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(self.body(input_ids[:, :3].float())).sum() + 0 * labels.sum()}


def in_a_loop(root: Path, net: Net, more: int, **options: Any) -> nn.Module:
    with CheckpointManager(root, save={"every_steps": 1}, **options) as checkpoints:
        state = TrainState(model=net, optimizer=net.configure_optimizers())
        begun = checkpoints.resume(state) or 0
        for step in range(begun + 1, begun + more + 1):
            checkpoints.maybe_save(step, state)
    return net


def in_lightning(root: Path, net: Net, more: int, **options: Any) -> nn.Module:
    callback = ShardedCheckpoint(str(root), save={"every_steps": 1}, **options)
    made = pl.Trainer(
        max_steps=more if not root.exists() else STEPS + more,
        callbacks=[callback],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    made.fit(net, DataLoader(ROWS, batch_size=1), ckpt_path="last")
    return net


def in_fabric(root: Path, net: Net, more: int, **options: Any) -> nn.Module:
    fabric = Fabric(accelerator="cpu", devices=1)
    checkpoints = setup_fabric(fabric, root, **options)
    model, optimizer = fabric.setup(net, net.configure_optimizers())
    state = {"net": model, "optimizer": optimizer, "step": 0}
    fabric.load("last", state)
    for _ in range(more):
        state["step"] += 1
        fabric.save(f"{root}/step-{state['step']}", state)
    checkpoints.close()
    return net


def in_accelerate(root: Path, net: Net, more: int, **options: Any) -> nn.Module:
    forget_accelerators()
    accelerator = Accelerator(cpu=True)
    accelerate_ckpt.enable(accelerator, root=root, **options)
    model, optimizer = accelerator.prepare(net, net.configure_optimizers())
    accelerator.load_state()
    for _ in range(more):
        optimizer.step()
        accelerator.save_state()
    accelerator.end_training()
    return accelerator.unwrap_model(model)


def in_the_trainer(root: Path, net: Net, more: int, **options: Any) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    forget_accelerators()
    resumes = root.exists()
    model = ForTrainer(net)
    arguments = {
        "max_steps": STEPS + more if resumes else more,
        "save_steps": 1,
        "learning_rate": 0.0,
        "report_to": [],
    }
    made = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(root), use_cpu=True, disable_tqdm=True, **arguments),
        train_dataset=Tokens(),
    )
    accelerate_ckpt.enable_trainer(made, **options)
    made.train(resume_from_checkpoint=True if resumes else None)
    accelerate_ckpt.disable_trainer(made)
    return model


HOSTS: dict[str, Callable[..., nn.Module]] = {
    "a loop": in_a_loop,
    "Lightning": in_lightning,
    "Fabric": in_fabric,
    "Accelerate": in_accelerate,
    "the Trainer": in_the_trainer,
}


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Half-precision weights of the body, under another name, and of a head that is not ours."""
    torch.manual_seed(7)
    values = {name: each.half() for name, each in nn.Linear(3, 4).state_dict().items()}
    (tmp_path / "hf").mkdir()
    found = {f"backbone.{name}": each for name, each in values.items()} | {"old_head.weight": torch.ones(9)}
    save_file(found, tmp_path / "hf" / "model.safetensors")
    return tmp_path / "hf", values


@pytest.mark.parametrize("host", HOSTS)
def test_a_first_start_begins_with_them_and_a_resume_ignores_them(tmp_path, weights, caplog, host):
    caplog.set_level(logging.INFO)
    folder, values = weights
    option = {"place": str(folder), "rename": {"backbone": "body"}, "strict": False}
    net = Net()
    head = {name: each.clone() for name, each in net.head.state_dict().items()}
    made = HOSTS[host](tmp_path / "run", net, STEPS, init_from=option)
    for name, each in made.body.state_dict().items():
        assert torch.equal(each, values[name].float())
    assert all(torch.equal(each, head[name]) for name, each in made.head.state_dict().items())
    (line,) = [each for each in caplog.messages if "training begins with" in each]
    assert (
        "2 matched; 2 missing: model.head.weight, model.head.bias; 1 unexpected: model.old_head.weight"
        in line
    )
    again = HOSTS[host](tmp_path / "run", Net(), 1, init_from=str(tmp_path / "nowhere"))
    assert torch.equal(again.body.weight, made.body.weight)
    assert torch.equal(again.head.weight, made.head.weight)
    assert len([each for each in caplog.messages if "init_from= is ignored" in each]) == 1


@pytest.mark.parametrize(("first", "second"), [*zip(HOSTS, [*HOSTS][1:], strict=False), ("the Trainer",) * 2])
def test_a_run_begins_with_the_weights_of_another_whichever_hosts_they_are_in(tmp_path, first, second):
    trained = HOSTS[first](tmp_path / "first", Net(), STEPS).state_dict()
    for place in (
        tmp_path / "first",
        next((tmp_path / "first").glob("*2"), tmp_path / "first" / "checkpoint_1"),
    ):
        root = tmp_path / f"from {place.name}"
        begun = HOSTS[second](root, Net(), 1, init_from=str(place)).state_dict()
        assert begun.keys() == trained.keys()
        assert all(torch.equal(begun[name], trained[name]) for name in trained)


def test_a_run_of_a_trainer_equals_the_weights_that_were_exported_of_it(tmp_path, capsys):
    HOSTS["the Trainer"](tmp_path / "run", Net(), 1)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    assert main(["diff", str(tmp_path / "run/checkpoint-1"), str(tmp_path / "hf"), "--only", "model.*"]) == 0
    assert "equal: 4 tensors" in capsys.readouterr().out
    content = bytearray((file := tmp_path / "run/checkpoint-1/model.safetensors").read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    net = Net()
    before = [each.clone() for each in net.parameters()]
    with (
        CheckpointManager(tmp_path / "next") as checkpoints,
        pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"),
    ):
        checkpoints.load(TrainState(model=net), source=tmp_path / "run/checkpoint-1", items=["model"])
    assert all(map(torch.equal, before, net.parameters()))
    assert main(["diff", str(tmp_path / "run/checkpoint-1"), str(tmp_path / "hf"), "--only", "model.*"]) == 2
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "none")]) == 1
    assert not (tmp_path / "none").exists()


def test_of_several_models_each_has_its_weights_from_another_run(tmp_path):
    def saved(root: Path, nets: list[Net]) -> None:
        forget_accelerators()
        accelerator = Accelerator(cpu=True)
        accelerate_ckpt.enable(accelerator, root=root)
        accelerator.prepare(*nets, *(net.configure_optimizers() for net in nets))
        accelerator.save_state()
        accelerator.end_training()

    nets, again = [Net(), Net()], {"one": Net(), "other": Net()}
    saved(tmp_path / "accelerate", nets)
    with CheckpointManager(tmp_path / "next", init_from=tmp_path / "accelerate") as checkpoints:
        checkpoints.initialise(TrainState(model=(live := [Net(), Net()])))
    fabric = Fabric(accelerator="cpu", devices=1)
    checkpoints = setup_fabric(fabric, tmp_path / "fabric")
    fabric.save(f"{tmp_path}/fabric/step-1", dict(zip(again, nets, strict=True)))
    checkpoints.close()
    with CheckpointManager(tmp_path / "last", init_from=tmp_path / "fabric") as checkpoints:
        checkpoints.initialise(TrainState(model=again))
    for found in (live, [*again.values()]):
        for net, each in zip(nets, found, strict=True):
            assert all(
                torch.equal(each.state_dict()[name], value) for name, value in net.state_dict().items()
            )


class Sharded(Net):
    def configure_model(self) -> None:
        fully_shard(self.body, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.head, mesh=self.device_mesh["data_parallel"])


def in_sharded_lightning(root: str, folder: str) -> bool:
    net = Sharded()
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    made = pl.Trainer(
        max_steps=1,
        callbacks=[
            ShardedCheckpoint(
                root, init_from={"place": folder, "rename": {"backbone": "body"}, "strict": False}
            )
        ],
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    made.fit(net, DataLoader(ROWS, batch_size=1))
    values = load_file(f"{folder}/model.safetensors")
    return torch.equal(net.body.weight.full_tensor(), values["backbone.weight"].float())


@pytest.mark.distributed
def test_a_sharded_fit_begins_with_them(tmp_path, weights):
    found = run_ranks(
        in_sharded_lightning,
        2,
        str(tmp_path / "run"),
        str(weights[0]),
        process_group=False,
        timeout_seconds=240,
    )
    assert found == [True, True]


@pytest.mark.parametrize("host", HOSTS)
def test_weights_that_do_not_fit_end_the_run_before_it_begins(tmp_path, weights, host):
    with pytest.raises(IncompatibleCheckpointError, match=r"model\.body\.weight"):
        HOSTS[host](tmp_path / "run", Net(), STEPS, init_from=str(weights[0]))
    forget_accelerators()
    with pytest.raises(CheckpointNotFoundError, match="there is nothing"):
        HOSTS[host](tmp_path / "run", Net(), STEPS, init_from=tmp_path / "nowhere")


def test_the_option_is_read_from_files_and_the_environment(tmp_path, monkeypatch, weights):
    option = {"place": str(weights[0]), "rename": {"backbone": "body"}, "strict": False}
    (tmp_path / "c.yaml").write_text(json.dumps({"checkpoint": {"init_from": option}}))
    initial = CheckpointOptions.from_file(tmp_path / "c.yaml").initial_weights
    assert initial is not None
    assert (initial.place, initial.rename, initial.strict) == (str(weights[0]), {"backbone": "body"}, False)
    monkeypatch.setenv("CKPT_SUITE_INIT_FROM", json.dumps(option))
    made = in_accelerate(tmp_path / "run", Net(), 1)
    assert torch.equal(made.body.weight, weights[1]["weight"].float())
    assert "secret" not in repr(CheckpointOptions(init_from="s3://user:secret@bucket/x"))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"rename": {}}, "place must be a path or URL"),
        ({"place": "x", "renames": {}}, "unknown 'renames'.*rename"),
        ({"place": "x", "strict": "no"}, "strict must be true or false"),
        ({"place": "x", "rename": ["a"]}, "rename must be a mapping"),
        ("", "place must be a path or URL"),
        (3, "place must be a path or URL"),
    ],
)
def test_a_wrong_option_is_named(tmp_path, value, words):
    with pytest.raises(ConfigError, match=words):
        CheckpointManager(tmp_path, init_from=value)


def test_a_host_without_one_root_refuses_the_option(tmp_path, weights):
    with pytest.raises(ConfigError, match=r"init_from.*need dirpath="):
        ShardedCheckpoint(init_from=str(weights[0]))
    accelerator = Accelerator(cpu=True)
    accelerate_ckpt.enable(accelerator, init_from=str(weights[0]))
    accelerator.prepare(Net())
    with pytest.raises(ConfigError, match="init_from= is for the checkpoints of one root"):
        accelerator.save_state(str(tmp_path / "mine"))


def test_a_run_that_never_loads_them_is_told(tmp_path, weights, caplog):
    with CheckpointManager(tmp_path / "run", init_from=weights[0]) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)})
    assert [each for each in caplog.messages if "nothing has loaded it" in each]


def test_a_state_without_a_model_cannot_begin_with_weights(tmp_path, weights):
    with (
        CheckpointManager(tmp_path / "run", init_from=weights[0]) as checkpoints,
        pytest.raises(ConfigError, match="this state has none"),
    ):
        checkpoints.resume({"w": torch.ones(2)})
