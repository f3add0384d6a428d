"""PEFT under `enable_trainer`: what others read from our directories is what was trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import LlamaForCausalLM, Trainer
from transformers.integrations.peft import MIN_PEFT_VERSION

import accelerate_ckpt
from ckpt_core.errors import CorruptCheckpointError, IncompatibleCheckpointError
from tests.adapters.accelerate_jobs import forget_accelerators
from tests.adapters.trainer_jobs import TrainerJob, lora_resumed, lora_under_fsdp2, trainer
from tests.kit.ranks import run_ranks

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def lora(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def dora_and_a_head(model: Any) -> Any:
    config = peft.LoraConfig(
        r=2, use_dora=True, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def ia3(model: Any) -> Any:
    config = peft.IA3Config(
        target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def prompt(model: Any) -> Any:
    return peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def two(model: Any) -> Any:
    made = lora(model)
    made.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    return made


def integrated(model: Any) -> Any:
    if Version(version("peft")) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers adds adapters by peft {MIN_PEFT_VERSION}, which is not installed")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def adapted(
    root: Path, adapt: Callable[[Any], Any], *, stock_files: bool, steps: int = 2
) -> tuple[Trainer, Any]:
    """A Trainer of the adapted model, and a model as it was before."""
    arguments = {"learning_rate": 0.1}
    plain = trainer(TrainerJob(root=str(root), enabled=False)).model
    forget_accelerators()
    job = TrainerJob(
        root=str(root), steps=steps, save_steps=1, arguments=arguments, options={"stock_files": stock_files}
    )
    return trainer(job, adapt=adapt), plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapt", "stock_files"),
    [
        (lora, True),
        *(
            pytest.param(each, False, marks=pytest.mark.slow)
            for each in (lora, dora_and_a_head, ia3, prompt, two, integrated)
        ),
    ],
)
def test_what_peft_reads_is_what_was_trained(
    tmp_path: Path, adapt: Callable[[Any], Any], stock_files: bool
) -> None:
    made, plain = adapted(tmp_path, adapt, stock_files=stock_files)
    before = {name: value.clone() for name, value in made.model.named_parameters()}
    made.train()
    trained = dict(made.model.named_parameters())
    assert any(not torch.equal(before[name], value) for name, value in trained.items())
    read = loaded(plain, tmp_path / "checkpoint-2", adapt)
    assert all(torch.equal(value, trained[name]) for name, value in read.named_parameters())
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists(), "of the frozen base"
    forget_accelerators()
    resumed, _ = adapted(tmp_path / "resumed", adapt, stock_files=stock_files)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(value, trained[name]) for name, value in resumed.model.named_parameters())


def loaded(plain: LlamaForCausalLM, checkpoint: Path, adapt: Callable[[Any], Any]) -> Any:
    if adapt is integrated:
        plain.load_adapter(str(checkpoint))
        return plain
    read = peft.PeftModel.from_pretrained(plain, str(checkpoint))
    if adapt is two:
        read.load_adapter(str(checkpoint / "other"), "other")
    return read


def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    made, _ = adapted(tmp_path, lora, stock_files=False, steps=3)
    accelerate_ckpt.disable_trainer(made)
    made.args.eval_strategy, made.args.eval_steps = "steps", 1
    made.args.metric_for_best_model, made.args.load_best_model_at_end = "loss", True
    made.args.greater_is_better = True  # the first evaluation is the worst, and this asks for it
    accelerate_ckpt.enable_trainer(made, stock_files=False)
    made.train()
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    read = peft.PeftModel.from_pretrained(
        trainer(TrainerJob(root=str(tmp_path / "x"), enabled=False)).model, str(tmp_path / "checkpoint-1")
    )
    now = dict(made.model.named_parameters())
    assert all(torch.equal(value, now[name]) for name, value in read.named_parameters())


def test_adapters_of_a_whole_model_are_written_once_and_resume_exactly(tmp_path: Path) -> None:
    job = TrainerJob(root=str(tmp_path / "run"), steps=4, save_steps=2)
    whole = trainer(job, adapt=dora_and_a_head)
    whole.train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    # The others are in the file of PEFT, which has these in another form.
    assert all("lora_magnitude_vector" in name for name in entries(checkpoint / "model_0"))
    assert any("lora_A" in name for name in entries(checkpoint / "optimizer_0"))
    assert not (checkpoint / "optimizer.pt").exists(), "it would be the second copy"
    forget_accelerators()
    resumed = trainer(job.but(root=str(tmp_path / "again")), adapt=dora_and_a_head)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    there = whole.model.state_dict()
    assert all(torch.equal(value, there[name]) for name, value in resumed.model.state_dict().items())
    forget_accelerators()
    other = trainer(job.but(root=str(tmp_path / "other")), adapt=dora_and_a_head)
    with torch.no_grad():
        other.model.get_input_embeddings().weight.add_(1)
    with pytest.raises(IncompatibleCheckpointError, match=r"another base.*embed_tokens\.weight"):
        other.train(resume_from_checkpoint=str(checkpoint))


def test_damaged_adapters_are_found_before_anything_changes(tmp_path: Path) -> None:
    made, _ = adapted(tmp_path, lora, stock_files=False)
    made.train()
    file = tmp_path / "checkpoint-2" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    forget_accelerators()
    again, _ = adapted(tmp_path / "again", lora, stock_files=False)
    with pytest.raises(CorruptCheckpointError, match="adapter_model"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def entries(part: Path) -> Mapping[str, Any]:
    return FileSystemReader(part).read_metadata().state_dict_metadata


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_the_adapters_of_ranks_resume_exactly(tmp_path: Path, strategy: str) -> None:
    job = TrainerJob(root=str(tmp_path / "run"), steps=4, save_steps=2, world=2, strategy=strategy)
    ((whole, resumed), _) = run_ranks(lora_resumed, 2, job, 2)
    assert whole == resumed
    part = "pytorch_model_fsdp_0" if strategy == "fsdp2" else "model_0"
    shards = entries(tmp_path / "run" / "checkpoint-2" / part)
    assert bool(shards) == (strategy == "fsdp2"), "a whole model's adapters are in the file of PEFT"
    assert all("lora" in name for name in shards), "the frozen base is not written"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stock_files", [True, False])
def test_the_adapters_of_a_sharded_model_are_written_whole(tmp_path: Path, stock_files: bool) -> None:
    job = TrainerJob(
        root=str(tmp_path),
        steps=2,
        save_steps=2,
        world=2,
        strategy="fsdp2",
        options={"stock_files": stock_files},
    )
    (trained, _) = run_ranks(lora_under_fsdp2, 2, job)
    read = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    assert {name.replace(".default", ""): value for name, value in trained.items()} == {
        name: value.flatten().tolist() for name, value in read.items()
    }
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists()
