"""What `trainer.save_checkpoint` means in each hook: weights and step of the moment, no batch lost."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ckpt import ShardedCheckpoint

# Lightning warns of small data sets and few workers.
pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES, EPOCHS = 6, 3
MOMENTS = (
    *(("on_train_start", 1), ("on_train_batch_start", 1), ("on_train_batch_start", 6)),
    *(("on_train_batch_end", 3), ("on_train_batch_end", 6), ("on_train_epoch_end", 2)),
    *(("on_validation_start", 2), ("on_validation_batch_start", 4), ("on_validation_end", 3)),
    *(("training_step", 1), ("training_step", 8), ("on_before_zero_grad", 3), ("on_before_backward", 6)),
    *(("on_after_backward", 7), ("on_before_optimizer_step", 4)),
)
EXACT = {("on_train_batch_end", 3), ("on_validation_end", 3), ("on_train_epoch_end", 2)}
HOOKS = {hook for hook, _ in MOMENTS} | {"on_train_end", "validation_step"}


class Hooked(pl.LightningModule):
    """Calls `act` in every hook; draws random numbers in every step."""

    def __init__(self, at: dict[tuple[str, int], Any] | None = None) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.at = at or {}
        self.calls = dict.fromkeys(HOOKS, 0)
        self.seen: list[list[float]] = []
        self.validated: list[int] = []
        self.done_at: dict[tuple[str, int], tuple[int, int]] = {}
        self.weights_at: dict[tuple[str, int], torch.Tensor] = {}

    def act(self, hook: str) -> None:
        if hook == "on_train_start":
            self.began_with = self.net.weight.detach().clone()
        if self.trainer.sanity_checking:
            return
        self.calls[hook] += 1
        if (action := self.at.get((hook, self.calls[hook]))) is not None:
            completed = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed
            self.done_at[hook, self.calls[hook]] = completed, len(self.validated)
            self.weights_at[hook, self.calls[hook]] = self.net.weight.detach().clone()
            action(self.trainer)

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen.append(batch[0].flatten().tolist())
        self.act("training_step")
        return (self.net(torch.nn.functional.dropout(batch[0])) - batch[0]).pow(2).mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated.append(self.trainer.global_step)
        self.act("validation_step")
        self.log("val_loss", self.net(batch[0]).mean() + torch.rand(()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


for name in HOOKS - {"training_step", "validation_step"}:
    setattr(Hooked, name, lambda self, *_, hook=name: self.act(hook))


def loader(**options: Any) -> DataLoader[Any]:
    samples = TensorDataset(torch.arange(2.0 * BATCHES).reshape(-1, 1))
    return DataLoader(samples, batch_size=2, **{"shuffle": True, **options})


def ordered() -> DataLoader[Any]:
    """Shuffled by a generator that nothing else draws from."""
    return loader(generator=torch.Generator().manual_seed(5))


def train(
    root: Path,
    module: Hooked,
    data: Any = None,
    *callbacks: Any,
    ckpt_path: Any = None,
    seed: int = 1,
    **options: Any,
) -> Hooked:
    torch.manual_seed(seed)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        callbacks=[*callbacks, ShardedCheckpoint(root / "run", save_last=False)],
        num_sanity_val_steps=0,
        **{"val_check_interval": 2, "max_epochs": EPOCHS, **options},
    )
    validation = loader() if options.get("val_check_interval", 2) else None
    trainer.fit(module, loader() if data is None else data, validation, ckpt_path=ckpt_path)
    return module


def saving(root: Path, *moments: tuple[str, int]) -> dict[tuple[str, int], Any]:
    """Return an action for each moment, which saves under its name."""
    return {each: partial(pl.Trainer.save_checkpoint, filepath=path_of(root, each)) for each in moments}


def path_of(root: Path, moment: tuple[str, int]) -> Path:
    return root / f"{moment[0]}-{moment[1]}"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("data", [loader, ordered], ids=["", "a generator of its own"])
def test_a_save_in_a_hook_has_the_weights_of_the_moment_and_every_batch_that_follows(tmp_path, data):
    """What Lightning has still to do there is made up for as Lightning's own restart does."""
    torch.manual_seed(0)
    full = train(tmp_path / "full", Hooked(saving(tmp_path, *MOMENTS)), data())
    for hook, call in MOMENTS:
        resumed = train(
            tmp_path / f"{hook}{call}", Hooked(), data(), ckpt_path=tmp_path / f"{hook}-{call}", seed=2
        )
        completed, _ = full.done_at[hook, call]
        completed += hook == "on_train_batch_end"
        assert len(resumed.seen) == EPOCHS * BATCHES - completed, (hook, call)
        assert resumed.trainer.global_step == full.trainer.global_step
        assert resumed.began_with.equal(full.weights_at[hook, call]), (hook, call)
        if data is ordered and completed % BATCHES:
            assert resumed.seen == full.seen[completed:], (hook, call)
        if (hook, call) in EXACT:
            assert resumed.seen == full.seen[completed:], (hook, call)
            assert resumed.net.weight.equal(full.net.weight), (hook, call)


@pytest.mark.parametrize(("moment", "begun"), [(("training_step", 9), 8), (("on_train_batch_end", 8), 8)])
def test_what_is_saved_in_or_after_an_exception_trains_on_every_batch(tmp_path, moment, begun):
    def fail(_: Any) -> None:
        raise ZeroDivisionError

    on_exception, failed = OnExceptionCheckpoint(tmp_path / "theirs"), Hooked({moment: fail})
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, failed, None, on_exception)
    failed.trainer.save_checkpoint(tmp_path / "after")
    full = train(tmp_path / "full", Hooked())
    for path in (on_exception.ckpt_path, tmp_path / "after"):
        seen = train(tmp_path, Hooked(), ckpt_path=path, seed=2).seen
        left = BATCHES - begun % BATCHES  # of the epoch, whose order is known
        assert seen[:left] == full.seen[begun : begun + left]
        assert len(seen) == EPOCHS * BATCHES - begun


@pytest.mark.parametrize("given", ["last", None])
@pytest.mark.parametrize("theirs", ["theirs", "run", "memory://theirs"])
def test_beside_a_callback_for_exceptions_a_fit_says_what_it_does_and_no_more(
    tmp_path, caplog, theirs, given
):
    place = theirs if "://" in theirs else tmp_path / theirs
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first = train(tmp_path, Hooked(), None, OnExceptionCheckpoint(place), ckpt_path=given, max_epochs=1)
        again = train(tmp_path, Hooked(), None, OnExceptionCheckpoint(place), ckpt_path="last")
    assert not [each for each in told if "no last checkpoint" in str(each.message)]
    assert [each for each in warnings_of(caplog) if "is kept" in each or "afresh" in each] == [
        f"nothing is committed to {tmp_path / 'run'} yet: starting afresh"
    ] * 2
    assert len(first.seen) == BATCHES
    assert len(again.seen) == EPOCHS * BATCHES


@pytest.mark.parametrize("inside", [True, False])
def test_what_is_saved_when_training_has_ended_goes_on_exactly_with_more_epochs(tmp_path, inside):
    full = train(tmp_path / "full", Hooked())
    module = Hooked(saving(tmp_path, ("on_train_end", 1)))
    train(tmp_path / "short", module, max_epochs=1)
    if not inside:
        module.trainer.save_checkpoint(tmp_path / "after")
    path = tmp_path / ("on_train_end-1" if inside else "after")
    resumed = train(tmp_path / "long", Hooked(), ckpt_path=path, seed=2)

    assert resumed.seen == full.seen[BATCHES:]
    assert resumed.net.weight.equal(full.net.weight)
