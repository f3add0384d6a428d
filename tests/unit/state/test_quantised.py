"""Quantised weights and optimizer states of the libraries that people train with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ckpt_core import CheckpointManager, TrainState
from ckpt_core._torch_internals import inner_tensors
from tests.support import low_bit


@pytest.fixture(autouse=True)
def quiet(monkeypatch) -> Iterator[None]:
    """The libraries warn at their import; the optimizers of torchao compile their steps."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with low_bit.importable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 4))


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    batch = torch.randn(3, 128, generator=torch.Generator().manual_seed(number))
    model(batch.to(model[1].bias.dtype)).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(*values: Any) -> list[tuple[str, bytes]]:
    return [
        (name, inner.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for value in values
        for name, inner in inner_tensors(value)
    ]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    kept = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    tensors = [bits(v) if isinstance(v, torch.Tensor) else v for own in kept for _, v in sorted(own.items())]
    return [bits(*model.state_dict().values()), tensors]


def goes_on(root: Path, make: Any) -> Path:
    """Resume with and without state in the optimizer, and train on; return the checkpoint."""
    model, optimizer = make(0)
    step(model, optimizer, 0)
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, TrainState(model=model, optimizer=optimizer))
        saved = everything(model, optimizer)
        step(model, optimizer, 1)
        for has_stepped in (False, True):
            other, its_optimizer = make(1)
            if has_stepped:
                step(other, its_optimizer, 5)
            checkpoints.resume(TrainState(model=other, optimizer=its_optimizer))
            assert everything(other, its_optimizer) == saved
            step(other, its_optimizer, 1)
            assert everything(other, its_optimizer) == everything(model, optimizer)
    return root / "step-000000001"


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_quantised_optimizer_of_torchao_goes_on_bit_for_bit_and_stock_reads_it(tmp_path, name):
    optimizers = pytest.importorskip("torchao.optim")

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = layers(seed)
        return model, getattr(optimizers, name)(model.parameters(), lr=0.01)

    checkpoint = goes_on(tmp_path, make)
    model, optimizer = make(0)
    step(model, optimizer, 0)
    other, its_optimizer = make(2)
    step(other, its_optimizer, 5)
    live = {f"{n}.weight": its_optimizer.state[other[n].weight] for n in (0, 1)}
    dcp.load({"optimizer": {"state": live}}, checkpoint_id=checkpoint)
    for n in (0, 1):
        for key in ("exp_avg", "exp_avg_sq"):
            assert bits(live[f"{n}.weight"][key]) == bits(optimizer.state[model[n].weight][key])


class Member(Enum):
    ONE = 1


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_quantised_weights_of_torchao_are_loaded_bit_for_bit_and_stock_reads_them(tmp_path, kind):
    quantization = pytest.importorskip("torchao.quantization")
    if kind.startswith("Float8") and Member.ONE.__reduce_ex__(2)[0] is getattr:
        pytest.skip("this Python pickles members of enums by getattr, which torch does not unpickle")

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = layers(seed).to(torch.bfloat16)
        quantization.quantize_(model[0], getattr(quantization, kind)())
        return model, torch.optim.AdamW(model[1].parameters())

    checkpoint = goes_on(tmp_path, make)
    model, _ = make(0)
    other, _ = make(2)
    dcp.load({"model": {"0.weight": other[0].weight.detach()}}, checkpoint_id=checkpoint)
    assert bits(other[0].weight) == bits(model[0].weight)


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "PagedAdamW8bit"])
def test_an_8_bit_optimizer_of_bitsandbytes_goes_on_bit_for_bit(tmp_path, name):
    optimizers = pytest.importorskip("bitsandbytes").optim

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = layers(seed)
        return model, getattr(optimizers, name)(model.parameters(), lr=0.01)

    goes_on(tmp_path, make)


@pytest.mark.parametrize("double", [False, True], ids=["once", "twice"])
def test_4_bit_weights_of_bitsandbytes_come_back_with_the_offset_of_their_scales(tmp_path, double):
    modules = pytest.importorskip("bitsandbytes").nn

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        packed = modules.Linear4bit(
            128, 64, compute_dtype=torch.float32, compress_statistics=double, quant_type="nf4"
        )
        model = nn.Sequential(packed, nn.Linear(64, 4)).to("cpu")
        return model, torch.optim.AdamW(model[1].parameters())

    goes_on(tmp_path, make)
