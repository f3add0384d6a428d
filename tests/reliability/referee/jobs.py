"""Trainings as users write them, one per host.

Run once or many times, each ends with the same weights in `final.bin` of its folder, and prints the step it
began from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS, EVERY, BATCH, WIDTH = 12, 4, 4, 8


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> Any:
        return torch.full((WIDTH,), (index % 7) / 7.0)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))


def write_result(folder: Path, model: nn.Module) -> None:
    content = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
    (folder / "final.bin").write_bytes(content)


def began(step: int) -> None:
    print(f"resumed from step {step}", flush=True)


def plain(folder: Path) -> None:
    from ckpt_core import CheckpointManager, EverySteps, TrainState

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = TrainState(model=model, optimizer=optimizer)
    samples = Samples()
    with CheckpointManager(folder / "run", save=EverySteps(EVERY)) as checkpoints:
        start = checkpoints.resume(state) or 0
        began(start)
        for step in range(start + 1, STEPS + 1):
            batch = torch.stack([samples[step * BATCH + i] for i in range(BATCH)])
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.maybe_save(step, state)
    write_result(folder, model)


def lightning(folder: Path) -> None:
    import lightning as pl
    from torchdata.stateful_dataloader import StatefulDataLoader

    from ckpt_core import EverySteps
    from lightning_ckpt import ShardedCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def on_train_start(self) -> None:
            began(self.global_step)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.model(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ShardedCheckpoint(folder / "run", save=EverySteps(EVERY))],
    )
    trainer.fit(module, StatefulDataLoader(Samples(), batch_size=BATCH), ckpt_path="last")
    write_result(folder, module)


def accelerate(folder: Path) -> None:
    from accelerate import Accelerator

    import accelerate_ckpt
    from ckpt_core import EverySteps

    accelerator = accelerate_ckpt.enable(Accelerator(cpu=True), folder / "run", save=EverySteps(EVERY))
    bare = make_model()
    model, optimizer, data = accelerator.prepare(
        bare, torch.optim.AdamW(bare.parameters(), lr=0.01), DataLoader(Samples(), batch_size=BATCH)
    )
    accelerator.load_state()
    done = accelerate_ckpt.checkpoints(accelerator).step
    began(done)
    for batch in accelerator.skip_first_batches(data, done) if done < STEPS else ():
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
    accelerator.end_training()
    write_result(folder, bare)


def trainer(folder: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import accelerate_ckpt

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.model(inputs).pow(2).mean()}

    class Tells(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            began(state.global_step)

    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        save_steps=EVERY,
        save_strategy="steps",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    model = Model()
    host = Trainer(
        model=model,
        args=arguments,
        train_dataset=Samples(),
        data_collator=lambda rows: {"inputs": torch.stack(rows)},
        callbacks=[Tells()],
    )
    accelerate_ckpt.enable_trainer(host)
    host.train(resume_from_checkpoint=True)
    write_result(folder, model)


JOBS: dict[str, Callable[[Path], None]] = {
    "plain": plain,
    "lightning": lightning,
    "accelerate": accelerate,
    "trainer": trainer,
}
