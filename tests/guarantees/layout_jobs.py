"""Layouts of a training over ranks, each of one tiny model, and what becomes of each when it is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.state import model_state, optimizer_state
from tests.unit.state.round_trip import full

WORDS, WIDTH, EXPERTS = 7, 5, 4
PARTS = ("embed", "0", "1", "head")
"""Of the whole model; a stage of a pipeline has some."""


class Layer(nn.Module):
    """Rows that two ranks cannot share evenly, and a gate of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH)
        self.gate = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.to(self.gate.weight.dtype)
        return hidden + torch.tanh(self.down(torch.tanh(self.up(hidden)))) * self.gate(hidden)


class Experts(nn.Module):
    """Experts in one parameter, of which a rank may hold some."""

    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        summed = torch.tanh(torch.einsum("bth,ehk->ebtk", hidden, weight)).sum(0)
        if weight.shape[0] < EXPERTS:
            summed = all_reduce(summed, group=self.group or dist.group.WORLD)
        return hidden + summed / EXPERTS


class NamedExperts(nn.ModuleDict):
    """Experts that are modules; a rank may have some."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        summed = sum(torch.tanh(expert(hidden)) for expert in self.values())
        if len(self) < EXPERTS:
            summed = all_reduce(summed)
        return hidden + summed / EXPERTS


class Odd(nn.Module):
    """What is rare: no elements, no dimensions, other dtypes, buffers of both kinds."""

    def __init__(self, *, scalar: bool = True) -> None:
        super().__init__()
        # FSDP2 takes no scalars, and no gradients without elements.
        self.nothing = nn.Parameter(torch.randn(0, WIDTH), requires_grad=scalar)
        self.scale = nn.Parameter(torch.randn(() if scalar else (1,)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("none", torch.zeros(0, 2))
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)
        self.short = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.long = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        hidden = hidden * self.scale * self.table + self.nothing.sum()
        return self.long(self.short(hidden.bfloat16()).double()).float()


class Tiny(nn.Module):
    """A model, or the parts of it that a rank has, under the names of the whole."""

    def __init__(
        self,
        seed: int,
        parts: Iterable[str] = PARTS,
        *,
        tied: bool = False,
        extra: str = "",
        some: Any = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for part in parts:
            torch.manual_seed(100 * seed + PARTS.index(part))
            if part == "embed":
                self.embed = nn.Embedding(WORDS, WIDTH)
            elif part == "head":
                self.head = nn.Linear(WIDTH, WORDS, bias=False)
                if tied:
                    torch.manual_seed(100 * seed)
                    self.head.weight = getattr(self, "embed", nn.Embedding(WORDS, WIDTH)).weight
            else:
                self.layers[part] = Layer()
        torch.manual_seed(100 * seed + len(PARTS))
        if extra == "odd" or extra == "odd without a scalar":
            self.layers["odd"] = Odd(scalar=extra == "odd")
        elif extra == "experts":
            self.layers["moe"] = Experts()
        elif extra == "named experts":
            self.layers["moe"] = NamedExperts()
            for number in range(EXPERTS) if some is None else some:
                torch.manual_seed(100 * seed + 50 + number)
                self.layers["moe"][str(number)] = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embed"):
            hidden = self.embed(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.head(hidden) if hasattr(self, "head") else hidden


KINDS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "tied": {"tied": True},
    "odd": {"extra": "odd"},
    "odd without a scalar": {"extra": "odd without a scalar"},
    "experts": {"extra": "experts"},
    "named experts": {"extra": "named experts"},
}
"""The whole models, by name."""


@dataclass(kw_only=True)
class Training:
    """A model as one rank has it, its optimizer, and how they make a step."""

    model: nn.Module
    optimizer: Any = None
    run: Callable[[int], None] | None = None
    replica: int = 0

    def __post_init__(self) -> None:
        if self.optimizer is None:
            self.optimizer = adam(self.model)

    @property
    def state(self) -> TrainState:
        return TrainState(model=self.model, optimizer=self.optimizer)

    def step(self, number: int) -> None:
        if self.run is not None:
            self.run(number)
        else:
            loss_of(self.model(words(number, self.replica))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.step(number)

    def contents(self) -> dict[str, Any]:
        """Every entry of model and optimizer, in full, by name."""
        found = {f"model.{name}": clone(value) for name, value in full(model_state(self.model)).items()}
        packed = optimizer_state(self.model, self.optimizer)
        for name, values in full(packed["state"]).items():
            found |= {f"{name}.{key}": clone(value) for key, value in values.items()}
        for group in packed["param_groups"]:
            found |= {f"{name}.lr": group["lr"] for name in group["params"]}
        return found


def clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def words(step: int, replica: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (4, 3), generator=torch.Generator().manual_seed(100 * replica + step))


def loss_of(output: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
    del target
    return output.float().square().mean()


Make = Callable[[int], Training]


@dataclass(kw_only=True, frozen=True)
class Layout:
    """How a rank makes a training, and which of the whole models that is."""

    make: Make
    kind: str = "plain"


TWO: dict[str, Layout] = {}
FOUR: dict[str, Layout] = {}
ONE: dict[str, Layout] = {}


def layout(name: str, kind: str = "plain", on: dict[str, Layout] = TWO) -> Callable[[Make], Make]:
    def take(make: Make) -> Make:
        on[name] = Layout(make=make, kind=kind)
        return make

    return take


def one_process(kind: str, seed: int) -> Training:
    return Training(model=Tiny(seed, **KINDS[kind]))


def mesh(*shape: int) -> DeviceMesh:
    sizes = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])


# -- pipelines


def piped(
    seed: int,
    schedule: Any,
    cuts: Mapping[int, Iterable[str]],
    *,
    adapt: Callable[[Tiny, DeviceMesh], None] = lambda *_: None,
    then: Callable[[Tiny], None] = lambda _: None,
    **options: Any,
) -> Training:
    """Make the stages of a rank, of two: as many as there are, or two of four.

    Ranks beyond the second have the same stages.

    Args:
        seed: of the weights.
        schedule: a class of torch's.
        cuts: the parts of each stage.
        adapt: changes the rank's model, which may be sharded over the ranks of its stages.
        then: changes the gradients.
        options: of the model.
    """
    grid = mesh(2, dist.get_world_size() // 2)
    own = [number for number in cuts if number % 2 == grid.get_local_rank("a")]
    model = Tiny(seed, [part for number in own for part in cuts[number]], **options)
    adapt(model, grid["b"])
    stages = [
        PipelineStage(
            part_of(model, cuts[number]), number, len(cuts), torch.device("cpu"), group=grid.get_group("a")
        )
        for number in own
    ]
    made = schedule(stages if len(own) > 1 else stages[0], n_microbatches=2, loss_fn=loss_of)

    def run(step: int) -> None:
        given = [words(step)] if 0 in own else []
        target = {"target": words(step)} if len(cuts) - 1 in own else {}
        made.step(*given, **target)
        then(model)

    return Training(model=model, run=run)


def part_of(model: Tiny, parts: Iterable[str]) -> nn.Module:
    """Build a stage of the rank's modules; the rank's model keeps the names."""
    part = Tiny.__new__(Tiny)
    nn.Module.__init__(part)
    part.layers = nn.ModuleDict({name: model.layers[name] for name in parts if name in model.layers})
    for name in {"embed", "head"} & {*parts}:
        part.add_module(name, getattr(model, name))
    return part


HALVES: Final = {0: ("embed", "0"), 1: ("1", "head")}
QUARTERS: Final = {0: ("embed",), 1: ("0",), 2: ("1",), 3: ("head",)}

layout("pipeline, GPipe")(lambda seed: piped(seed, ScheduleGPipe, HALVES))
layout("pipeline, 1F1B")(lambda seed: piped(seed, Schedule1F1B, HALVES))
layout("pipeline, two stages per rank")(lambda seed: piped(seed, ScheduleInterleaved1F1B, QUARTERS))


def tied_ends(seed: int, **options: Any) -> Training:
    """Sum the gradients of both ends, as torch leaves it to the user."""

    def then(model: Tiny) -> None:
        dist.all_reduce((model.embed if hasattr(model, "embed") else model.head).weight.grad)

    return piped(seed, ScheduleGPipe, HALVES, tied=True, then=then, **options)


layout("pipeline, tied ends of two names", kind="tied")(tied_ends)
layout("pipeline, tied ends of one name", kind="tied")(lambda seed: tied_ends(seed, adapt=name_as_first))


def name_as_first(model: Tiny, _: DeviceMesh) -> None:
    """Give the tied weight of the last stage the name that it has in the first, ahead of its own."""
    if not hasattr(model, "embed"):
        head = model.head
        del model.head
        model.embed, model.head = nn.Embedding(WORDS, WIDTH), head
        model.embed.weight = head.weight


def shard_layers(model: Tiny, stage: DeviceMesh) -> None:
    for layer in model.layers.values():
        fully_shard(layer, mesh=stage)


layout("pipeline of FSDP2 stages")(lambda seed: piped(seed, ScheduleGPipe, HALVES, adapt=shard_layers))


# -- experts


@layout("experts of each rank's own, by name", kind="named experts")
def named_experts(seed: int) -> Training:
    rank = dist.get_rank()
    model = Tiny(seed, extra="named experts", some=range(2 * rank, 2 * rank + 2))

    def run(step: int) -> None:
        loss_of(model(words(step))).backward()
        for name, parameter in model.named_parameters():
            if "moe" not in name:
                dist.all_reduce(parameter.grad)

    return Training(model=model, run=run)


@layout("experts sharded over their mesh, the rest by FSDP2", kind="experts")
def sharded_experts(seed: int) -> Training:
    model = Tiny(seed, extra="experts")
    experts = model.layers["moe"]
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh(), [Shard(0)]))
    fully_shard(model, mesh=mesh(), ignored_params={experts.weight})
    return Training(model=model, replica=dist.get_rank())


# -- data parallelism


def ddp(model: nn.Module) -> Training:
    return Training(model=DistributedDataParallel(model), replica=dist.get_rank())


def fsdp2(model: nn.Module, **options: Any) -> Training:
    for layer in model.layers.values():
        if isinstance(layer, Odd):
            fully_shard(layer.short, mesh=mesh())
            fully_shard(layer.long, mesh=mesh())
        else:
            fully_shard(layer, mesh=mesh(), **options)
    fully_shard(model, mesh=mesh(), **options)
    return Training(model=model, replica=dist.get_rank())


def fsdp1(model: nn.Module, **options: Any) -> Training:
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
    return Training(model=model, replica=dist.get_rank())


layout("DDP")(lambda seed: ddp(Tiny(seed)))
layout("DDP, tied", kind="tied")(lambda seed: ddp(Tiny(seed, tied=True)))
layout("DDP, odd parameters and buffers", kind="odd")(lambda seed: ddp(Tiny(seed, extra="odd")))
layout("FSDP2")(lambda seed: fsdp2(Tiny(seed)))
layout("FSDP2, tied", kind="tied")(lambda seed: fsdp2(Tiny(seed, tied=True)))
layout("FSDP2, odd parameters and buffers", kind="odd without a scalar")(
    lambda seed: fsdp2(Tiny(seed, extra="odd without a scalar"))
)
for use in (True, False):
    name = f"FSDP1, use_orig_params={use}"
    layout(name)(lambda seed, use=use: fsdp1(Tiny(seed), use_orig_params=use))
    layout(f"{name}, tied", kind="tied")(
        lambda seed, use=use: fsdp1(Tiny(seed, tied=True), use_orig_params=use)
    )


@layout("FSDP2, CPU offload, resumed from meta")
def from_meta(seed: int) -> Training:
    """Whatever is not loaded keeps a value that no training gives."""
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    if not seed:
        return fsdp2(Tiny(seed), **offload)
    with torch.device("meta"):
        made = fsdp2(Tiny(seed), **offload)
    made.model.to_empty(device="cpu")
    for value in made.model.parameters():
        value.detach().to_local().fill_(7.0)
    return made


@layout("tensor parallel")
def tensor_parallel(seed: int, ranks: DeviceMesh | None = None) -> Training:
    model = Tiny(seed)
    for layer in model.layers.values():
        parallelize_module(layer, ranks or mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return Training(model=model)


# -- torch.compile


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


layout("compiled", on=ONE)(lambda seed: Training(model=compiled(Tiny(seed))))
layout("compiled in place", on=ONE)(lambda seed: Training(model=in_place(Tiny(seed))))
layout("compiled DDP")(lambda seed: Training(model=compiled(ddp(Tiny(seed)).model), replica=dist.get_rank()))
layout("DDP of a compiled model")(lambda seed: ddp(compiled(Tiny(seed))))
layout("compiled FSDP2")(
    lambda seed: Training(model=compiled(fsdp2(Tiny(seed)).model), replica=dist.get_rank())
)
layout("FSDP2, compiled in place")(
    lambda seed: Training(model=in_place(fsdp2(Tiny(seed)).model), replica=dist.get_rank())
)
layout("FSDP1 of a compiled model")(lambda seed: fsdp1(compiled(Tiny(seed)), use_orig_params=True))
layout("compiled FSDP1")(
    lambda seed: Training(
        model=compiled(fsdp1(Tiny(seed), use_orig_params=True).model), replica=dist.get_rank()
    )
)

# -- one process


layout("plain", on=ONE)(lambda seed: Training(model=Tiny(seed)))
layout("tied", kind="tied", on=ONE)(lambda seed: Training(model=Tiny(seed, tied=True)))
layout("odd parameters and buffers", kind="odd", on=ONE)(lambda seed: Training(model=Tiny(seed, extra="odd")))


@layout("resumed from meta", on=ONE)
def alone_from_meta(seed: int) -> Training:
    if not seed:
        return Training(model=Tiny(seed))
    with torch.device("meta"):
        model = Tiny(seed)
    return Training(model=model.to_empty(device="cpu"))


# -- four ranks

layout("pipeline of FSDP2 stages", on=FOUR)(TWO["pipeline of FSDP2 stages"].make)


@layout("HSDP", on=FOUR)
def hsdp(seed: int) -> Training:
    model = Tiny(seed)
    fully_shard(model, mesh=mesh(2, 2))
    return Training(model=model, replica=dist.get_rank())


@layout("FSDP2 over tensor parallel", on=FOUR)
def fsdp2_of_tensor_parallel(seed: int) -> Training:
    grid = mesh(2, 2)
    made = tensor_parallel(seed, grid["b"])
    fully_shard(made.model, mesh=grid["a"])
    return Training(model=made.model, replica=grid.get_local_rank("a"))


@layout("experts sharded over their mesh and by FSDP2", kind="experts", on=FOUR)
def experts_of_two_dimensions(seed: int) -> Training:
    grid = mesh(2, 2)
    model = Tiny(seed, extra="experts")
    experts = model.layers["moe"]
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), grid["b"], [Shard(0)]))
    experts.group = grid.get_group("b")
    fully_shard(experts, mesh=grid["a"])
    fully_shard(model, mesh=mesh())
    return Training(model=model, replica=dist.get_rank())


# -- jobs


@dataclass(kw_only=True)
class Seen:
    """What became of one layout on one rank.

    Attributes:
        saved: what was saved, in full.
        from_one: what was loaded of one process's checkpoint, in full.
        wrong: phase -> what went wrong.
    """

    saved: dict[str, Any] = field(default_factory=dict)
    from_one: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the names of what is missing, too much, or not the same to the last bit."""
    return sorted(
        name
        for name in {*found, *expected}
        if name not in found or name not in expected or not same(found[name], expected[name])
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def manager(root: Path) -> CheckpointManager:
    return CheckpointManager(root, deadline_seconds=60)


def on_ranks(root: str, cases: str, names: Iterable[str]) -> dict[str, Seen]:
    """Try layouts one after another, on ranks or in one process; `cases` is `ONE`, `TWO` or `FOUR`."""
    return {name: try_layout(Path(root), name, globals()[cases][name]) for name in names}


def try_layout(root: Path, name: str, case: Layout) -> Seen:
    """Save, go on; resume in a fresh model, go on; and load what one process has saved of the same model."""
    seen = Seen()
    live = case.make(0)
    live.steps(0, 1)
    with manager(root / name) as checkpoints:
        checkpoints.save(2, live.state).result()
    seen.saved = live.contents()
    live.step(2)
    again = case.make(1)
    with manager(root / name) as checkpoints:
        checkpoints.resume(again.state)
    if names := differing(again.contents(), seen.saved):
        seen.wrong["resumed on the same ranks"] = ", ".join(names)
    again.step(2)
    if names := differing(again.contents(), live.contents()):
        seen.wrong["the next step"] = ", ".join(names)
    other = case.make(2)
    try:
        with manager(root / case.kind) as checkpoints:
            checkpoints.load(other.state)
    except IncompatibleCheckpointError as error:
        seen.wrong["loaded from one process"] = str(error)
    else:
        seen.from_one = other.contents()
    return seen


def save_one_process(root: Path) -> dict[str, dict[str, Any]]:
    """Save every whole model after two steps, and return its contents."""
    contents = {}
    for kind in KINDS:
        training = one_process(kind, 0)
        training.steps(0, 1)
        with manager(root / kind) as checkpoints:
            checkpoints.save(2, training.state).result()
        contents[kind] = training.contents()
    return contents
