"""A run of the Hugging Face Trainer, to be preempted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import accelerate_ckpt
from tests.reliability.preemption.jobs import Job, digest
from tests.reliability.preemption.signalling import Line


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Six batches per epoch and rank."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * 7 + index) % 32
        return {"input_ids": tokens, "labels": tokens}


class Points(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Tells where the training is."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._batches = 0
        self.began = 0

    def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._batches = 0
        self._line.point(f"step {state.global_step}")

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._line.point("epoch end")

    def on_train_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.began = state.global_step
        self._line.point("start")

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self._line.point(f"evaluation {self._batches}")
        self._batches += 1


def train(job: Job, root: Path, line: Line, *, resume: bool) -> dict[str, Any]:
    """Train on this rank."""
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_TORCH_DEVICE="cpu")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    evaluations: dict[str, Any] = {}
    if job.evaluate_every:
        evaluations = {"eval_strategy": "steps", "eval_steps": job.evaluate_every}
    arguments = TrainingArguments(
        output_dir=str(root), max_steps=job.steps, per_device_train_batch_size=2, logging_steps=1,
        per_device_eval_batch_size=1, gradient_accumulation_steps=job.accumulation, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2, **evaluations,
    )  # fmt: skip
    points = Points(line)
    trainer: Any = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Tokens(),
        eval_dataset=Subset(Tokens(), range(8)),
        # Before ours: a rank waits at a point first, and we look for a preemption then.
        callbacks=[points],
    )
    accelerate_ckpt.enable_trainer(trainer, save=job.policy, deadline_seconds=90)
    ours = accelerate_ckpt.trainer_checkpoints(trainer)
    committed = resume and ours.latest() is not None
    trainer.train(resume_from_checkpoint=True if committed else None)
    preempted = ours.preempted
    history = trainer.state.log_history
    losses = {entry["step"] - 1: entry["loss"] for entry in history if "loss" in entry}
    result = {
        "began": points.began,
        "step": trainer.state.global_step,
        "preempted": preempted,
        "losses": losses,
        "weights": digest(trainer.model.state_dict()),
    }
    accelerate_ckpt.disable_trainer(trainer)
    return result
