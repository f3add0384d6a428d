"""Jobs whose ranks hold different values under the same names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_core import CheckpointManager, CheckpointOptions, TrainState
from ckpt_core.errors import CheckpointError, ConfigError, DivergenceError, SaveError
from ckpt_core.saving._reports import SAMPLED
from ckpt_core.state import Counters

WIDE = 3 * SAMPLED
"""Parameters of the model: more than a later save compares."""


class Net(nn.Module):
    """Equal on all ranks, unless something is done to it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.many = nn.ParameterList(torch.randn(3, 2) for _ in range(WIDE))
        self.long = nn.Parameter(torch.randn(5000))
        self.turned = nn.Parameter(torch.randn(60, 70).t())
        self.none = nn.Parameter(torch.empty(0, 3))
        self.odd = nn.Parameter(torch.full((3,), float("nan")))
        self.norm = nn.BatchNorm1d(4)


def rank() -> int:
    return dist.get_rank()


def state_of(model: nn.Module, **items: Any) -> TrainState:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer, **items)


def manager(root: Path, **options: Any) -> CheckpointManager:
    """Failed saves are asked of their handles, and do not come up again later."""
    options = {"deadline_seconds": 60, "on_error": "warn", **options}
    return CheckpointManager(root, options=CheckpointOptions(**options))


def refusal(root: Path, state: Any, *, step: int = 1) -> CheckpointError:
    """Why the save fails, and that it leaves no checkpoint."""
    try:
        with manager(root, on_error="raise") as checkpoints:
            checkpoints.save(step, state)
    except (SaveError, ConfigError) as error:
        with manager(root) as checkpoints:
            assert not list(checkpoints.checkpoints())
        return error
    raise AssertionError("it was saved")


def differing(root: Path, state: Any) -> Mapping[str, Any]:
    error = refusal(root, state)
    assert isinstance(error, DivergenceError)
    assert all(name in str(error) for name in list(error.differing)[:3])
    return error.differing


def one_bit(root: Path) -> None:
    """The smallest difference in the last byte of one of many tensors."""
    net = Net()
    state = state_of(net)
    with torch.no_grad():
        net.many[17].view(torch.int32).view(-1)[-1] += rank()
    assert differing(root, state) == {"model.many.17": [1]}


def transposed(root: Path) -> None:
    """A tensor whose elements do not lie one after another, and one that is longer than a sample."""
    net = Net()
    state = state_of(net)
    with torch.no_grad():
        net.turned[3, 5] += rank()
        net.long[4321] += rank()
    assert differing(root, state).keys() == {"model.turned", "model.long"}


def only_the_optimizer(root: Path) -> None:
    net = Net()
    state = state_of(net)
    state.optimizers[0].state[net.long]["exp_avg"][7] += rank()
    assert differing(root, state) == {"optimizer.state.long.exp_avg": [1]}


def learning_rates(root: Path) -> None:
    state = state_of(Net())
    state.optimizers[0].param_groups[0]["lr"] *= 1 + rank()
    assert differing(root, state) == {"optimizer.param_groups.0.lr": [1]}


def counters(root: Path) -> None:
    state = state_of(Net(), progress=Counters(step=3, seen=10 + rank()), epochs=Counters(n=1))
    assert differing(root, state) == {"progress": [1]}


def schedulers(root: Path) -> None:
    net = nn.Linear(2, 2)
    torch.nn.init.ones_(net.weight)
    torch.nn.init.ones_(net.bias)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    scheduler.last_epoch += rank()
    found = differing(root, TrainState(model=net, optimizer=optimizer, scheduler=scheduler))
    assert found == {"scheduler": [1]}


def mapping(root: Path) -> None:
    tree = {"weights": {"w": torch.ones(4) * (1 + rank())}, "step": 3}
    assert differing(root, tree) == {"weights.w": [1]}


def meshes_apart(root: Path) -> None:
    """The stages of a pipeline, each sharded over ranks of its own, under the same names."""
    mesh = DeviceMesh("cpu", [rank()]) if rank() else DeviceMesh("cpu", [0])
    tensors = {"w": distribute_tensor(torch.ones(4) * (1 + rank()), mesh, [Shard(0)], src_data_rank=None)}
    assert differing(root, {"model": tensors}) == {"model.w": [1]}


def replicated(root: Path) -> None:
    """A DTensor that says to be replicated, and is not."""
    mesh = DeviceMesh("cpu", [0, 1])
    value = DTensor.from_local(torch.ones(3) * rank(), mesh, [Replicate()], run_check=False)
    assert differing(root, {"model": {"w": value}}) == {"model.w": [1]}


def two_kinds(root: Path) -> None:
    """Plain on one rank, a DTensor on the other; the values are the same, and yet it is no one tensor."""
    value: torch.Tensor = torch.ones(4)
    mesh = DeviceMesh("cpu", [0])
    if rank() == 0:
        value = distribute_tensor(value, mesh, [Replicate()], src_data_rank=None)
    error = refusal(root, {"model": {"w": value}})
    assert "model.w cannot be the same tensor" in str(error)
    assert "stage1" in str(error)


def meshes_that_overlap(root: Path) -> None:
    """Rank 1 takes for its own what rank 0 takes for a part of something larger."""
    both, alone = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1])
    mesh = both if rank() == 0 else alone
    value = DTensor.from_local(torch.ones(4), mesh, [Replicate()], run_check=False)
    assert "cannot be the same tensor" in str(refusal(root, {"model": {"w": value}}))


def equal_meshes_apart(root: Path) -> None:
    """Copies on meshes without a common rank are one tensor if they are shown to be."""
    mesh = DeviceMesh("cpu", [rank()]) if rank() else DeviceMesh("cpu", [0])
    value = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
    with manager(root) as checkpoints:
        checkpoints.save(1, {"model": {"w": value}}).result()


def buffers(root: Path) -> None:
    """Statistics of batches may differ: every rank gets back its own."""
    net = Net()
    net.norm.running_mean += rank()
    with manager(root) as checkpoints:
        checkpoints.save(1, state_of(net)).result()
        again = Net(1)
        assert checkpoints.resume(state_of(again)) == 1
    assert torch.equal(again.norm.running_mean, net.norm.running_mean)


def later(root: Path) -> None:
    """Replicas that part after the first save: found in one of the next, and saved again once mended."""
    net = Net()
    state = state_of(net)
    with manager(root) as checkpoints:
        checkpoints.save(1, state).result()
        equal = net.many[WIDE - 1].detach().clone()
        with torch.no_grad():
            net.many[WIDE - 1] += rank()
        saved = until_refused(checkpoints, state)
        # Of the parameters with their two moments and counts, a few are looked at in each save.
        assert saved <= 4 * len(list(net.parameters())) // SAMPLED + 2
        with torch.no_grad():
            net.many[WIDE - 1].copy_(equal)
        assert checkpoints.save(100, state).result().step == 100


def until_refused(checkpoints: CheckpointManager, state: TrainState) -> int:
    for step in range(2, 60):
        found = refused_at(checkpoints, step, state)
        if found:
            assert found.keys() == {f"model.many.{WIDE - 1}"}
            return step
    raise AssertionError("nobody noticed")


def refused_at(checkpoints: CheckpointManager, step: int, state: TrainState) -> Mapping[str, Any]:
    try:
        checkpoints.save(step, state).result()
    except DivergenceError as error:
        return error.differing
    return {}


def still_refused(root: Path) -> None:
    """What was refused once is refused for as long as it differs, wherever the difference is."""
    net = Net()
    state = state_of(net)
    with torch.no_grad():
        net.many[20] += rank()
    with manager(root) as checkpoints:
        for step in range(1, 5):
            assert refused_at(checkpoints, step, state) == {"model.many.20": [1]}
        assert not list(checkpoints.checkpoints())


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def warned(root: Path) -> None:
    """With `warn` the lowest rank's values are saved, all of them, and that is said once."""
    heard = Heard()
    logging.getLogger("ckpt_core").addHandler(heard)
    net = Net(seed=rank())
    expected = [value.detach().clone() for value in Net(seed=0).parameters()]
    state = TrainState(model=net, tally=Counters(n=rank()))
    with manager(root, on_divergence="warn") as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state).result()
        again = TrainState(model=Net(5), tally=Counters(n=7))
        assert checkpoints.resume(again) == 3
    lines = [line for line in heard.lines if "under the same name" in line]
    assert len(lines) == (1 if rank() == 0 else 0), heard.lines
    for value, other in zip(again.model.parameters(), expected, strict=True):
        assert torch.equal(value, other) or value.isnan().all()
    assert again._items["tally"].n == 0


def kept(root: Path) -> None:
    """With `keep-each` every rank has back what it had: sharded, replicated, plain, small."""
    mesh = DeviceMesh("cpu", [0, 1])
    local = torch.arange(6.0).reshape(2, 3) * (1 + rank())
    net = Net(seed=rank())
    net.drawn = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
    net.cut = nn.Parameter(distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]))
    state = state_of(net, tally=Counters(n=rank()))
    state.optimizers[0].param_groups[0]["lr"] = 0.1 * (1 + rank())
    with manager(root, on_divergence="keep-each") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state).result()
        assert not checkpoints.verify()
        twin = Net(seed=9)
        twin.drawn = nn.Parameter(DTensor.from_local(local * 0, mesh, [Replicate()], run_check=False))
        twin.cut = nn.Parameter(distribute_tensor(torch.zeros(8), mesh, [Shard(0)]))
        again = state_of(twin, tally=Counters(n=7))
        assert checkpoints.resume(again) == 2
    for (name, value), other in zip(again.model.named_parameters(), net.parameters(), strict=True):
        one, two = local_of(value), local_of(other)
        assert torch.equal(one.nan_to_num(), two.nan_to_num()), name
    first, second = (each.optimizers[0] for each in (state, again))
    assert second.param_groups[0]["lr"] == 0.1 * (1 + rank())
    assert torch.equal(first.state[net.long]["exp_avg"], second.state[twin.long]["exp_avg"])
    assert again._items["tally"].n == rank()


def asked_differently(root: Path) -> None:
    """Ranks that ask for different checkpoints, or one of them wrongly, are all refused at once."""
    state, mine = state_of(Net()), rank() == 1
    wrong: Any = "2" if mine else 2
    with manager(root) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
        checkpoints.wait()
        for call in (
            lambda: checkpoints.load(state, step=1 + rank()),
            lambda: checkpoints.load(state, step=2 if mine else None),
            lambda: checkpoints.load(state, step=wrong),
            lambda: checkpoints.load(state, name="../other" if mine else "step-000000001"),
            lambda: checkpoints.load(state, step=1, items="model" if mine else ["model"]),
            lambda: checkpoints.load(5 if mine else state, step=1),
            lambda: checkpoints.continue_from(1 + rank()),
            lambda: checkpoints.mark(1 + rank(), "diverged"),
            lambda: checkpoints.mark(2, "" if mine else "diverged"),
            lambda: checkpoints.unmark(wrong),
            lambda: checkpoints.pin(wrong, "kept"),
            lambda: checkpoints.unpin(wrong),
        ):
            with pytest.raises(ConfigError, match="rank 1: "):
                call()
        assert checkpoints.load(state).step == 2
        assert all(info.bad is None and info.pinned is None for info in checkpoints.checkpoints())


def local_of(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


Job = Callable[[Path], None]
JOBS: tuple[Job, ...] = (
    one_bit,
    transposed,
    only_the_optimizer,
    learning_rates,
    counters,
    schedulers,
    mapping,
    meshes_apart,
    replicated,
    two_kinds,
    meshes_that_overlap,
    equal_meshes_apart,
    buffers,
    later,
    still_refused,
    warned,
    kept,
    asked_differently,
)


def run_all(root: str) -> None:
    for job in JOBS:
        place = Path(root) / job.__name__
        if rank() == 0:
            place.mkdir()
        dist.barrier()
        try:
            job(place)
        except BaseException as error:
            error.add_note(f"in {job.__name__}")
            raise
