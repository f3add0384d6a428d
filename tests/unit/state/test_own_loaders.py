"""A module that loads its state in its own way is asked before a shape or a name is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.errors import IncompatibleCheckpointError


class Resized(nn.Module):
    """Takes the shape of what it is given, as peers.md's `resize_buffer`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("kept", torch.zeros(0))

    def grow(self) -> None:
        self.kept = torch.arange(3.0)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.kept = torch.empty_like(state[f"{prefix}kept"])
        super()._load_from_state_dict(state, prefix, *rest)


class Lazy(nn.Module):
    """Has neither buffer nor parameter until it needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def grow(self) -> None:
        self.register_buffer("mean", torch.arange(4.0))
        self.scale = nn.Parameter(torch.ones(2, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}mean" in state and not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros_like(state[f"{prefix}mean"]))
            self.scale = nn.Parameter(torch.zeros_like(state[f"{prefix}scale"]))
        super()._load_from_state_dict(state, prefix, *rest)


class Sized(nn.Module):
    """Its extra state says how large its child is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1, 2)

    def grow(self) -> None:
        self.table = nn.Embedding(5, 2)

    def get_extra_state(self) -> dict[str, int]:
        return {"rows": self.table.num_embeddings}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.table = nn.Embedding(state["rows"], 2)


class Renaming(nn.Module):
    """Reads the names of an older version of itself."""

    def __init__(self, *, old: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2 if old else 3))
        if not old:
            self.register_load_state_dict_pre_hook(self._shift)

    @staticmethod
    def _shift(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for leaf in ("weight", "bias"):
            if f"{prefix}layers.2.{leaf}" in state:
                continue
            for number in (1, 0):
                state[f"{prefix}layers.{number + 1}.{leaf}"] = state.pop(f"{prefix}layers.{number}.{leaf}")
            state[f"{prefix}layers.0.{leaf}"] = torch.full_like(state[f"{prefix}layers.1.{leaf}"], 7)


class Loading(nn.Module):
    """Overrides `load_state_dict` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def grow(self) -> None:
        self.weight = nn.Parameter(torch.arange(6.0))

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        self.weight = nn.Parameter(torch.empty_like(state["weight"]))
        return super().load_state_dict(state, *args, **options)


class Metric(nn.Module):
    """Keeps a list of tensors, as torchmetrics do with `persistent=True`."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[torch.Tensor] = []

    def grow(self) -> None:
        self.values += [torch.arange(2.0), torch.arange(3.0)]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}values"] = list(self.values)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.values = state.pop(f"{prefix}values", [])
        super()._load_from_state_dict(state, prefix, *rest)


KINDS: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (Resized, Lazy, Sized, Loading, Metric)
}
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "inside": lambda module: nn.Sequential(nn.Linear(2, 2), module),
    "compiled": lambda module: torch.compile(nn.Sequential(module, nn.Linear(2, 2)), backend="eager"),
}


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Values that `==` compares."""
    return {
        name: value.tolist()
        if isinstance(value, torch.Tensor)
        else [each.tolist() for each in value]
        if isinstance(value, list)
        else value
        for name, value in state.items()
    }


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_module_can_load_by_itself_is_resumed_by_a_fresh_process(tmp_path, kind, wrapper):
    if kind == "Loading" and wrapper != "bare":
        pytest.skip("torch asks only the outermost module")
    torch.manual_seed(0)
    grown, fresh = KINDS[kind](), KINDS[kind]()
    grown.grow()
    saved, live = WRAPPERS[wrapper](grown), WRAPPERS[wrapper](fresh)
    with CheckpointManager(tmp_path, journal=False) as checkpoints:
        checkpoints.save(1, TrainState(model=saved))
        checkpoints.resume(TrainState(model=live))
        assert plain(live.state_dict()) == plain(saved.state_dict())
        # Now that everything fits, too.
        checkpoints.resume(TrainState(model=live))
        assert plain(live.state_dict()) == plain(saved.state_dict())


def test_state_that_has_not_grown_yet_is_resumed_too(tmp_path):
    for number, kind in enumerate(KINDS.values()):
        saved, live = kind(), kind()
        with CheckpointManager(tmp_path / str(number), journal=False) as checkpoints:
            checkpoints.save(1, TrainState(model=saved))
            checkpoints.resume(TrainState(model=live))
        assert plain(live.state_dict()) == plain(saved.state_dict())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_hook_that_moves_names_moves_what_was_saved_and_not_what_was_moved_before(tmp_path, wrapper):
    old, new = Renaming(old=True), Renaming()
    with CheckpointManager(tmp_path, journal=False) as checkpoints:
        checkpoints.save(1, TrainState(model=WRAPPERS[wrapper](old)))
        checkpoints.resume(TrainState(model=WRAPPERS[wrapper](new)))
    assert torch.equal(new.layers[1].weight, old.layers[0].weight)
    assert torch.equal(new.layers[2].weight, old.layers[1].weight)
    assert new.layers[0].bias.tolist() == [7, 7]


def test_a_lazy_layer_takes_the_shape_that_was_saved(tmp_path):
    saved, live = nn.LazyLinear(3), nn.LazyLinear(3)
    saved(torch.ones(1, 5))
    with CheckpointManager(tmp_path, journal=False) as checkpoints:
        checkpoints.save(1, TrainState(model=saved))
        checkpoints.resume(TrainState(model=live))
    assert plain(live.state_dict()) == plain(saved.state_dict())


@pytest.mark.parametrize("make", [nn.Linear, nn.BatchNorm1d, nn.Embedding])
def test_a_plain_module_of_another_shape_is_refused_before_the_first_byte(tmp_path, make):
    arguments = (lambda n: (n,)) if make is nn.BatchNorm1d else (lambda n: (n, 2))
    saved = nn.ModuleDict({"own": Resized(), "plain": make(*arguments(3))})
    live = nn.ModuleDict({"own": Resized(), "plain": make(*arguments(4))})
    saved["own"].grow()
    before = plain(live.state_dict())
    with CheckpointManager(tmp_path, journal=False) as checkpoints:
        checkpoints.save(1, TrainState(model=saved))
        with pytest.raises(IncompatibleCheckpointError, match="nothing was loaded") as caught:
            checkpoints.load(TrainState(model=live))
    assert "own" not in str(caught.value)
    assert plain(live.state_dict()) == before


def test_where_everything_fits_a_module_with_hooks_is_loaded_in_place(tmp_path):
    saved, live = Resized(), Resized()
    live.load_state_dict({name: value + 1 for name, value in live.state_dict().items()})
    target = TrainState(model=live)
    place = live.inner.weight.data_ptr()
    with CheckpointManager(tmp_path, journal=False) as checkpoints:
        checkpoints.save(1, TrainState(model=saved))
        checkpoints.resume(target)
    assert live.inner.weight.data_ptr() == place
    assert plain(live.state_dict()) == plain(saved.state_dict())
