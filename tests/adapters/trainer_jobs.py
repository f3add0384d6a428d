"""Hugging Face Trainer runs for tests: module level, because ranks are spawned processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True)
class TrainerJob:
    """One run of a tiny Llama; an epoch has 6 steps."""

    root: str
    steps: int = 14
    save_steps: int = 3
    resume: str | bool | None = None
    enabled: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    world: int = 1
    strategy: str = "ddp"

    def but(self, **changes: Any) -> TrainerJob:
        return replace(self, **changes)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * 7 + index) % 32
        return {"input_ids": tokens, "labels": tokens}


def trainer(job: TrainerJob, adapt: Callable[[Any], Any] | None = None) -> Any:
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_TORCH_DEVICE="cpu")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    arguments = {
        "output_dir": job.root,
        "max_steps": job.steps,
        "save_steps": job.save_steps,
        "per_device_train_batch_size": 4 // job.world,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        **job.arguments,
    }
    tokens = Tokens()
    model = LlamaForCausalLM(config)
    if job.strategy == "native":
        model = _sharded_at_load_time(model, job)
    made = Trainer(
        model=model if adapt is None else adapt(model),
        args=TrainingArguments(**arguments),
        train_dataset=tokens,
        eval_dataset=torch.utils.data.Subset(tokens, range(4)),
    )
    if job.strategy == "fsdp2":
        _choose_fsdp2(made)
    if job.enabled:
        import accelerate_ckpt

        accelerate_ckpt.enable_trainer(made, **job.options)
    return made


def _sharded_at_load_time(model: Any, job: TrainerJob) -> Any:
    """What transformers shards itself, and the Trainer takes only if it need not save."""
    from transformers.distributed import DistributedConfig

    folder = f"{job.root}-base"
    model.save_pretrained(folder)  # on the first rank alone
    torch.distributed.barrier()
    return type(model).from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=job.world))


def _choose_fsdp2(made: Any) -> None:
    """What the Trainer does for `fsdp=…` on a GPU; on the CPU accelerate never selects it."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    made.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, state_dict_type="SHARDED_STATE_DICT"
    )
    made.accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    made.is_fsdp_enabled = True


def run(job: TrainerJob) -> dict[str, Any]:
    """Train, and tell every loss and the weights at the end."""
    made = trainer(job)
    made.train(resume_from_checkpoint=job.resume)
    losses = {entry["step"]: entry["loss"] for entry in made.state.log_history if "loss" in entry}
    weights = {name: _whole(value) for name, value in made.model.state_dict().items()}
    best = made.state.best_model_checkpoint
    if job.enabled:
        import accelerate_ckpt

        accelerate_ckpt.disable_trainer(made)
    return {"losses": losses, "weights": weights, "best": best, "step": made.state.global_step}


def lora_under_fsdp2(job: TrainerJob) -> dict[str, Any]:
    """Train adapters of a sharded model, and tell what they are."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    made = trainer(job, adapt=lambda model: peft.get_peft_model(model, config))
    made.train(resume_from_checkpoint=job.resume)
    return {name: _whole(value) for name, value in made.model.state_dict().items() if "lora_" in name}


def lora_resumed(job: TrainerJob, at: int) -> list[dict[str, Any]]:
    """Train adapters to the end, and again from a checkpoint."""
    from tests.adapters.accelerate_jobs import forget_accelerators

    whole = lora_under_fsdp2(job)
    forget_accelerators()
    again = job.but(root=f"{job.root}-again", resume=f"{job.root}/checkpoint-{at}")
    return [whole, lora_under_fsdp2(again)]


def _whole(value: torch.Tensor) -> list[float]:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.flatten().tolist()


def in_turn(jobs: list[TrainerJob]) -> list[dict[str, Any]]:
    """Several runs one after another in the same processes."""
    from tests.adapters.accelerate_jobs import forget_accelerators

    results = []
    for job in jobs:
        results.append(run(job))
        forget_accelerators()
    return results
