"""Trainings of a tiny model that note every sample they see: module level, because ranks are processes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info


@dataclass(frozen=True, kw_only=True)
class DataJob:
    """One training.

    Attributes:
        root: the output directory.
        data: "map", "stream" without a length, or "sized": a stream with one.
        samples: in an epoch.
        batch: samples in a batch, of each rank.
        save_at: steps that are saved.
        resume: a checkpoint, or whether to take the newest.
        arguments: others of the Trainer.
        options: of `enable_trainer`.
        enabled: whether it is called.
    """

    root: str
    data: str = "map"
    samples: int = 24
    batch: int = 4
    save_at: Sequence[int] = ()
    resume: str | bool | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    enabled: bool = True

    def but(self, **changes: Any) -> DataJob:
        return replace(self, **changes)


def sample(index: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.ones(index % 5 + 1), "labels": torch.tensor(index)}


class Numbered(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(index)  # it is iterated over
        return sample(index)


class Augmented(Numbered):
    """Draws for each sample, also in workers."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "input_ids": torch.rand(index % 5 + 1)}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Shuffled when an epoch begins, from the global generators, and shared by the workers."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        order = list(range(self.samples))
        if worker is None:
            random.shuffle(order)
        else:
            order = order[worker.id :: worker.num_workers]
        yield from map(sample, order)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.samples


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    features = [
        torch.nn.functional.pad(each["input_ids"], (0, 8 - len(each["input_ids"]))) for each in samples
    ]
    return {"input_ids": torch.stack(features), "labels": torch.stack([each["labels"] for each in samples])}


class Tiny(nn.Module):
    """Notes the samples that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.seen: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.append(labels.tolist())
        out = nn.functional.dropout(self.layer(input_ids), 0.5, training=self.training)
        return {"loss": (out.squeeze(1) - labels / 10).pow(2).mean(), "logits": out}


def data_trainer(job: DataJob) -> Any:
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_TORCH_DEVICE="cpu")
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    kinds = {"map": Numbered, "augmented": Augmented, "stream": Stream, "sized": SizedStream}
    arguments = {
        "output_dir": job.root,
        "save_strategy": "no",
        "per_device_train_batch_size": job.batch,
        "logging_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
        "num_train_epochs": 3,
        "learning_rate": 1e-2,
        **job.arguments,
    }
    made = Trainer(
        model=Tiny(),
        args=TrainingArguments(**arguments),
        train_dataset=kinds[job.data](job.samples),
        eval_dataset=Numbered(4),
        data_collator=collate,
    )
    if job.enabled:
        import accelerate_ckpt

        made.add_callback(_saving(job.save_at))
        accelerate_ckpt.enable_trainer(made, **{"stock_files": False, **job.options})
    return made


def _saving(steps: Sequence[int]) -> Any:
    from transformers import TrainerCallback

    class Saving(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save |= state.global_step in steps

    return Saving()


def run_data(job: DataJob, made: Any = None) -> dict[str, Any]:
    """Train, and tell what was seen and what came out."""
    made = data_trainer(job) if made is None else made
    model = made.model
    model.seen.clear()
    made.train(resume_from_checkpoint=job.resume)
    if job.enabled:
        import accelerate_ckpt

        accelerate_ckpt.disable_trainer(made)
    return {
        "seen": list(model.seen),
        "weights": {name: value.tolist() for name, value in model.state_dict().items()},
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "losses": {entry["step"]: entry["loss"] for entry in made.state.log_history if "loss" in entry},
        "step": made.state.global_step,
        "epoch": made.state.epoch,
        "total": made.state.max_steps,
        "rate": made.lr_scheduler.get_last_lr(),
    }


def data_in_turn(jobs: list[DataJob]) -> list[dict[str, Any]]:
    """Several runs one after another in the same processes."""
    from tests.adapters.accelerate_jobs import forget_accelerators

    results = []
    for job in jobs:
        results.append(run_data(job))
        forget_accelerators()
    return results
