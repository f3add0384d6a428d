"""A checkpoint of another kind of optimizer is refused before the first byte."""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.errors import IncompatibleCheckpointError
from tests.support import low_bit
from tests.unit.state.round_trip import assert_equal

KINDS: dict[str, type[torch.optim.Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}


def made(kind: Callable[..., Any], steps: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    # Of two dimensions, which Muon wants.
    model = nn.Linear(4, 5, bias=False)
    optimizer = kind(model.parameters(), **options)
    step(model, optimizer, steps)
    return model, optimizer


def step(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for number in range(steps):

        def closure(number: int = number) -> torch.Tensor:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
                if "SparseAdam" in str(type(optimizer).__mro__):
                    parameter.grad = parameter.grad.to_sparse(1)
            return torch.zeros(())

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def loads(checkpoints: CheckpointManager, number: int, state: Any, model: nn.Module, optimizer: Any) -> None:
    """Load and step on; whatever refuses must leave every bit of the state as it was."""
    before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    try:
        checkpoints.load(state, name=f"step-{number:09}")
    except IncompatibleCheckpointError:
        assert_equal((dict(model.state_dict()), optimizer.state_dict()), before)
        raise
    step(model, optimizer)


def of(model: nn.Module, optimizer: Any) -> TrainState:
    return TrainState(model=model, optimizer=optimizer)


@pytest.fixture
def checkpoints(tmp_path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run", journal=False) as manager:
        yield manager


@pytest.fixture(scope="module")
def of_every_kind(tmp_path_factory) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path_factory.mktemp("kinds"), journal=False) as manager:
        for number, kind in enumerate(KINDS.values()):
            manager.save(number, of(*made(kind, 1)))
        yield manager


@pytest.mark.parametrize("live", KINDS)
def test_of_all_pairs_of_torchs_optimizers_only_those_of_one_kind_load(of_every_kind, live):
    for number, name in enumerate(KINDS):
        for steps in (0, 1):
            model, optimizer = made(KINDS[live], steps)
            if name == live:
                loads(of_every_kind, number, of(model, optimizer), model, optimizer)
                continue
            with pytest.raises(IncompatibleCheckpointError, match="another kind of optimizer") as caught:
                loads(of_every_kind, number, of(model, optimizer), model, optimizer)
            assert live in str(caught.value)


class Own(torch.optim.Optimizer):
    """An optimizer that a user wrote: the sign of a mean of gradients."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(group["lr"] * mean.sign())


class Other(Own):
    pass


class Unrelated(torch.optim.Optimizer):
    """The same names and another meaning."""

    __init__ = Own.__init__

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.add_(parameter.grad)
                parameter.sub_(group["lr"] * mean)


class MyAdamW(torch.optim.AdamW):
    pass


class YourAdamW(torch.optim.AdamW):
    pass


Moved = type("Own", (torch.optim.Optimizer,), {**vars(Own), "__module__": "refactored.optim"})
ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD

SAME: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (ADAMW, MyAdamW),
    (MyAdamW, ADAMW),
    (MyAdamW, YourAdamW),
    (partial(ADAM, foreach=True), partial(ADAM, fused=True)),
    (partial(ADAM, fused=True), partial(ADAM, foreach=False)),
    (partial(ADAM, amsgrad=True), ADAM),
    (ADAM, partial(ADAM, amsgrad=True)),
    (partial(SGD, momentum=0.9), SGD),
    (SGD, partial(SGD, momentum=0.9, nesterov=True)),
    (Own, Other),
    (Other, Own),
    (Own, Moved),
]


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize(("then", "now"), SAME)
def test_one_kind_in_another_class_or_with_other_options_still_loads(checkpoints, then, now, steps):
    checkpoints.save(0, of(*made(then, 0)))
    checkpoints.save(1, of(*made(then, 1)))
    for number in (0, 1):
        model, optimizer = made(now, steps)
        loads(checkpoints, number, of(model, optimizer), model, optimizer)


@pytest.mark.parametrize(
    ("then", "now"),
    [(Own, Unrelated), (Unrelated, Other), (Own, ADAM), (ADAM, Own), (MyAdamW, ADAM), (ADAM, YourAdamW)],
)
def test_an_optimizer_of_ones_own_is_of_another_kind_than_a_stranger(checkpoints, then, now):
    checkpoints.save(1, of(*made(then, 1)))
    for steps in (0, 1):
        model, optimizer = made(now, steps)
        with pytest.raises(IncompatibleCheckpointError, match="another kind of optimizer"):
            loads(checkpoints, 1, of(model, optimizer), model, optimizer)


def test_who_knows_that_the_state_fits_takes_it_without_strict(checkpoints):
    checkpoints.save(1, of(*made(Own, 1)))
    model, optimizer = made(Unrelated, 0)
    checkpoints.load(of(model, optimizer), step=1, strict=False)
    assert optimizer.state[model.weight]["mean"].any()


def test_what_wraps_an_optimizer_changes_nothing_of_its_kind(checkpoints):
    checkpoints.save(1, of(*made(ADAMW, 1)))

    class Accelerated:
        """As Accelerate's, which needs its global state."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.state = optimizer, optimizer.state
            self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    fabric = Fabric(accelerator="cpu", devices=1)
    for other in (Accelerated, fabric.setup_optimizers):
        model, optimizer = made(ADAMW, 1)
        loads(checkpoints, 1, TrainState(model=model, optimizer=other(optimizer)), model, optimizer)
        model, optimizer = made(ADAM, 1)
        with pytest.raises(IncompatibleCheckpointError, match=r"AdamW was saved.*Adam,"):
            loads(checkpoints, 1, TrainState(model=model, optimizer=other(optimizer)), model, optimizer)


@pytest.mark.parametrize("form", ["stock", "mapping", "item"])
@pytest.mark.parametrize(
    ("then", "now", "fits"),
    [
        (ADAM, torch.optim.Adamax, False),
        (torch.optim.Adamax, ADAMW, False),
        (torch.optim.RAdam, torch.optim.NAdam, False),
        (torch.optim.NAdam, torch.optim.RAdam, False),
        (torch.optim.Adadelta, torch.optim.RMSprop, False),
        (SGD, ADAM, False),
        (ADAM, partial(ADAM, amsgrad=True), True),
        (partial(SGD, momentum=0.9), SGD, True),
        (ADAMW, MyAdamW, True),
    ],
)
def test_without_a_record_of_the_class_the_names_of_the_state_tell_the_kind(
    checkpoints, tmp_path, form, then, now, fits
):
    def state(model: nn.Module, optimizer: Any) -> Any:
        if form == "mapping":
            return {"model": model, "optimizer": optimizer}
        return TrainState(model=model, opt=optimizer) if form == "item" else of(model, optimizer)

    model, optimizer = made(then, 1)
    if form == "stock":
        parts = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(parts, checkpoint_id=tmp_path / "run" / "step-000000001")
    else:
        checkpoints.save(1, state(model, optimizer))
    for steps in (0, 1):
        model, optimizer = made(now, steps)
        if fits:
            loads(checkpoints, 1, state(model, optimizer), model, optimizer)
        else:
            with pytest.raises(IncompatibleCheckpointError, match="another kind of optimizer"):
                loads(checkpoints, 1, state(model, optimizer), model, optimizer)


FORMS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "mapping": lambda model, optimizer: {"model": model, "optim": optimizer},
    "nested": lambda model, optimizer: {"model": model, "parts": {"optims": {"of all": optimizer}}},
    "item": lambda model, optimizer: TrainState(model=model, opt=optimizer),
    "wrapped": lambda model, optimizer: {
        "model": model,
        "optim": Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer),
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("then", "now", "fits"),
    [
        (ADAM, ADAMW, False),
        (ADAMW, ADAM, False),
        (ADAMW, torch.optim.RAdam, False),
        (Own, Unrelated, False),
        (MyAdamW, YourAdamW, True),
        (partial(SGD, momentum=0.9), partial(SGD, momentum=0.9), True),
        (Own, Other, True),
    ],
)
def test_an_optimizer_kept_as_an_object_is_of_the_kind_that_was_saved(checkpoints, form, then, now, fits):
    state = FORMS[form]
    checkpoints.save(1, state(*made(then, 1)))
    for steps in (0, 1):
        model, optimizer = made(now, steps)
        if fits:
            loads(checkpoints, 1, state(model, optimizer), model, optimizer)
            continue
        with pytest.raises(IncompatibleCheckpointError, match="another kind of optimizer"):
            loads(checkpoints, 1, state(model, optimizer), model, optimizer)


def test_a_large_optimizer_kept_as_an_item_is_of_the_kind_that_was_saved(checkpoints):
    def large(kind: Callable[..., Any], steps: int) -> tuple[nn.Module, Any]:
        model = nn.Linear(512, 512)
        optimizer = kind(model.parameters())
        step(model, optimizer, steps)
        return model, optimizer

    model, optimizer = large(ADAM, 1)
    checkpoints.save(1, TrainState(model=model, opt=optimizer))
    for kind, steps in ((ADAMW, 0), (torch.optim.RAdam, 1)):
        model, optimizer = large(kind, steps)
        with pytest.raises(IncompatibleCheckpointError, match="another kind of optimizer"):
            loads(checkpoints, 1, TrainState(model=model, opt=optimizer), model, optimizer)
    model, optimizer = large(ADAM, 0)
    loads(checkpoints, 1, TrainState(model=model, opt=optimizer), model, optimizer)


def test_stock_loads_an_optimizer_that_says_of_what_class_it_is(checkpoints, tmp_path):
    _, optimizer = made(ADAMW, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    checkpoints.save(1, {"optim": optimizer}).result()
    _, other = made(ADAMW, 2)
    dcp.load({"optim": other}, checkpoint_id=tmp_path / "run" / "step-000000001")
    assert_equal(other.state_dict(), saved)


@pytest.mark.parametrize(
    ("then", "now"),
    [(ADAM, ADAMW), (ADAMW, torch.optim.RAdam), (ADAM, ADAM), (partial(SGD, momentum=0.9), SGD), (SGD, SGD)],
)
@pytest.mark.parametrize("ours", [False, True])
def test_that_the_class_of_an_optimizer_is_not_recorded_is_told_once(
    checkpoints, tmp_path, caplog, then, now, ours
):
    model, optimizer = made(then, 1)
    if ours:
        checkpoints.save(1, of(model, optimizer))
    else:
        parts = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(parts, checkpoint_id=tmp_path / "run" / "step-000000001")
    if ours and then in {ADAM, ADAMW} and now is not then:
        return  # refused, as tested above
    has_state = bool(optimizer.state) and any(optimizer.state.values())
    model, optimizer = made(now, 0)
    loads(checkpoints, 1, of(model, optimizer), model, optimizer)
    assert caplog.text.count("does not record the class") == (has_state and not ours)


@pytest.mark.skipif(not low_bit.is_installed(), reason="make setup installs them")
def test_a_quantised_optimizer_is_of_another_kind_than_torchs(checkpoints, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with low_bit.importable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizers = importlib.import_module("torchao.optim")
    kinds = [optimizers.AdamW8bit, optimizers.AdamW4bit, optimizers.AdamWFp8, ADAMW]

    def large(kind: Callable[..., Any], steps: int) -> tuple[nn.Module, Any]:
        model = nn.Linear(128, 64)  # smaller ones are not quantised
        optimizer = kind(model.parameters(), lr=0.01)
        step(model, optimizer, steps)
        return model, optimizer

    for number, kind in enumerate(kinds):
        checkpoints.save(number, of(*large(kind, 1)))
    for number, then in enumerate(kinds):
        for now in kinds:
            model, optimizer = large(now, 0)
            if then is now:
                loads(checkpoints, number, of(model, optimizer), model, optimizer)
            else:
                with pytest.raises(IncompatibleCheckpointError):
                    loads(checkpoints, number, of(model, optimizer), model, optimizer)
