"""What people train: models, optimizers and items of every shape, each small. `SHAPES` has them by name.

A shape is made by a function that gets `wrap`, which puts a model under DDP or FSDP2, and makes the optimizer
afterwards.
"""

from __future__ import annotations

import copy
import enum
import io
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from ckpt_core.state import Counters
from tests.unit.dcp.tensors import all_dtypes, filled

Wrap = Callable[[nn.Module], nn.Module]


@dataclass(kw_only=True)
class Shape:
    """A training state, and how it makes a step."""

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    items: dict[str, Any] = field(default_factory=dict)
    steps: Callable[[int], None] | None = None
    stirred: bool = True

    @property
    def modules(self) -> list[nn.Module]:
        return [*self.model.values()] if isinstance(self.model, dict) else [self.model]

    @property
    def optimizers(self) -> list[Any]:
        if self.optimizer is None:
            return []
        return [*self.optimizer.values()] if isinstance(self.optimizer, dict) else [self.optimizer]

    def train(self, step: int) -> None:
        if self.steps is not None:
            self.steps(step)
            return
        for module in self.modules:
            give_gradients(module.parameters(), step)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


SHAPES: dict[str, Callable[[Wrap], Shape]] = {}
REFUSED: dict[str, str] = {}
"""Name -> what the refusal says."""
REFUSED_SHARDED: dict[str, str] = {
    "optimizer, wrapper with slow weights, as an item": "sharded state",
    "optimizer, wrapper with another form, as an item": "sharded state",
}
"""The same under FSDP2 only."""
PICKLED: dict[str, str] = {}
"""Name -> the item of which the save must say that it needs pickle."""


def shape(name: str, *, refused: str = "", pickled: str = "") -> Callable[[Any], Any]:
    def take(make: Callable[[Wrap], Shape]) -> Callable[[Wrap], Shape]:
        assert name not in SHAPES, name
        SHAPES[name] = make
        if refused:
            REFUSED[name] = refused
        if pickled:
            PICKLED[name] = pickled
        return make

    return take


def give_gradients(parameters: Iterable[nn.Parameter], step: int) -> None:
    """Gradients that depend on the step only, without a forward pass."""
    for place, parameter in enumerate(parameters):
        if not parameter.requires_grad:
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        generator = torch.Generator().manual_seed(1000 * step + place)
        dtype = torch.complex64 if local.is_complex() else torch.float32
        gradient = torch.randn(local.shape, generator=generator, dtype=dtype).to(local.dtype)
        if isinstance(parameter, DTensor):
            gradient = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = gradient


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Decoder(nn.Module):
    """Llama-like: a tied embedding, blocks, a rotary buffer that is not saved."""

    def __init__(self, *, tied: bool = True, wrap: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() if wrap is None else wrap(Block()) for _ in range(2))
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("rotary", torch.ones(1, 4).expand(8, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(model: nn.Module, **others: Any) -> Shape:
    if any(map(is_lazy, model.parameters())):
        return Shape(model=model, steps=lambda _: None)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01) if parameters else None
    return Shape(model=model, optimizer=optimizer, **others)


def of_model(name: str, make: Callable[[], nn.Module], **marks: str) -> None:
    shape(name, **marks)(lambda wrap: trained(wrap(make())))


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.bn(self.conv(x)).mean((2, 3)))


class Experts(nn.Module):
    """Of which some never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](x)


def experts(wrap: Wrap) -> Shape:
    made = trained(wrap(Experts()))

    def step(number: int) -> None:
        give_gradients([p for name, p in made.model.named_parameters() if "experts.2" not in name], number)
        made.optimizer.step()

    made.steps = step
    return made


SHAPES["moe, unused parameters"] = experts


def compiled(model: nn.Module) -> Any:
    """As `torch.compile` wraps it by default, without the seconds that the import of inductor takes."""
    return torch.compile(model, backend="eager")


for tied in (True, False):
    of_model(f"decoder, {'tied' if tied else 'untied'}", partial(Decoder, tied=tied))
of_model("decoder, bf16", lambda: Decoder().bfloat16())
of_model("decoder, fp16", lambda: Decoder().half())
of_model("decoder, fp64", lambda: Decoder().double())
of_model("decoder, compiled", lambda: compiled(Decoder()))
of_model("decoder, compiled in place", lambda: _compiled_in_place(Decoder()))
of_model("decoder, compiled blocks", lambda: Decoder(wrap=compiled))
of_model("decoder, checkpointed blocks", lambda: Decoder(wrap=checkpoint_wrapper))
of_model(
    "decoder, checkpointed and compiled", lambda: Decoder(wrap=lambda b: compiled(checkpoint_wrapper(b)))
)
of_model("lora", Lora)
of_model("resnet", ResNet)
of_model("resnet, channels_last", lambda: ResNet().to(memory_format=torch.channels_last))
of_model("resnet, sync bn", lambda: nn.SyncBatchNorm.convert_sync_batchnorm(ResNet()))
of_model("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(4, 4)))
of_model("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(4, 4)))
of_model("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 4)))
of_model("pruned", lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5))
of_model("a module under two names", lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2))
of_model("nothing to save", nn.Identity)
of_model("frozen", lambda: nn.Linear(3, 3).requires_grad_(requires_grad=False))


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


# -- what modules hold


class Holder(nn.Module):
    """A parameter, and whatever else."""

    def __init__(self, **buffers: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def holds(name: str, make: Callable[[], dict[str, Any]], **marks: str) -> None:
    shape(name, **marks)(lambda wrap: trained(wrap(Holder(**make())), stirred=False))


for dtype in all_dtypes():
    holds(
        f"buffer of {dtype}",
        lambda dtype=dtype: {
            "b": seeded(filled(dtype, (3, 2))),
            "s": seeded(filled(dtype, ())),
            "n": seeded(torch.zeros(2)),
        },
    )


def seeded(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes that depend on the seed."""
    count = tensor.numel() * tensor.dtype.itemsize
    top = 2 if tensor.dtype == torch.bool else 250
    return torch.randint(0, top, (count,), dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


def nans() -> torch.Tensor:
    return (torch.randint(1, 2**22, (8,), dtype=torch.int32) | 0x7F800000).view(torch.float32)


def one_memory() -> dict[str, torch.Tensor]:
    base = torch.randn(12)
    return {"whole": base, "tail": base[6:], "again": base}


def complex_pair() -> torch.Tensor:
    return torch.complex(torch.randn(3, 2), torch.randn(3, 2))


holds("buffer, zero size", lambda: {"b": torch.empty(0, 3), "c": torch.randn(2)})
holds("buffer, NaN payloads", lambda: {"b": nans()})
holds(
    "buffer, infinities",
    lambda: {"b": torch.tensor([float("inf"), -0.0, -float("inf")]), "c": torch.randn(1)},
)
holds("buffer, conjugate", lambda: {"b": complex_pair().conj()})
holds("buffer, negative", lambda: {"b": complex_pair().conj().imag})
holds("buffer, adjoint", lambda: {"b": complex_pair().mH})
holds("buffer, transposed", lambda: {"b": torch.randn(3, 5).t()})
holds("buffer, every second", lambda: {"b": torch.randn(20)[::2]})
holds("buffer, channels_last", lambda: {"b": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)})
holds("buffer, views of one memory", one_memory)
holds("buffer, windows", lambda: {"b": torch.randn(10).unfold(0, 4, 2)})
holds("buffer, None", lambda: {"b": None})
holds(
    "buffer, numpy's memory",
    lambda: {"b": torch.from_numpy(np.random.default_rng(torch.initial_seed()).random(4))},
)
holds("buffer, expanded", lambda: {"b": torch.randn(1, 4).expand(3, 4)}, refused=r"model\.b is expanded")
holds(
    "buffer, strided to zero",
    lambda: {"b": torch.randn(4).as_strided((2, 2, 3), (2, 1, 0))},
    refused="expanded",
)
holds("buffer, sparse", lambda: {"b": torch.eye(3).to_sparse()}, refused="to_dense")
holds(
    "buffer, quantised",
    lambda: {"b": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
    refused="quant",
)
holds("buffer, meta", lambda: {"b": torch.empty(2, device="meta")}, refused="meta device")


@shape("parameter, expanded", refused="model.weight is expanded")
def expanded_parameter(wrap: Wrap) -> Shape:
    model = Holder()
    model.weight = nn.Parameter(torch.randn(1, 2).expand(3, 2))
    return Shape(model=wrap(model), steps=lambda _: None, stirred=False)


class Named(torch.Tensor):
    """A subclass that changes nothing about the data."""


holds("buffer, subclass", lambda: {"b": torch.randn(3).as_subclass(Named)})
of_model("parameters, complex", lambda: nn.Linear(3, 3, dtype=torch.complex64))
of_model("ParameterList", lambda: _with(params=nn.ParameterList([torch.randn(2), torch.randn(3)])))
of_model("ParameterDict", lambda: _with(params=nn.ParameterDict({"b": torch.randn(2), "a": torch.randn(3)})))
of_model("ModuleDict", lambda: _with(mods=nn.ModuleDict({"module": nn.Linear(2, 2), "x": nn.Linear(2, 2)})))


def _with(**children: nn.Module) -> nn.Module:
    model = Holder()
    for name, child in children.items():
        model.add_module(name, child)
    return model


@shape("lazy, initialised")
def lazy(wrap: Wrap) -> Shape:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    model(torch.randn(5, 3))
    return trained(wrap(model))


of_model("lazy, not initialised", lambda: _with(lazy=nn.LazyLinear(4)), refused="not initialised")


class Extra(Holder):
    """A module with state beside its tensors."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


EXTRA: dict[str, Callable[[], Any]] = {
    "number": lambda: float(torch.rand(())),
    "None": lambda: None,
    "tensor": lambda: torch.randn(3),
    "empty dict": dict,
    "dict": lambda: {"scale": torch.randn(2), "history": [1, 2.5], "flag": True},
    "nested": lambda: {"a": {"b": [torch.randn(2), {"c": torch.randn(1)}]}, "t": (1, "x")},
    "list of numbers": lambda: [float(torch.rand(())), 3],
    "bytes": lambda: bytes(torch.randint(0, 255, (5,)).tolist()),
}
for kind, value in EXTRA.items():
    of_model(f"extra state, {kind}", lambda value=value: Extra(value()))
of_model(
    "extra state, stream",
    lambda: Extra(_Stream(b"x" * int(torch.randint(1, 9, ())))),
    pickled="model._extra_state",
)


class _Stream(io.BytesIO):
    def __repr__(self) -> str:
        return repr(self.getvalue())


class Renamed(Holder):
    """Saves under another name than that of the attribute, and takes it back."""

    def __init__(self) -> None:
        super().__init__(b=torch.randn(2))
        self.register_state_dict_post_hook(self._out)
        self.register_load_state_dict_pre_hook(self._back)

    @staticmethod
    def _out(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "running.mean"] = state.pop(prefix + "b")

    @staticmethod
    def _back(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "running.mean" in state:
            state[prefix + "b"] = state.pop(prefix + "running.mean")


class Dotted(Holder):
    def __init__(self) -> None:
        super().__init__()
        self._buffers["a.b"] = torch.randn(3)


of_model("state-dict hooks", Renamed)
of_model("dotted buffer", Dotted)
of_model("dotted buffer, inner", lambda: _with(inner=Dotted()))


@shape("several models and optimizers")
def several(wrap: Wrap) -> Shape:
    models = {"generator": wrap(nn.Linear(3, 3)), "critic": wrap(nn.Linear(3, 1))}
    optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
    return Shape(model=models, optimizer=optimizers)


# -- optimizers


def stepped_by(name: str, make: Callable[[nn.Module], Any], model: Any = Block) -> None:
    def build(wrap: Wrap) -> Shape:
        wrapped = wrap(model())
        return Shape(model=wrapped, optimizer=make(wrapped))

    shape(f"optimizer, {name}")(build)


ONLY_MATRICES = {"Muon"}
BY_HAND = {"LBFGS", "SparseAdam", "Optimizer"}
for cls_name in sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in BY_HAND
):
    cls = getattr(torch.optim, cls_name)
    if cls_name in ONLY_MATRICES:
        stepped_by(
            cls_name, lambda model, cls=cls: cls(model.parameters()), lambda: nn.Linear(4, 3, bias=False)
        )
        continue
    stepped_by(cls_name, lambda model, cls=cls: cls(model.parameters(), lr=0.01))

VARIANTS: dict[str, Callable[[Any], Any]] = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "ASGD, foreach": lambda p: torch.optim.ASGD(p, foreach=True),
    "RAdam, maximize": lambda p: torch.optim.RAdam(p, maximize=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW, tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02)),
    "AdamW, tensor lr and betas": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(0.02), betas=(torch.tensor(0.8), torch.tensor(0.9)), foreach=False
    ),
    "AdamW, differentiable": lambda p: torch.optim.AdamW(p, differentiable=False, eps=1e-3),
    "SGD, nesterov": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, dampening=0),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "NAdam, decoupled": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
}
for variant, make_variant in VARIANTS.items():
    stepped_by(variant, lambda model, make=make_variant: make(model.parameters()))
stepped_by("bf16 state", lambda model: torch.optim.AdamW(model.parameters()), lambda: Block().bfloat16())
stepped_by("named_parameters", lambda model: torch.optim.AdamW(model.named_parameters()))
stepped_by(
    "groups by kind",
    lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.5},
        ]
    ),
)


@shape("optimizer, one for each parameter")
def per_parameter(wrap: Wrap) -> Shape:
    model = wrap(Block())
    optimizers = {
        name.replace(".", "_"): torch.optim.SGD([p], lr=0.1, momentum=0.9)
        for name, p in model.named_parameters()
    }
    return Shape(model=model, optimizer=optimizers)


@shape("optimizer, groups added later")
def added_later(wrap: Wrap) -> Shape:
    model = wrap(Block())
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([first])
    give_gradients([first], 7)
    optimizer.step()
    optimizer.add_param_group({"params": others, "lr": 0.3})
    optimizer.state.clear()
    return Shape(model=model, optimizer=optimizer)


@shape("optimizer, no step yet")
def no_step(wrap: Wrap) -> Shape:
    model = wrap(Block())
    return Shape(model=model, optimizer=torch.optim.AdamW(model.parameters()), steps=lambda _: None)


@shape("optimizer, LBFGS")
def lbfgs(wrap: Wrap) -> Shape:
    made = Shape(model=wrap(nn.Linear(3, 3)))
    made.optimizer = torch.optim.LBFGS(made.model.parameters(), max_iter=2, history_size=2)

    def step(number: int) -> None:
        def closure() -> float:
            give_gradients(made.model.parameters(), number)
            return 1.0

        made.optimizer.step(closure)

    made.steps = step
    return made


@shape("optimizer, SparseAdam")
def sparse_adam(wrap: Wrap) -> Shape:
    made = Shape(model=wrap(nn.Embedding(10, 3, sparse=True)))
    made.optimizer = torch.optim.SparseAdam(made.model.parameters())

    def step(number: int) -> None:
        made.model.zero_grad()
        made.model(torch.tensor([number % 10, 3])).sum().backward()
        made.optimizer.step()

    made.steps = step
    return made


class Odd(torch.optim.SGD):
    """State of every kind beside tensors, some keyed by numbers."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                self.state[parameter].update(
                    ring={0: torch.ones(2) * group["count"], 1: 3}, note="x", history=[1, 2.5], nothing=None
                )


stepped_by("odd state", lambda model: Odd(model.parameters(), lr=0.1))


# -- optimizers around optimizers


class Around(torch.optim.Optimizer):
    """As frameworks wrap optimizers: shares the state of the inner one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class Scaling(Around):
    """Adds a number of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.scale = 2.0

    def step(self, closure: Any = None) -> Any:
        self.scale *= 1.5
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale, "ema": {"first": torch.tensor(self.scale)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.scale = state.pop("scale")
        assert float(state.pop("ema")["first"]) == self.scale
        super().load_state_dict(state)


class Lookahead(Around):
    """Keeps slow weights by the index of their parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.slow = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for slow, fast in zip(
            self.slow, (p for group in self.param_groups for p in group["params"]), strict=True
        ):
            slow.lerp_(fast.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": dict(enumerate(self.slow))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.slow = [value.clone() for value in state.pop("slow").values()]
        super().load_state_dict(state)


class HalfPrecision(Around):
    """As Apex does it: a state of another form."""

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer_state_dict": super().state_dict(), "loss_scaler": 2.0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["optimizer_state_dict"])


class Sharded(Around):
    """As OSS does it: its state is on other ranks, unless it was gathered."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("optimizer state has not been consolidated on this rank")


class Sharpness(torch.optim.Optimizer):
    """As SAM does it: holds an optimizer and does not tell its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.base_optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)


def wrapped_in(name: str, around: Any, *, as_item: bool = False, refused: str = "") -> None:
    def build(wrap: Wrap) -> Shape:
        made = trained(wrap(nn.Linear(3, 3)))
        outer = around(made.optimizer)

        def step(number: int) -> None:
            give_gradients(made.model.parameters(), number)
            outer.step()

        made.optimizer = None if as_item else outer
        made.items, made.steps = {"opt": outer} if as_item else {}, step
        return made

    shape(f"optimizer, {name}", refused=refused)(build)


wrapped_in("wrapped", Around)
wrapped_in("wrapped twice", lambda inner: Around(Around(inner)))
wrapped_in("wrapper with a number", Scaling)
wrapped_in("wrapper with a number, wrapped", lambda inner: Around(Scaling(inner)))
wrapped_in("wrapper with slow weights", Lookahead, refused="slow.*opt=optimizer")
wrapped_in("wrapper with slow weights, as an item", Lookahead, as_item=True)
wrapped_in("wrapper with another form", HalfPrecision, refused="not in torch's form.*opt=optimizer")
wrapped_in("wrapper with another form, as an item", HalfPrecision, as_item=True)
wrapped_in("wrapper of shards", Sharded, refused="not been consolidated")
wrapped_in("one that hides another", Sharpness, refused="base_optimizer.*lost")


# -- schedulers


def scheduled(name: str, make: Callable[[torch.optim.Optimizer], Any]) -> None:
    @shape(f"scheduler, {name}")
    def build(wrap: Wrap) -> Shape:
        model = wrap(nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=float(torch.rand(())), momentum=0.9)
        made = Shape(model=model, optimizer=optimizer)
        scheduler = made.scheduler = make(optimizer)
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            made.scheduler = None
            made.items["plateau"] = scheduler

            def step(number: int) -> None:
                give_gradients(model.parameters(), number)
                optimizer.step()
                scheduler.step(1.0)

            made.steps = step
        return made


class Factor:
    """A callable schedule with state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (epoch + 1)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR, object": lambda o: lr_scheduler.LambdaLR(o, Factor()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05),
}
for scheduler_name, make_scheduler in SCHEDULERS.items():
    scheduled(scheduler_name, make_scheduler)


# -- items


class Kept:
    """An item with whatever state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class Color(enum.Enum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@dataclass
class Point:
    x: int = 1


def number() -> int:
    return int(torch.randint(0, 1000, ()))


def large(**others: Any) -> dict[str, Any]:
    return {"big": torch.randn(1 << 18 | 7), **others}


ITEMS: dict[str, Callable[[], Any]] = {
    "plain": lambda: {
        "epoch": number(),
        "best": 0.5,
        "name": "x",
        "none": None,
        "yes": True,
        "big": 2**80 + number(),
    },
    "floats": lambda: {"values": [float("nan"), float("-inf"), -0.0, 1e-320, 0.1], "n": number()},
    "containers": lambda: {
        "t": (1, (2,)),
        "s": {3, 1, number()},
        "f": frozenset("ab"),
        "b": b"\x00\xff",
        "l": [[]],
    },
    "keys": lambda: {1: number(), (2, 3): "x", None: 0.5, 2.5: 1.5, "$type": "mine"},
    "torch's own": lambda: {
        "size": torch.Size([2, number()]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    },
    "paths": lambda: {"place": Path("a") / str(number())},
    "numpy": lambda: {"array": np.arange(number() % 9 + 1), "scalar": np.float32(0.5), "rng": _numpy_rng()},
    "tensors": lambda: {
        "t": torch.randn(3),
        "e": torch.empty(0, 2),
        "s": torch.tensor(2.5, dtype=torch.bfloat16),
    },
    "OrderedDict": lambda: {"o": OrderedDict(b=number(), a=2)},
    "defaultdict": lambda: {"d": defaultdict(list, {"a": [number()]})},
    "Counter": lambda: {"c": Counter({"x": number()})},
    "empty": dict,
    "large": lambda: large(n=number()),
    "large, empties": lambda: large(a={}, b=[], c={"d": {}}, e=""),
    "large, OrderedDict": lambda: large(o=OrderedDict(b=torch.randn(2), a=OrderedDict(x=number()))),
    "large, number keys": lambda: large(o={0: torch.randn(2), 1: {5: number()}}),
    "large, lists": lambda: large(o=[torch.randn(2), [1, torch.randn(1)], "x"], t=(1, 2), none=None),
    "large, views": lambda: {
        "t": torch.randn(1 << 9, 1 << 10).t(),
        "c": torch.randn(3, dtype=torch.complex64).conj(),
    },
}
PICKLED_ITEMS: dict[str, Callable[[], Any]] = {
    "datetime": lambda: {"when": datetime(2024, 1, 1, number() % 24)},  # noqa: DTZ001
    "Enum": lambda: {"color": Color.RED, "n": number()},
    "dataclass": lambda: {"point": Point(number())},
    "namedtuple": lambda: {"pair": Pair(number(), 2)},
    "deque": lambda: {"last": deque([number()], maxlen=3)},
    "uuid": lambda: {"id": uuid.UUID(int=number())},
    "Decimal": lambda: {"price": Decimal(number())},
    "slice": lambda: {"part": slice(0, number())},
    "large, datetime": lambda: large(when=datetime(2024, 1, 1, number() % 24)),  # noqa: DTZ001
    "large, namedtuple": lambda: large(pair=Pair(number(), 2)),
}


def _numpy_rng() -> Any:
    return np.random.default_rng(number()).bit_generator.state


def with_item(name: str, value: Callable[[], Any], **marks: str) -> None:
    shape(f"item, {name}", **marks)(
        lambda wrap: Shape(model=wrap(nn.Linear(2, 2)), items={"it": Kept(value())})
    )


for item_name, make_item in ITEMS.items():
    with_item(item_name, make_item)
for item_name, make_item in PICKLED_ITEMS.items():
    with_item(item_name, make_item, pickled="it.when|it.pair" if item_name.startswith("large") else "it")


@shape("Counters")
def counters(wrap: Wrap) -> Shape:
    return Shape(model=wrap(nn.Linear(2, 2)), items={"progress": Counters(epoch=number(), best=(1, [2.5]))})


@shape("GradScaler")
def grad_scaler(wrap: Wrap) -> Shape:
    scaler = torch.amp.GradScaler("cpu", init_scale=float(number() + 1))
    return Shape(model=wrap(nn.Linear(2, 2)), scaler=scaler)


def averaged(name: str, **options: Any) -> None:
    @shape(name)
    def build(wrap: Wrap) -> Shape:
        model = wrap(ResNet())
        average = AveragedModel(model, **options)
        made = trained(model, items={"average": average})

        def step(number: int) -> None:
            give_gradients(model.parameters(), number)
            made.optimizer.step()
            average.update_parameters(model)

        made.steps = step
        return made


averaged("SWA")
averaged("EMA", multi_avg_fn=get_ema_multi_avg_fn(0.9))
averaged("SWA with buffers", use_buffers=True)


@shape("EMA as a copy")
def ema_copy(wrap: Wrap) -> Shape:
    model = wrap(Block())
    return trained(model, items={"ema": copy.deepcopy(Block())})


# -- torch's own modules


LAYER = partial(nn.TransformerEncoderLayer, 4, 2, dim_feedforward=4)
SPECIAL: dict[str, Callable[[], nn.Module]] = {
    "Transformer": lambda: nn.Transformer(4, 2, 1, 1, dim_feedforward=4),
    "TransformerEncoderLayer": LAYER,
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(4, 2, dim_feedforward=4),
    "TransformerEncoder": lambda: nn.TransformerEncoder(LAYER(), 1, enable_nested_tensor=False),
    "TransformerDecoder": lambda: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(4, 2, dim_feedforward=4), 1
    ),
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [2, 5]),
    "FractionalMaxPool2d": lambda: nn.FractionalMaxPool2d(2, output_size=2),
    "FractionalMaxPool3d": lambda: nn.FractionalMaxPool3d(2, output_size=2),
    "Bilinear": lambda: nn.Bilinear(2, 3, 2),
    "ParameterList": lambda: nn.ParameterList([torch.randn(2)]),
    "ParameterDict": lambda: nn.ParameterDict({"a": torch.randn(2)}),
    "Sequential": lambda: nn.Sequential(nn.Linear(2, 2)),
    "ModuleList": lambda: nn.ModuleList([nn.Linear(2, 2)]),
    "ModuleDict": lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}),
    "Unflatten": lambda: nn.Unflatten(1, (2, 2)),
    "RNNBase": lambda: nn.RNNBase("LSTM", 3, 2),
}
NOT_BUILT = {"Module", "DataParallel", "Container", "RNNCellBase"}
ARGUMENTS: tuple[tuple[Any, ...], ...] = ((), (4,), (4, 4), (4, 4, 2))


def build_module(name: str) -> nn.Module:
    if name in SPECIAL:
        return SPECIAL[name]()
    for arguments in ARGUMENTS:
        try:
            return getattr(nn, name)(*arguments)
        except (TypeError, ValueError):
            continue
    raise AssertionError(f"torch.nn.{name} takes other arguments: add it to SPECIAL")


def zoo() -> list[str]:
    return sorted(
        name
        for name, cls in vars(nn).items()
        if isinstance(cls, type) and issubclass(cls, nn.Module) and name not in NOT_BUILT
    )


def has_state(name: str) -> bool:
    return name.startswith("Lazy") or bool(build_module(name).state_dict())


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some are deprecated
    STATELESS = [name for name in zoo() if not has_state(name)]
for module_name in zoo():
    if module_name not in STATELESS:
        marks = {"refused": "not initialised"} if module_name.startswith("Lazy") else {}
        of_model(f"nn.{module_name}", partial(build_module, module_name), **marks)
of_model("nn, all without state", lambda: _with(**{name: build_module(name) for name in STATELESS}))
