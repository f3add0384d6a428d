"""Jobs whose ranks hold different parts of one training: stages of a pipeline, experts, a critic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.state import Counters, model_state, optimizer_state

WIDTH = 6


class Layers(nn.Module):
    """Some layers of a model of several, under the names that they have in the whole."""

    def __init__(self, numbers: Iterable[int], *, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(100 * seed + number)
            self.layers[str(number)] = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            hidden = torch.tanh(layer(hidden))
        return hidden


Make = Callable[[int], TrainState]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, which every rank numbers from 0."""
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 0.02}], lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def state_of(model: Any, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam) -> TrainState:
    whole = model if isinstance(model, nn.Module) else nn.ModuleDict(model)
    made = optimizer(whole)
    return TrainState(model=model, optimizer=made, scheduler=torch.optim.lr_scheduler.StepLR(made, 2))


def train(state: TrainState, steps: int = 1) -> None:
    """Steps of which every parameter's result depends on its own value alone, whoever holds it."""
    for _ in range(steps):
        for parameter in state.model.parameters():
            parameter.grad = torch.sin(3 * parameter.detach()) + 0.1
        for optimizer in state.optimizers:
            optimizer.step()


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    return value.clone() if isinstance(value, torch.Tensor) else value


def contents(state: TrainState) -> dict[str, Any]:
    """Every parameter, and the optimizers' state and hyperparameters of it, by name."""
    found = {name: whole(value.detach()) for name, value in model_state(state.model).items()}
    for number, optimizer in enumerate(state.optimizers):
        packed = optimizer_state(state.model, optimizer)
        for name, values in packed["state"].items():
            found |= {f"{number}:{name}.{key}": whole(value) for key, value in values.items()}
        for group in packed["param_groups"]:
            found |= {f"{number}:{name}.lr": group["lr"] for name in group["params"]}
    return found


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


def survives(root: Path, make: Make) -> None:
    """What was saved here is resumed here bit for bit, and so are the steps after it."""
    state = make(0)
    train(state, 2)
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        checkpoints.save(2, state).result()
        assert not checkpoints.verify()
    train(state)
    again = make(1)
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        assert checkpoints.resume(again) == 2
    train(again)
    assert_same(contents(again), contents(state))


def own(numbers: Mapping[int, Iterable[int]], **options: Any) -> Make:
    """Every rank has the layers of its own."""
    return lambda seed: state_of(Layers(numbers[dist.get_rank()], seed=seed), **options)


CUT = {0: [0], 1: [1, 2]}
OTHER_CUT = {0: [0, 1], 1: [2]}


def stages(root: Path) -> None:
    survives(root / "adam", own(CUT))
    survives(root / "sgd", own(CUT, optimizer=sgd))


def another_cut(root: Path) -> None:
    saved, live = own(CUT)(0), own(OTHER_CUT)(1)
    train(saved, 2)
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        checkpoints.save(2, saved).result()
        assert checkpoints.resume(live) == 2
    expected = state_of(Layers([0, 1, 2]))
    train(expected, 2)
    of_all = contents(expected)
    found = contents(live)
    assert_same(found, {name: value for name, value in of_all.items() if name in found})


def names_given(root: Path) -> None:
    """The same names in every stage, but for the one that the user gives the stage."""
    rank = dist.get_rank()
    survives(root, lambda seed: state_of({f"stage{rank}": Layers([0], seed=7 * rank + seed)}))


def experts(root: Path) -> None:
    """A layer that all ranks share, and an expert of every rank's own."""
    survives(root, lambda seed: state_of(Layers([0, 10 + dist.get_rank()], seed=seed)))


def critic(root: Path) -> None:
    """Models, optimizers, schedulers and items that only one of the ranks has; it need not be the first."""

    def make(seed: int) -> TrainState:
        models = {"actor": Layers([0], seed=seed)}
        if dist.get_rank() == 1:
            models["critic"] = Layers([1], seed=seed)
        optimizers = {name: adam(model) for name, model in models.items()}
        schedulers = {name: torch.optim.lr_scheduler.StepLR(each, 1) for name, each in optimizers.items()}
        items = {"played": Counters(games=0)} if dist.get_rank() == 1 else {}
        return TrainState(model=models, optimizer=optimizers, scheduler=schedulers, **items)

    survives(root, make)
    state = make(0)
    if dist.get_rank() == 1:
        state._items["played"].games = 9
        state._shared["scheduler.critic"].last_epoch = 5
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        checkpoints.save(3, state).result()
        again = make(1)
        assert checkpoints.resume(again) == 3
    if dist.get_rank() == 1:
        assert again._items["played"].games == 9
        assert again._shared["scheduler.critic"].last_epoch == 5


def one_has_more(root: Path) -> None:
    """A critic that is sharded over a part of the ranks."""
    mesh = dist.device_mesh.DeviceMesh("cpu", [0])

    def make(seed: int) -> TrainState:
        models = {"actor": Layers([0], seed=seed)}
        if dist.get_rank() == 0:
            models["critic"] = fully_shard(Layers([1], seed=seed), mesh=mesh)
        return TrainState(model=models, optimizer={name: adam(model) for name, model in models.items()})

    survives(root, make)


def mappings(root: Path) -> None:
    """Modules, and flattened state dicts as stock DCP wants them, in a plain mapping."""
    model, flat = own(CUT)(0).model, StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer = adam(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        optimizers = get_optimizer_state_dict(model, optimizer, options=flat)
        checkpoints.save(1, {"model": model, "optimizer": optimizers}).result()
        again = own(CUT)(1).model
        checkpoints.load({"model": again})
        assert_same(again.state_dict(), before)
        tensors = {"model": own(CUT)(2).model.state_dict()}
        checkpoints.load(tensors)
        assert_same(tensors["model"], before)


def stock(root: Path) -> None:
    """What stock DCP wrote of a pipeline."""
    state = own(CUT)(0)
    train(state, 2)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    (optimizer,) = state.optimizers
    dcp.save(
        {
            "model": state.model.state_dict(),
            "optimizer": get_optimizer_state_dict(state.model, optimizer, options=flat),
        },
        checkpoint_id=root / "stock",
    )
    again = own(CUT)(1)
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        checkpoints.load(again, name="stock")
    assert_same(contents(again), contents(state))


def nobodys(root: Path) -> None:
    """Names that no rank wants are an error on all of them; without `strict` they are left."""
    state = own({0: [0], 1: [1, 2]})(0)
    train(state)
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        checkpoints.save(1, state).result()
        fewer = own({0: [0], 1: [1]})(1)
        before = contents(fewer)
        error = refused(checkpoints, fewer)
        assert all("layers.2." in name for name in error.unexpected)
        assert "layers.1" not in str(error)
        assert not error.missing
        assert_same(contents(fewer), before)
        checkpoints.load(fewer, strict=False)
        expected = contents(state)
        assert_same(contents(fewer), {name: expected[name] for name in contents(fewer)})
        more = own({0: [0, 5], 1: [1, 2]})(1)
        error = refused(checkpoints, more)
        assert any("layers.5.weight" in name for name in error.missing)


def refused(checkpoints: CheckpointManager, state: TrainState) -> IncompatibleCheckpointError:
    try:
        checkpoints.resume(state)
    except IncompatibleCheckpointError as error:
        return error
    raise AssertionError("it was loaded")


TWO = (stages, another_cut, names_given, experts, critic, one_has_more, mappings, stock, nobodys)


def two_ranks(root: str) -> None:
    for job in TWO:
        place = Path(root) / job.__name__
        if dist.get_rank() == 0:
            place.mkdir()
        dist.barrier()
        job(place)


def sharded_stages(seed: int) -> TrainState:
    """Two stages; each is sharded over half of the ranks."""
    stage, half = divmod(dist.get_rank(), dist.get_world_size() // 2)
    del half
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("stage", "shard"))
    model = Layers(CUT[stage], seed=seed)
    fully_shard(model, mesh=mesh["shard"])
    return state_of(model)


def four_ranks(root: str) -> None:
    survives(Path(root), sharded_stages)


def fewer_ranks(root: str) -> dict[str, Any]:
    """Onto two ranks, a stage each, what four ranks had saved."""
    state = sharded_stages(1)
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        assert checkpoints.resume(state) == 2
    return contents(state)


def one_to_two(root: str) -> dict[str, Any]:
    """Onto two stages what one rank had saved of the whole."""
    state = own(CUT)(1)
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        assert checkpoints.resume(state) == 2
    return contents(state)
