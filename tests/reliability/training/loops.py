"""Two trainings that save all the time, one per adapter, and that tell at every step what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import accelerate
import lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import accelerate_ckpt
from ckpt_core import CheckpointNotFoundError, EverySteps, KeepLatest
from ckpt_core.commit import Catalog
from ckpt_core.state import model_state, optimizer_state
from ckpt_core.storage import LocalStorage
from ckpt_core.telemetry import Event
from lightning_ckpt import ShardedCheckpoint
from tests.reliability.forks import Tell
from tests.reliability.training.sweeps import EVERY, KEPT

WIDTH, BATCH = 8, 4
STEPS_PER_EPOCH = 16
"""No multiple of `EVERY`, so that saves fall on every place of an epoch."""
_DEADLINE_SECONDS = 5.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """What a training process knows before it starts.

    Attributes:
        root: the checkpoints; the process goes on from the newest.
        steps: the step after which the training is complete.
        rank: of this process, from 0.
        world: processes of the job.
    """

    root: Path
    steps: int
    rank: int
    world: int


@final
class Witness:
    """Tells what a training process knows to one that outlives it; also a sink of telemetry."""

    def __init__(self, life: Life, tell: Tell) -> None:
        self._root = life.root
        self._rank = life.rank
        self._tell = tell

    def tell(self, **facts: Any) -> None:
        """Tell one line, whole."""
        self._tell({"rank": self._rank, **facts})

    def began(self, step: int, state: str) -> None:
        """Training is about to go on from `step`."""
        # What a predecessor left is removed when the root is taken: by a load, else by the first save.
        self.tell(began=step, state=state, torn=self._torn() if step else [])

    def stepped(self, step: int, state: str, loss: float) -> None:
        """An optimizer step was made."""
        self.tell(step=step, state=state, loss=loss)

    def emit(self, event: Event) -> None:
        """Take an event: a commit acknowledges its step."""
        if event.name == "save.commit" and event.phase == "finished":
            torn = self._torn() if self._rank == 0 else []
            self.tell(committed=event.attributes["step"], torn=torn)

    def _torn(self) -> list[str]:
        return Catalog(LocalStorage(self._root)).torn()


class Numbers(Dataset[torch.Tensor]):
    """Samples that are all different."""

    def __init__(self, world: int) -> None:
        self._count = STEPS_PER_EPOCH * BATCH * world

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index + 1))


def network() -> nn.Sequential:
    """With dropout, so that a resume that loses random numbers shows at once."""
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 1))


def digest(model: nn.Module, optimizer: Any) -> str:
    """Of every weight, buffer and moment, bit for bit."""
    content = hashlib.sha256()
    _mix(content, model_state(model))
    _mix(content, optimizer_state(model, optimizer)["state"])
    return content.hexdigest()[:16]


def _mix(content: Any, tree: Mapping[str, Any]) -> None:
    for name in sorted(tree):
        value = tree[name]
        content.update(name.encode())
        if isinstance(value, Mapping):
            _mix(content, value)
        else:
            content.update(torch.as_tensor(value).detach().numpy().tobytes())


class Module(pl.LightningModule):
    """The network as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """One loss."""
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        """An optimizer with state, and a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@final
class _Telling(pl.Callback):
    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._begun = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begun = True
        self._witness.began(trainer.global_step, _digest_of(trainer, pl_module))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._begun:  # it was complete already
            self.on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        step, state = trainer.global_step, _digest_of(trainer, pl_module)
        self._witness.stepped(step, state, outputs["loss"].item())


def _digest_of(trainer: pl.Trainer, module: pl.LightningModule) -> str:
    return digest(module, trainer.optimizers[0])


def with_lightning(life: Life, witness: Witness) -> None:
    """A Trainer with `ShardedCheckpoint`, on one device or with DDP."""
    torch.manual_seed(7)
    module = Module()
    torch.manual_seed(70 + life.rank)
    checkpoint = ShardedCheckpoint(
        life.root,
        save=EverySteps(EVERY),
        keep=KeepLatest(KEPT),
        deadline_seconds=_DEADLINE_SECONDS,
        sinks=[witness],
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=life.world,
        strategy="ddp" if life.world > 1 else "auto",
        max_steps=life.steps,
        # The last to be called, so that it sees what the checkpoint has put back.
        callbacks=[checkpoint, _Telling(witness)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=life.root.parent,
    )
    data = Numbers(life.world)
    sampler = StatefulDistributedSampler(data, num_replicas=life.world, rank=life.rank, shuffle=True, seed=3)
    trainer.fit(module, StatefulDataLoader(data, batch_size=BATCH, sampler=sampler), ckpt_path="last")


def with_accelerate(life: Life, witness: Witness) -> None:
    """A loop under `enable`, on one process or several."""
    accelerator = accelerate.Accelerator(
        cpu=True,
        dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=True),
    )
    accelerate_ckpt.enable(
        accelerator,
        life.root,
        save=EverySteps(EVERY),
        keep=KeepLatest(KEPT),
        sinks=[witness],
        deadline_seconds=_DEADLINE_SECONDS,
    )
    torch.manual_seed(7)
    model = network()
    torch.manual_seed(70 + life.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.9)
    batches = DataLoader(Numbers(life.world), batch_size=BATCH, shuffle=True)
    parts = accelerator.prepare(model, optimizer, schedule, batches)
    try:
        accelerator.load_state()
    except CheckpointNotFoundError:
        accelerator.print("nothing is committed yet")
    witness.began(accelerate_ckpt.checkpoints(accelerator).step, digest(*parts[:2]))
    _steps(accelerator, parts, life.steps, witness.stepped)
    accelerator.end_training()


def _steps(
    accelerator: Any, parts: tuple[Any, ...], steps: int, stepped: Callable[[int, str, float], None]
) -> None:
    model, optimizer, schedule, batches = parts
    done = accelerate_ckpt.checkpoints(accelerator).step
    while done < steps:
        epoch, within = divmod(done, STEPS_PER_EPOCH)
        batches.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(batches, within) if within else batches:
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            stepped(done, digest(model, optimizer), loss.item())
            accelerator.save_state()
            if done >= steps:
                break
