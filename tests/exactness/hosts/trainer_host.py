"""The Hugging Face Trainer with `enable_trainer`."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

import accelerate_ckpt
from ckpt_core import AtSteps
from tests.adapters.trainer_jobs import _choose_fsdp2
from tests.exactness.cells import EPOCHS, SAMPLES, Place
from tests.exactness.hosts.accelerate_host import choose_mesh, parallelized
from tests.exactness.training import DEADLINE_SECONDS, Job, Net, Observed, Recorder, dataset_of, schedule


def train(job: Job) -> Observed:
    """Train as a script with a Trainer does."""
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_TORCH_DEVICE="cpu")
    from transformers import PrinterCallback, Trainer

    recorder = Recorder(job)
    net = _Recorded(job, recorder)
    trainer = Trainer(
        model=net,
        args=_arguments(job),
        train_dataset=dataset_of(job.cell),
        callbacks=[_watch(job, recorder)],
    )
    trainer.remove_callback(PrinterCallback)
    _choose(trainer, job.place)
    trainer.optimizer = optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    net.optimizer = [optimizer]
    if job.role != "stock":
        step = _step_of_save(job)
        in_loop = job.saves and job.cell.point != "edge"
        save = {"save": AtSteps([step])} if in_loop else {}
        accelerate_ckpt.enable_trainer(trainer, deadline_seconds=DEADLINE_SECONDS, **save)
    if job.role == "resumed":
        # Other numbers follow, of the same seed: from that the Trainer takes the order of the data.
        torch.rand(3), np.random.rand(3), random.random()
    trainer.train(resume_from_checkpoint=True if job.role == "resumed" else None)
    observed = recorder.ends(trainer.model_wrapped, trainer.optimizer.optimizer, trainer.lr_scheduler)
    if job.role != "stock":
        accelerate_ckpt.disable_trainer(trainer)
    return observed


def _choose(trainer: Any, place: Place) -> None:
    """What the Trainer and Accelerate do for their options on a GPU; on the CPU they never select it."""
    if place.strategy in {"fsdp1", "fsdp2", "hsdp"}:
        _choose_fsdp2(trainer)
    if place.strategy == "fsdp1":
        from accelerate.utils import FullyShardedDataParallelPlugin

        trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1,
            state_dict_type="SHARDED_STATE_DICT",
            use_orig_params=True,
            sync_module_states=False,
        )
    choose_mesh(trainer.accelerator, place)
    parallelized(trainer.model, trainer.accelerator)


class _Recorded(Net):
    """The model, which sees what the Trainer feeds it."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        super().__init__(job.cell, seed=job.seed)
        self.recorder, self.optimizer = recorder, []

    def forward(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = super().forward(x)
        assert ids is not None
        self.recorder.saw(ids, out["loss"], self.optimizer[0].param_groups[0]["lr"])
        return out


def _watch(job: Job, recorder: Recorder) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            recorder.begins_batch(parts["model"], parts["optimizer"].optimizer)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if job.saves and job.cell.point != "edge" and state.global_step == _step_of_save(job):
                recorder.saved()

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if job.saves and job.cell.point == "edge" and state.global_step == _step_of_save(job):
                control.should_save = True
                recorder.saved()

    return Watch()


def _step_of_save(job: Job) -> int:
    epoch, batches = job.cell.saves_after
    return (epoch * job.cell.batches + batches) // job.cell.accumulation


def _arguments(job: Job) -> Any:
    from transformers import TrainingArguments

    cell, place = job.cell, job.place
    length: dict[str, Any] = {"num_train_epochs": EPOCHS}
    if cell.data == "stream":
        # The Trainer must know how many steps a stream has.
        epoch = -(-SAMPLES // (place.replicas * place.batch))
        length = {"max_steps": EPOCHS * -(-epoch // cell.accumulation)}
    return TrainingArguments(
        output_dir=job.root,
        per_device_train_batch_size=place.batch,
        gradient_accumulation_steps=cell.accumulation,
        dataloader_num_workers=0 if cell.workers == "0" else 2,
        dataloader_persistent_workers=cell.workers == "persistent",
        train_sampling_strategy="random" if cell.shuffle else "sequential",
        bf16=cell.precision == "bf16",
        # The Trainer's order of the data comes from it, so that another one is another training.
        seed=7,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        **length,
    )
