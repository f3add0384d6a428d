"""Loops over data under Accelerate: what each step saw, for spawned ranks as for one process."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import accelerate
import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader.sampler import RandomSampler as DrawnEarly

import accelerate_ckpt
from tests.adapters.accelerate_jobs import _without_goodbye, forget_accelerators

SAMPLES = 26
STREAMED = 24  # as long with two workers as with one
EPOCHS = 2


class Items(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, samples: int = SAMPLES, draws: Callable[[], float] | None = None) -> None:
        self.samples, self.draws = samples, draws

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)] if self.draws is None else [index, self.draws()])


def of_torch() -> float:
    return torch.rand(()).item()


def of_all() -> float:
    return random.random() + np.random.rand() + of_torch()


def collated(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(())


class Stream(IterableDataset[torch.Tensor]):
    """Of another order in every epoch, if it has a generator."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        if generator is not None:
            self.generator = generator

    def __len__(self) -> int:
        return STREAMED

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, of = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        generator = getattr(self, "generator", None)
        order = (
            range(STREAMED) if generator is None else torch.randperm(STREAMED, generator=generator).tolist()
        )
        return iter([torch.tensor([float(index)]) for index in order[first::of]])


class DrawingStream(Stream):
    """Draws for each sample."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([index, of_all()]) for index in range(STREAMED))


class Unsized(IterableDataset[torch.Tensor]):
    """Shuffled when an epoch begins, from a global generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(STREAMED).tolist():
            yield torch.tensor([float(index)])


class ByEpoch(Sampler[int]):
    """Orders by the epoch that it was told, as samplers of the user's do."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(SAMPLES, generator=generator).tolist())


class NumpyOrder(Sampler[int]):
    """Orders by the global generator of another library."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SAMPLES).tolist())


class Blocks(BatchSampler):
    """Batches of neighbours in random order, as bucketing does."""

    def __init__(self) -> None:
        self.batch_size = 2
        self.drop_last = False

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[list[int]]:
        for block in torch.randperm(SAMPLES // 2).tolist():
            yield [2 * block, 2 * block + 1]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A loop over data, and how it resumes."""

    root: str = ""
    kind: str = "default"
    batch: int = 4
    samples: int = SAMPLES
    workers: int = 0
    persistent: bool = False
    stateful: bool = False
    seedable: bool = False
    dispatch: bool | None = None
    split: bool = False
    drop_last: bool = False
    even: bool = True
    evaluate: bool = False  # at the end of every epoch
    evaluate_first: bool = False  # after a load
    by_function: bool = False
    skip: bool = True
    skips: int | None = None
    save_behind: bool = False  # the loop over an epoch
    leave_after: int | None = None
    same_seed: bool = False
    save_at: tuple[int, ...] = ()
    load: str | None = None
    enabled: bool = True
    steps: int = 100
    accumulation: int = 1
    draws: Callable[[], float] | None = None
    collate: Callable[[Any], Any] | None = None

    def but(self, **changes: Any) -> Run:
        return replace(self, **changes)


def _accelerator(run: Run) -> Any:
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_TORCH_DEVICE="cpu")
    from accelerate.utils import DataLoaderConfiguration

    return accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=run.accumulation,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=run.seedable,
            use_stateful_dataloader=run.stateful,
            dispatch_batches=run.dispatch,
            split_batches=run.split,
            even_batches=run.even,
        ),
    )


def _loader(run: Run) -> DataLoader[Any]:
    options: dict[str, Any] = {
        "num_workers": run.workers,
        "persistent_workers": run.persistent,
        "multiprocessing_context": "fork" if run.workers else None,
        "collate_fn": run.collate,
    }
    if run.kind == "blocks":
        return DataLoader(Items(draws=run.draws), batch_sampler=Blocks(), **options)
    options |= {"batch_size": run.batch, "drop_last": run.drop_last}
    streams = {"unsized_stream": Unsized, "drawing_stream": DrawingStream}
    if run.kind in streams:
        return DataLoader(streams[run.kind](), **options)
    if run.kind in {"stream", "shuffled_stream"}:
        generator = torch.Generator().manual_seed(5) if run.kind == "shuffled_stream" else None
        return DataLoader(Stream(generator), **options)
    if run.kind in {"default", "in_order"}:
        return DataLoader(Items(run.samples, run.draws), shuffle=run.kind == "default", **options)
    if run.kind == "generator":
        return DataLoader(Items(), shuffle=True, generator=torch.Generator().manual_seed(3), **options)
    samplers = {
        "by_epoch": ByEpoch,
        "numpy": NumpyOrder,
        "replacement": lambda: RandomSampler(Items(), replacement=True),
        "drawn_early": lambda: DrawnEarly(Items()),
    }
    return DataLoader(Items(draws=run.draws), sampler=samplers[run.kind](), **options)


def prepared(run: Run) -> tuple[Any, ...]:
    """An accelerator, and what it has prepared."""
    made = _accelerator(run)
    accelerate.utils.set_seed(1 if run.same_seed else 1 + made.process_index)
    if run.enabled:
        accelerate_ckpt.enable(made, run.root)
    net = nn.Linear(1 if run.draws is None else 2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return made, *made.prepare(
        net, optimizer, schedule, _loader(run), DataLoader(Items(draws=run.draws and float), batch_size=12)
    )


def loop(run: Run) -> dict[str, Any]:
    """Train as users' scripts do; tell epoch, samples, random number and learning rate of every step."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    made, *rest = prepared(run)
    if run.load is not None:
        made.load_state(run.load)
    trace = list(_steps(run, made, tuple(rest)))
    made.end_training()
    return {
        "trace": trace,
        "weights": [value.item() for part in rest[0].parameters() for value in part.flatten()],
    }


def _evaluate(net: nn.Module, held_out: Any) -> float:
    net.eval()
    with torch.no_grad():
        total = sum(net(batch).sum().item() for batch in held_out)
    net.train()
    return total


def _steps(run: Run, made: Any, prepared: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    net, optimizer, schedule, train, held_out = prepared
    done = 0 if run.load is None else int(run.load.rpartition("_")[2])
    length = len(train) if run.leave_after is None else run.leave_after
    first, within = divmod(done, length)
    skips = run.skip and not (run.stateful and run.skips is None)
    if done and not within and skips and run.skips is None:
        first, within = first - 1, length  # as scripts that count batches do at the edge of an epoch
    if run.load is not None and run.evaluate_first:
        _evaluate(net, held_out)
    for epoch in range(first, EPOCHS):
        active, behind = train, 0
        if epoch == first and within and skips:
            skip = accelerate.skip_first_batches if run.by_function else made.skip_first_batches
            active, behind = skip(train, within if run.skips is None else run.skips), within
        for index, batch in enumerate(active, start=behind):
            if index == run.leave_after:
                break
            with made.accumulate(net):
                made.backward(net(batch).mean() + torch.rand(()))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            done += 1
            yield done, epoch, batch.flatten().tolist(), torch.rand(()).item(), schedule.get_last_lr()[0]
            if done in run.save_at and not run.save_behind:
                made.save_state(f"{run.root}/checkpoint_{done}")
            if done >= run.steps:
                return
        if done in run.save_at and run.save_behind:
            made.save_state(f"{run.root}/checkpoint_{done}")
        if run.evaluate:
            _evaluate(net, held_out)


def loops(runs: list[Run]) -> list[dict[str, Any]]:
    """Several loops one after another in the same processes, each with an accelerator of its own."""
    results = []
    for run in runs:
        results.append(_without_goodbye(lambda run=run: loop(run)))
        forget_accelerators()
    return results
