"""Provide training data: the bytes of this machine's Python standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from examples.demo.model import SEED, GPTConfig
from examples.demo.plan import Plan

Batch: TypeAlias = tuple[Tensor, Tensor]

BATCH_SIZE = 4
MAX_BYTES = 4 << 20


def standard_library_bytes() -> bytes:
    """Return the sources of the standard library's modules, a few MB in name order."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"\n".join(source.read_bytes() for source in sources)[:MAX_BYTES]


class ByteWindows(Dataset[Batch]):
    """Windows spread evenly over the corpus, each with targets shifted by one byte."""

    def __init__(self, corpus: bytes, num_windows: int) -> None:
        self._corpus = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
        self._length = GPTConfig().context
        self._num_windows = num_windows
        self._stride = (len(corpus) - self._length - 1) // num_windows

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> Batch:
        start = index * self._stride
        window = self._corpus[start : start + self._length + 1].long()
        return window[:-1], window[1:]


def make_dataset(plan: Plan) -> ByteWindows:
    """Return a data set whose epoch has `plan.steps_per_epoch` steps on all ranks."""
    return ByteWindows(standard_library_bytes(), plan.steps_per_epoch * plan.ranks * BATCH_SIZE)


def make_sampler(plan: Plan, *, rank: int, world_size: int) -> StatefulDistributedSampler:
    """Return a sampler that reshuffles in every epoch and shards over the ranks."""
    return StatefulDistributedSampler(make_dataset(plan), num_replicas=world_size, rank=rank, seed=SEED)


def make_loader(sampler: StatefulDistributedSampler) -> StatefulDataLoader[Batch]:
    """Return a loader that saves its position in the epoch."""
    dataset = sampler.dataset
    return StatefulDataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True)
