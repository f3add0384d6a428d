"""Exports of what hosts have saved: without the names of their wrappers, with what they saved beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate
import lightning as pl
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import accelerate_ckpt
from ckpt_core import CheckpointManager, ConfigError, export
from lightning_ckpt import ShardedCheckpoint
from tests.adapters.model_families import made
from tests.adapters.trainer_jobs import TrainerJob, trainer
from tests.kit.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.distributed,
]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert sorted(one) == sorted(other)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def stock(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return weights(folder)


@pytest.mark.parametrize("stock_files", [True, False, None])
def test_the_trainer_saves_all_that_an_export_needs(tmp_path, stock_files):
    options = {} if stock_files is None else {"stock_files": stock_files}
    job = trainer(TrainerJob(root=f"{tmp_path}/run", steps=3, options=options))
    job.train()
    accelerate_ckpt.disable_trainer(job)
    export(tmp_path / "run", tmp_path / "out", dtype="bf16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    same(weights(tmp_path / "out"), stock(job.model.to(torch.bfloat16), tmp_path / "stock"))
    type(job.model).from_pretrained(tmp_path / "out", local_files_only=True)


def test_adapters_of_the_trainer_are_kept_without_their_base_and_merged_with_it(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    bases: list[Any] = []

    def adapt(model: Any) -> Any:
        model.save_pretrained(tmp_path / "base")
        bases.append(model)
        return peft.get_peft_model(model, config)

    job = trainer(TrainerJob(root=f"{tmp_path}/run", steps=3), adapt=adapt)
    job.train()
    accelerate_ckpt.disable_trainer(job)
    export(tmp_path / "run", tmp_path / "kept", adapters="keep")
    same(weights(tmp_path / "kept"), stock(job.model, tmp_path / "stock"))
    again = peft.PeftModel.from_pretrained(bases[0], tmp_path / "kept")
    same(dict(again.state_dict()), dict(job.model.state_dict()))
    export(tmp_path / "run", tmp_path / "merged", adapters="merge", like=tmp_path / "base")
    same(weights(tmp_path / "merged"), stock(job.model.merge_and_unload(), tmp_path / "stock-merged"))


class Tuned(pl.LightningModule):
    def __init__(self, family: str, *, scored: bool = False) -> None:
        super().__init__()
        self.model = made(family)
        if scored:
            self.head_of_another = nn.Linear(2, 2)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return sum(each.square().mean() for each in self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(root: Path, module: Tuned) -> Tuned:
    pl.Trainer(
        max_steps=1,
        callbacks=[ShardedCheckpoint(str(root), save={"every_steps": 1})],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(torch.zeros(2, 1), batch_size=1))
    return module


def test_the_attribute_of_a_lightning_module_is_in_no_name(tmp_path):
    """Names of Llama begin with `model.`, too, as the attribute does."""
    module = fitted(tmp_path / "run", Tuned("llama"))
    expected = stock(module.model, tmp_path / "stock")
    export(tmp_path / "run", tmp_path / "alone")
    same(weights(tmp_path / "alone"), expected)
    export(tmp_path / "run", tmp_path / "like", like=tmp_path / "stock")
    same(weights(tmp_path / "like"), expected)


def test_of_a_lightning_module_with_other_attributes_the_models_is_found_by_its_names_or_asked_for(tmp_path):
    module = fitted(tmp_path / "run", Tuned("qwen2", scored=True))
    expected = stock(module.model, tmp_path / "stock")
    with pytest.raises(ConfigError, match="several attributes of a LightningModule"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(tmp_path / "run", tmp_path / "like", like=tmp_path / "stock")
    same(weights(tmp_path / "like"), expected)
    export(tmp_path / "run", tmp_path / "named", include=["model.*"])
    same({**weights(tmp_path / "named")}, dict(module.model.state_dict()))


def test_accelerate_saves_models_in_parts_of_their_own(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True, project_dir=str(tmp_path))
    model = accelerator.prepare(made("llama"))
    accelerate_ckpt.enable(accelerator)
    accelerator.save_state(str(tmp_path / "run/checkpoint_0"))
    accelerator.end_training()
    expected = stock(accelerator.unwrap_model(model), tmp_path / "stock")
    export(tmp_path / "run/checkpoint_0", tmp_path / "out", like=tmp_path / "stock")
    same(weights(tmp_path / "out"), expected)


def test_wrappers_and_averages_are_in_no_name(tmp_path):
    model = made("llama")
    average = AveragedModel(torch.compile(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(torch.compile(model))
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    average.update_parameters(torch.compile(model))
    with CheckpointManager(tmp_path / "run") as manager:
        state = {"model": {f"module._orig_mod.{name}": each for name, each in model.state_dict().items()}}
        manager.save(1, {**state, "average": average})
    expected = stock(model, tmp_path / "stock")
    export(tmp_path / "run", tmp_path / "out", like=tmp_path / "stock")
    same(weights(tmp_path / "out"), expected)
    export(tmp_path / "run", tmp_path / "ema", like=tmp_path / "stock", ema="average")
    half = weights(tmp_path / "ema")
    assert torch.equal(half["lm_head.weight"], average.module._orig_mod.lm_head.weight)
    assert not torch.equal(half["lm_head.weight"], expected["lm_head.weight"])
    with pytest.raises(ConfigError, match="holds no weights; nothing fits"):
        export(tmp_path / "run", tmp_path / "none", ema="averages")


def _sharded(root: Path) -> None:
    model = made("mixtral")
    mesh = device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with CheckpointManager(root / "run") as manager:
        manager.save(1, {"model": model})
        manager.wait()
        export(root / "run", root / "by-ranks", like=root / "stock", coordinator=manager._coordinator)


def test_shards_of_ranks_are_put_together_by_one_process_and_by_all(tmp_path):
    expected = stock(made("mixtral"), tmp_path / "stock")
    run_ranks(_sharded, 2, tmp_path)
    export(tmp_path / "run", tmp_path / "out", like=tmp_path / "stock", shard_bytes=30_000)
    same(weights(tmp_path / "out"), expected)
    same(weights(tmp_path / "by-ranks"), expected)
