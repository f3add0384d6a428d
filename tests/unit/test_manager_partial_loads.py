"""Loading a part of a checkpoint, under other names, into another dtype; what is said if it does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_core import CheckpointManager, Counters, TrainState
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError


class Net(nn.Module):
    def __init__(self, body: str = "body", *, head: int = 2) -> None:
        super().__init__()
        self.add_module(body, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        self.head = nn.Linear(4, head)
        self.body_name = body

    def forward(self, x):
        return self.head(getattr(self, self.body_name)(x))


class Run:
    def __init__(self, seed: int, body: str = "body", *, head: int = 2) -> None:
        torch.manual_seed(seed)
        self.model = Net(body, head=head)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=seed / 10)
        self.epoch = Counters(epoch=seed)
        self.state = TrainState(model=self.model, optimizer=self.optimizer, epoch=self.epoch)

    def step(self) -> Run:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 3)).sum().backward()
        self.optimizer.step()
        return self

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def moments(self) -> list[torch.Tensor]:
        return [state["exp_avg"].clone() for state in self.optimizer.state.values()]


def same(one, other) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def saved(tmp_path):
    run = Run(1).step()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, run.state)
    return run


@pytest.fixture
def load(tmp_path, saved):
    def load(state, **options):
        with CheckpointManager(tmp_path) as checkpoints:
            return checkpoints.load(state, **options)

    return load


def test_patterns_choose_what_is_loaded(load, saved):
    run = Run(2).step()
    before, moments, generator = run.values(), run.moments(), torch.get_rng_state()
    load(run.state, include=["model.body.*"])
    after = run.values()
    for name in after:
        expected = saved.values() if name.startswith("body.") else before
        assert torch.equal(after[name], expected[name]), name
    assert all(map(torch.equal, run.moments(), moments))
    assert run.epoch.epoch == 2
    assert torch.equal(torch.get_rng_state(), generator)


def test_weights_alone_are_one_item(load, saved):
    run = Run(2).step()
    moments = run.moments()
    load(run.state, items=["model"])
    assert same(run.values(), saved.values())
    assert all(map(torch.equal, run.moments(), moments))


def test_a_pattern_that_fits_nothing_is_refused(load):
    run = Run(2)
    before = run.values()
    with pytest.raises(ConfigError, match=r"nothing in the checkpoint is called 'model\.bdoy\.\*'"):
        load(run.state, include=["model.bdoy.*"])
    assert same(run.values(), before)


def test_an_optimizer_is_loaded_whole_or_not_at_all(load):
    with pytest.raises(ConfigError, match="whole or not"):
        load(Run(2).state, include=["optimizer.state.*"])


def test_renamed_modules_take_their_optimizer_state_along(load, saved):
    run = Run(2, "encoder").step()
    load(run.state, rename={"body": "encoder"})
    assert same(
        {name.replace("encoder.", "body."): value for name, value in run.values().items()}, saved.values()
    )
    assert all(map(torch.equal, run.moments(), saved.moments()))
    assert run.epoch.epoch == 1


def test_a_name_to_rename_that_is_not_there_is_refused(load):
    with pytest.raises(ConfigError, match="'bodies'"):
        load(Run(2).state, rename={"bodies": "encoder"})


def test_two_entries_never_get_one_name(load):
    with pytest.raises(ConfigError, match="two entries"):
        load({"model": {}}, rename={"body.0.weight": "x", "body.1.weight": "x"})


def test_without_renaming_another_model_is_told_in_full(load):
    run = Run(2, "encoder")
    before = run.values()
    with pytest.raises(IncompatibleCheckpointError) as caught:
        load(run.state)
    assert "encoder.0.weight" in " ".join(caught.value.missing)
    assert "body.0.weight" in " ".join(caught.value.unexpected)
    assert same(run.values(), before)


def test_what_does_not_fit_is_left_and_told_if_not_strict(load, saved, caplog):
    run = Run(2, head=5)
    before = run.values()
    result = load(run.state, items=["model"], strict=False)
    after = run.values()
    for name in after:
        expected = before if name.startswith("head.") else saved.values()
        assert torch.equal(after[name], expected[name]), name
    assert sorted(line.partition(":")[0] for line in result.left) == ["model.head.bias", "model.head.weight"]
    assert "model.head.weight: shape (5, 4) here, (2, 4) in the checkpoint" in caplog.text


def test_missing_and_unexpected_entries_are_left_and_told_if_not_strict(load, saved):
    run = Run(2, "encoder")
    before = run.values()
    result = load(run.state, items=["model"], strict=False)
    assert torch.equal(run.model.head.weight, saved.model.head.weight)
    assert torch.equal(run.model.encoder[0].weight, before["encoder.0.weight"])
    assert "the checkpoint lacks model.encoder.0.weight" in result.left
    assert "the training state lacks model.body.0.weight" in result.left


def test_plain_values_that_are_missing_are_left_in_a_mapping_if_not_strict(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2), "n": 1})
        live = {"w": torch.zeros(2), "n": 0, "new": 7}
        with pytest.raises(IncompatibleCheckpointError):
            checkpoints.load(live, step=1)
        assert live["w"].tolist() == [0, 0]
        result = checkpoints.load(live, step=1, strict=False)
    assert (live["w"].tolist(), live["n"], live["new"]) == ([1, 1], 1, 7)
    assert list(result.left) == ["the checkpoint lacks new"]


def test_another_dtype_is_cast_only_if_asked_for(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.tensor([1.0, 2.5])})
        live = {"w": torch.zeros(2, dtype=torch.bfloat16)}
        with pytest.raises(IncompatibleCheckpointError, match="bfloat16 here, torch"):
            checkpoints.load(live, step=1)
        assert live["w"].tolist() == [0, 0]
        checkpoints.load(live, step=1, cast=True)
    assert live["w"].tolist() == [1, 2.5]
    assert live["w"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"include": "model.*"}, "include must be a list"),
        ({"include": [1]}, "include must be a list"),
        ({"rename": {"a": 1}}, "rename must be a mapping"),
        ({"rename": {"a.": "b"}}, "without a dot at either end"),
        ({"strict": 1}, "strict must be true or false"),
        ({"cast": "yes"}, "cast must be true or false"),
        ({"items": "model"}, "items must be a list"),
    ],
    ids=["text", "number", "rename", "dot", "strict", "cast", "items"],
)
def test_wrong_arguments_are_named(load, options, words):
    with pytest.raises(ConfigError, match=words):
        load(Run(2).state, **options)


def test_without_strict_an_optimizer_takes_what_there_is_and_the_rest_starts_afresh(tmp_path):
    saved = nn.ModuleDict({"a": nn.Linear(2, 2), "old": nn.Linear(2, 2)})
    live = nn.ModuleDict({"a": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
    optimizers = [torch.optim.AdamW(net.parameters(), lr=lr) for net, lr in ((saved, 0.5), (live, 0.1))]
    for parameter in saved.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    before = live["new"].weight.detach().clone()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, TrainState(model=saved, optimizer=optimizers[0])).result()
        state = TrainState(model=live, optimizer=optimizers[1])
        with pytest.raises(IncompatibleCheckpointError, match=r"strict=False"):
            checkpoints.load(state)
        checkpoints.load(state, strict=False)
    assert torch.equal(live["a"].weight, saved["a"].weight)
    assert torch.equal(live["new"].weight, before)
    assert len(optimizers[1].state) == 2
    assert optimizers[1].param_groups[0]["lr"] == 0.5


def test_without_strict_an_optimizer_that_was_not_saved_is_left(tmp_path):
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, TrainState(model=nn.Linear(2, 2))).result()
        checkpoints.load(TrainState(model=net, optimizer=optimizer), strict=False)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("size", [1, 1 << 19])
def test_a_state_without_an_item_loads_the_others_whatever_its_size(tmp_path, size):
    """Large items are stored with the tensors, which is no reason to demand them."""

    def state(**items):
        return TrainState(model=nn.Linear(2, 2), rng=False, **items)

    kept, left = Counters(value=torch.ones(size)), Counters(value=torch.ones(size))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(kept=kept, left=left))
        found = Counters(value=torch.zeros(size))
        manager.load(state(kept=found))
        assert torch.equal(found.value, kept.value)
        manager.load(state())
