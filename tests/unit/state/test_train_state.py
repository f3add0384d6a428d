from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core import CheckpointManager
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state import Counters, DictState, StateSource, TrainState, load_rng_state, rng_state
from ckpt_core.types import CapturedState
from tests.unit.state.round_trip import assert_equal, load, save, saved_state, stock
from tests.unit.state.test_optimizer_state import model, train


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Run:
    """A training loop with all that draws random numbers: dropout, shuffling, workers, Python, NumPy."""

    def __init__(self, number: int, workers: int = 0, made_by: type[DataLoader] = StatefulDataLoader) -> None:
        seed(number)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=50)
        self.loader = made_by(Noise(), batch_size=4, shuffle=True, num_workers=workers)
        self.counters = Counters(step=0)
        self.losses: list[float] = []
        self.state = TrainState(
            model=self.net,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=torch.amp.GradScaler("cpu"),
            dataloader=self.loader,
            counters=self.counters,
        )

    def train(self, until: int, at: int = -1, save: Callable[[], None] = lambda: None) -> None:
        if at == 0:
            save()
        while self.counters.step < until:
            for batch in self.loader:
                loss = self.net(batch).mean() * random.random() + np.random.rand()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.losses.append(loss.item())
                self.counters.step += 1
                if self.counters.step == at:
                    save()
                if self.counters.step == until:
                    break


@pytest.mark.parametrize(
    ("workers", "made_by"),
    [
        (0, StatefulDataLoader),
        pytest.param(2, StatefulDataLoader, marks=pytest.mark.slow),
        (0, DataLoader),
    ],
)
@pytest.mark.parametrize("at", [0, 3, 6, 8])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, at, workers, made_by):
    """Before the first batch, in the first epoch, at its end, and in the second."""
    losses, schedule, weights = uninterrupted(workers, made_by)
    written = []
    saved = Run(0, workers, made_by)
    saved.train(12, at, lambda: written.append(save(saved.state, tmp_path)))
    assert saved.losses == losses

    again = Run(7, workers, made_by)
    assert load(again.state, written[0]) == []
    again.train(12)
    assert again.losses == losses[at:]
    assert_equal(again.scheduler.state_dict(), schedule)
    assert_equal(dict(again.net.state_dict()), weights)


@cache
def uninterrupted(workers: int, made_by: type[DataLoader]) -> tuple[list[float], dict, dict]:
    """Losses, schedule and weights of a run of twelve steps."""
    run = Run(0, workers, made_by)
    run.train(12)
    return run.losses, run.scheduler.state_dict(), dict(run.net.state_dict())


def test_it_is_a_state_source():
    assert isinstance(Run(0).state, StateSource)
    assert isinstance(DictState({}), StateSource)


class OneTensor(StateSource):
    """A source that has no more than a source must have."""

    def __init__(self, value: float) -> None:
        self.tensor, self.notes = torch.full((3,), value), ["told"]

    def capture(self):
        return CapturedState(sharded={"": {"own": self.tensor}})

    def target(self, saved):
        return {"": {"own": self.tensor}}

    def apply(self, loaded, saved):
        return self.notes


def test_a_source_of_ones_own_needs_three_methods_and_refuses_every_override(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, OneTensor(1.0)).result()
        other = OneTensor(2.0)
        with pytest.raises(ConfigError, match="of a TrainState, not of a OneTensor"):
            checkpoints.resume(other, override={"lr": 1.0})
        assert torch.equal(other.tensor, torch.full((3,), 2.0))
        assert checkpoints.resume(other) == 1
        assert torch.equal(other.tensor, torch.ones(3))
        checkpoints.save(2, other).result()
        first, second = checkpoints.checkpoints()
    assert second.lineage == first.lineage, "the load took all of it, and the run goes on"
    with pytest.raises(TypeError, match="abstract"):
        StateSource()


def test_capture_draws_no_random_numbers_once_the_loader_runs():
    run = Run(0)
    run.train(2)
    before = rng_state()
    run.state.capture()
    assert_equal(rng_state()["torch"], before["torch"])
    assert_equal(rng_state()["python"], before["python"])


def test_random_numbers_come_back_from_every_generator():
    state = rng_state()
    expected = random.random(), np.random.rand(), torch.rand(3)
    load_rng_state(state)
    assert_equal((random.random(), np.random.rand(), torch.rand(3)), expected)
    with pytest.raises(IncompatibleCheckpointError, match="refused"):
        load_rng_state({**state, "torch": torch.zeros(3, dtype=torch.uint8)})


def test_another_number_of_ranks_says_what_becomes_of_the_data_position(tmp_path, caplog):
    run = Run(0)
    run.train(3)
    written = replace(save(run.state, tmp_path), world_size=4)
    again = Run(1)
    notes = load(again.state, written)
    assert len(notes) == 1
    assert "dataloader: no sampler deals samples to ranks" in notes[0]
    assert "after its own 3 batches" in notes[0]
    assert notes[0] in caplog.text
    assert again.counters.step == 3


def test_a_rank_that_did_not_save_gets_derived_random_numbers(tmp_path):
    run = Run(0)
    written = replace(save(run.state.select(["model", "rng"]), tmp_path), per_rank="{}", world_size=2)
    drawn = []
    for number in (1, 2):
        (note,) = load(Run(number).state.select(["model", "rng"]), written)
        assert "derived" in note
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]


def test_a_loader_without_a_position_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="use a torch DataLoader"):
        TrainState(model=model(), dataloader=[[1, 2, 3]])


@pytest.mark.parametrize(
    "arguments",
    [
        {"counter": 3},
        {"scheduler": object()},
        {"optimizer": "adam"},
        {"model": []},
        {"model": {"a.b": model()}},
    ],
)
def test_what_has_no_state_is_refused(arguments):
    with pytest.raises(ConfigError):
        TrainState(**{"model": model(), **arguments})


@pytest.mark.parametrize("name", ["data_positions", "positions", "seed", "loaders"])
def test_an_item_of_any_name_comes_back_beside_loaders(tmp_path, name):
    saved, loaded = Counters(n=7), Counters(n=0)
    with CheckpointManager(tmp_path) as checkpoints:
        for counters, use in (
            (saved, lambda state: checkpoints.save(1, state).result()),
            (loaded, checkpoints.load),
        ):
            use(TrainState(model=nn.Linear(2, 1), **{"dataloader": DataLoader(range(8)), name: counters}))
    assert loaded == saved


@pytest.mark.parametrize(
    "name",
    [
        *("rng_seed", "dataloader.positions", "scheduler.a", "optimizer.a", "dataloader.a"),
        *(
            "items",
            "pickled",
            "shared",
            "kept_by_rank",
            "param_groups",
            "state",
            "names",
            "rng.seed",
            "scaler.a",
        ),
    ],
)
def test_an_item_of_any_name_comes_back_or_is_refused_at_once(tmp_path, name):
    """No name saves that does not load."""

    def state(value, large):
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        counters = Counters(n=torch.full((1 << 19 if large else 2,), value))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        named = {"optimizer": {"a": optimizer}, "scheduler": {"a": scheduler}, name: counters}
        return TrainState(model=net, dataloader={"a": DataLoader(range(8))}, **named), counters

    taken = name in {"rng_seed", "dataloader.positions", "scheduler.a", "optimizer.a", "dataloader.a"}
    if taken:
        with pytest.raises(ConfigError, match=f"no item can be called {name}"):
            state(7.0, large=False)
        return
    with CheckpointManager(tmp_path) as checkpoints:
        for step, large in enumerate((False, True)):
            (saved, _), (loaded, counters) = state(7.0, large), state(0.0, large)
            checkpoints.save(step, saved).result()
            checkpoints.load(loaded, step=step)
            assert torch.all(counters.n == 7.0)


def test_a_missing_item_is_named_before_anything_is_loaded(tmp_path):
    net = model()
    written = save(TrainState(model=net), tmp_path)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    state = TrainState(
        model=net, optimizer={"a": optimizer}, counters=Counters(), scaler=torch.amp.GradScaler("cpu")
    )
    with pytest.raises(IncompatibleCheckpointError) as caught:
        load(state, written)
    assert caught.value.missing == ["optimizer.a", "scaler", "counters"]
    assert_equal(dict(net.state_dict()), before)


def test_another_model_is_refused_with_both_sides_names(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, TrainState(model=nn.Sequential(nn.Linear(4, 4)))).result()
        with pytest.raises(IncompatibleCheckpointError) as caught:
            checkpoints.resume(TrainState(model=nn.ModuleDict({"fc": nn.Linear(4, 4)})))
    assert sorted(caught.value.missing) == ["model.fc.bias", "model.fc.weight"]
    assert sorted(caught.value.unexpected) == ["model.0.bias", "model.0.weight"]


def test_select_loads_only_what_was_asked_for(tmp_path):
    run = Run(0)
    run.train(2)
    written = save(run.state, tmp_path)
    again = Run(1)
    load(again.state.select(["optimizer", "counters"]), written)
    assert again.counters.step == 2
    assert again.optimizer.state
    assert not torch.equal(again.net[0].weight, run.net[0].weight)
    with pytest.raises(ConfigError, match="no such items: nothing"):
        run.state.select(["nothing"])


class Average:
    """A running average of a model: an item with large tensors."""

    def __init__(self, net: nn.Module, scale: int) -> None:
        self.values = {name: torch.zeros(scale, *p.shape) for name, p in net.named_parameters()}
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        for value in self.values.values():
            value.add_(self.updates)

    def state_dict(self):
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state):
        self.values, self.updates = state["values"], state["updates"]


@pytest.mark.parametrize(("scale", "sharded"), [(1, False), (10_000, True)])
def test_items_go_where_their_size_belongs_and_come_back(tmp_path, scale, sharded):
    net = model()
    average = Average(net, scale)
    average.update()
    state = TrainState(model=net, average=average)
    assert ("items" in state.capture().sharded[""]) is sharded
    assert ("average" in state.capture().shared) is not sharded
    written = save(state, tmp_path)
    fresh = Average(net, scale)
    load(TrainState(model=net, average=fresh), written)
    assert_equal(fresh.state_dict(), average.state_dict())


class Extra(nn.Linear):
    """A module with state that is no tensor."""

    scale: object = None

    def get_extra_state(self):
        return {"scale": self.scale, "history": torch.arange(3) if self.scale else None}

    def set_extra_state(self, state):
        self.scale, self.history = state["scale"], state["history"]


def test_extra_state_of_modules_comes_back(tmp_path):
    net, fresh = Extra(2, 2), Extra(2, 2)
    net.scale = 0.5
    written = save(TrainState(model=net), tmp_path)
    load(TrainState(model=fresh), written)
    assert fresh.scale == 0.5
    assert torch.equal(fresh.history, torch.arange(3))


def test_stock_checkpoints_load_and_say_what_they_lack(tmp_path):
    net = model()
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path)
    fresh = model(1)
    notes = load(TrainState(model=fresh, counters=Counters(step=1)), stock(tmp_path))
    assert_equal(dict(fresh.state_dict()), dict(net.state_dict()))
    assert [note.split(";")[0] for note in notes] == [
        "the checkpoint has no counters",
        "the checkpoint has no states of random number generators",
    ]


def test_schedulers_with_functions_in_their_state_need_no_pickle(tmp_path):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    state = TrainState(model=net, optimizer=optimizer, scheduler=[scheduler, warmup])
    train(net, optimizer, 1)
    warmup.step()
    written = save(state, tmp_path)
    expected = warmup.state_dict()
    train(net, optimizer, 1)
    warmup.step()
    load(state, written)
    assert_equal(warmup.state_dict(), expected)


def test_a_mapping_loads_in_place_as_with_dcp(tmp_path):
    net, fresh = model(), model(1)
    optimizer = torch.optim.AdamW(net.parameters())
    again = torch.optim.AdamW(fresh.parameters())
    train(net, optimizer, 2)
    mapping = {
        "model": net.state_dict(),
        "step": 3,
        "list": [torch.ones(2), {"a": (1, 2)}],
        "optimizer": optimizer,
    }
    written = save(DictState(mapping), tmp_path / "ours")
    dcp.save(mapping, checkpoint_id=tmp_path / "stock")
    entries = dict(saved_state(written).sharded[""])
    del entries["optimizer", "optimizer_class"]  # in which stock has no interest
    assert {"": entries} == saved_state(stock(tmp_path / "stock")).sharded
    for each in (written, stock(tmp_path / "stock")):
        fresh = model(1)
        again = torch.optim.AdamW(fresh.parameters())
        into = {
            "model": fresh.state_dict(),
            "step": 0,
            "list": [torch.zeros(2), {"a": None}],
            "optimizer": again,
        }
        assert load(DictState(into), each) == []
        assert into["step"] == 3
        assert into["list"][1] == {"a": (1, 2)}
        assert into["list"][0].sum() == 2
        assert_equal(dict(fresh.state_dict()), dict(net.state_dict()))
        assert_equal(again.state_dict(), optimizer.state_dict())


def test_a_mapping_loads_only_its_own_keys(tmp_path):
    dcp.save({"a": torch.ones(1), "b": torch.ones(1)}, checkpoint_id=tmp_path)
    into = {"a": torch.zeros(1)}
    load(DictState(into), stock(tmp_path))
    assert into["a"].item() == 1
