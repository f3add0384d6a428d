from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state import (
    TrainState,
    load_optimizer_state,
    model_state,
    optimizer_state,
    optimizer_target,
    rng_state,
    unwrap_optimizer,
)
from ckpt_core.state._optimizer import probe
from tests.unit.state.round_trip import assert_equal, full, load, save, stock


class Peculiar(torch.optim.Optimizer):
    """State of every kind that is not a tensor of the parameter's shape."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.5), "note": "text"})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, kind="momentum", nothing=None, history=[], nested={"mask": None})
                    state["nested"][7] = {(0, 1): torch.ones(2)}
                    state["nested"]["rows"] = torch.zeros(parameter.shape[0], dtype=torch.float64)
                    state["nested"]["seen"] = torch.zeros(parameter.shape, dtype=torch.int8)
                state["step"] += 1
                state["history"] = [*state["history"][-1:], parameter.grad.clone()]
                state["nested"]["rows"] += parameter.grad.double().reshape(parameter.shape[0], -1).sum(1)
                state["nested"]["seen"] += 1
                state["nested"][7][0, 1] += 1
                scale = state["nested"]["rows"].abs().mean().to(parameter.dtype) + state["step"]
                parameter.sub_(group["lr"] / scale * sum(state["history"]))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "peculiar": Peculiar,
}


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        dtype = next(net.parameters()).dtype
        loss = net(torch.randn(5, 4, generator=generator).to(dtype)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def snapshot(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return full({"model": dict(net.state_dict()), "state": optimizer_state(net, optimizer)["state"]})


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_training_goes_on_bit_for_bit_after_a_load(make, tmp_path):
    net = model()
    optimizer = make(net.parameters())
    train(net, optimizer, 3)
    written = save(TrainState(model=net, optimizer=optimizer), tmp_path)
    train(net, optimizer, 2, first=3)

    fresh = model(seed=1)
    again = make(fresh.parameters())
    load(TrainState(model=fresh, optimizer=again), written)
    train(fresh, again, 2, first=3)
    assert_equal(snapshot(net, optimizer), snapshot(fresh, again))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_load_into_an_optimizer_that_has_gone_on_brings_it_back(make, tmp_path):
    net = model()
    optimizer = make(net.parameters())
    train(net, optimizer, 3)
    written, before = save(TrainState(model=net, optimizer=optimizer), tmp_path), snapshot(net, optimizer)
    train(net, optimizer, 2, first=3)
    load(TrainState(model=net, optimizer=optimizer), written)
    assert_equal(snapshot(net, optimizer), before)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_capture_leaves_a_fresh_optimizer_and_every_generator_untouched(make):
    net, twin = model(), model()
    optimizer, other = make(net.parameters()), make(twin.parameters())
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    steps: list[int] = []
    before = rng_state()
    TrainState(model=net, optimizer=optimizer).capture()
    assert not optimizer.state
    assert not steps
    assert all(p.grad is None for p in net.parameters())
    assert_equal(before["torch"], rng_state()["torch"])
    train(net, optimizer, 2)
    train(twin, other, 2)
    assert_equal(snapshot(net, optimizer), snapshot(twin, other))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_target_leaves_a_fresh_optimizer_untouched(make, tmp_path):
    net = model()
    optimizer = make(net.parameters())
    train(net, optimizer, 1)
    state = optimizer_state(net, optimizer)
    fresh = model()
    again = make(fresh.parameters())
    optimizer_target(fresh, again, {("state", "0.weight", "exp_avg"): None})
    assert not again.state
    assert state["state"].keys() == optimizer_state(net, optimizer)["state"].keys()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embed.weight
        self.body.weight.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


def test_names_are_those_of_torch_whatever_wraps_the_model():
    net = Tied()
    optimizer = torch.optim.AdamW([{"params": [net.head.bias]}, {"params": [net.embed.weight], "lr": 0.1}])
    optimizer.add_param_group({"params": list(net.body.parameters()), "weight_decay": 0.5})
    train(net, optimizer, 1)
    net.body = checkpoint_wrapper(nn.Sequential(torch.compile(net.body, backend="eager")))
    wrapped = torch.compile(net, backend="eager")
    ours, theirs = optimizer_state(wrapped, optimizer), get_optimizer_state_dict(wrapped, optimizer)
    assert ours.pop("optimizer_class") == ["torch.optim.adamw.AdamW"]
    assert_equal(ours, theirs)
    assert_equal(dict(model_state(wrapped)), dict(get_model_state_dict(wrapped)))
    assert ours["state"]["embed.weight"]["exp_avg"] is optimizer.state[net.embed.weight]["exp_avg"]


class Hooking(torch.optim.SGD):
    """Adds a hook to itself in every step, as a profiler or a clipping wrapper may."""

    def __init__(self, parameters, calls):
        super().__init__(parameters, lr=0.1)
        self.calls = calls

    def step(self, closure=None):
        self.register_step_post_hook(lambda *_: self.calls.append("hook"))
        return super().step(closure)


def test_a_probe_leaves_no_hook_to_the_live_optimizer_nor_to_the_next_probe():
    weight, calls = nn.Parameter(torch.zeros(2)), []
    optimizer = Hooking([weight], calls)
    probe(optimizer, weight)
    calls.clear()
    probe(Hooking([weight], []), weight)
    assert calls == []
    assert not optimizer._optimizer_step_post_hooks


def test_tied_and_frozen_parameters_come_back(tmp_path):
    net = Tied()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 2)
    written = save(TrainState(model=net, optimizer=optimizer), tmp_path)
    fresh = Tied()
    again = torch.optim.AdamW(fresh.parameters())
    load(TrainState(model=fresh, optimizer=again), written)
    assert_equal(snapshot(net, optimizer), snapshot(fresh, again))
    assert fresh.head.weight is fresh.embed.weight


def test_a_parameter_that_made_no_step_yet_has_no_state_after_a_load_either(tmp_path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    del optimizer.state[net[0].weight]
    written = save(TrainState(model=net, optimizer=optimizer), tmp_path)
    load(TrainState(model=net, optimizer=optimizer), written)
    assert net[0].weight not in optimizer.state
    assert net[0].bias in optimizer.state


def test_a_checkpoint_from_before_the_first_step_clears_the_state(tmp_path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    written = save(TrainState(model=net, optimizer=optimizer), tmp_path)
    train(net, optimizer, 2)
    load(TrainState(model=net, optimizer=optimizer), written)
    assert not optimizer.state


def test_moments_keep_their_own_dtype(tmp_path):
    def build(seed):
        net = model(seed).to(torch.bfloat16)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        return net, optimizer

    net, optimizer = build(0)
    train(net, optimizer, 1)
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.rand(parameter.shape) / 3
    written = save(TrainState(model=net, optimizer=optimizer), tmp_path)
    fresh, again = build(1)
    load(TrainState(model=fresh, optimizer=again), written)
    assert again.state[fresh[0].weight]["momentum_buffer"].dtype == torch.float32
    assert_equal(snapshot(net, optimizer), snapshot(fresh, again))


def test_a_tensor_learning_rate_is_copied_when_captured():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.5), foreach=False)
    captured = optimizer_state(net, optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert captured["param_groups"][0]["lr"].item() == 0.5


def test_hyperparameters_are_loaded_but_not_how_a_step_is_computed():
    net = model()
    saved = optimizer_state(net, torch.optim.AdamW(net.parameters(), lr=0.5, foreach=True))
    live = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1), foreach=False)
    load_optimizer_state(net, live, saved)
    group = live.param_groups[0]
    assert isinstance(group["lr"], torch.Tensor)
    assert group["lr"].item() == 0.5
    assert group["foreach"] is False


def groups(net: nn.Module, *, swap: bool = False, decay: float = 0.1) -> torch.optim.AdamW:
    parts = [{"params": [net[0].weight, net[3].weight], "weight_decay": decay}]
    parts.append({"params": [net[0].bias, net[1].weight, net[1].bias, net[3].bias], "weight_decay": 0.0})
    return torch.optim.AdamW(parts[::-1] if swap else parts, lr=0.01)


def test_groups_are_matched_by_their_parameters(tmp_path):
    net = model()
    optimizer = groups(net)
    train(net, optimizer, 2)
    written = save(TrainState(model=net, optimizer=optimizer), tmp_path)
    fresh = model(1)
    again = groups(fresh, swap=True)
    load(TrainState(model=fresh, optimizer=again), written)
    assert [group["weight_decay"] for group in again.param_groups] == [0.0, 0.1]
    assert_equal(snapshot(net, optimizer)["state"], dict(snapshot(net, optimizer)["state"]))
    for name, state in optimizer_state(fresh, again)["state"].items():
        assert_equal(full(state), full(optimizer_state(net, optimizer)["state"][name]))


def test_groups_with_equal_hyperparameters_may_be_merged(tmp_path):
    net = model()
    saved = optimizer_state(net, groups(net, decay=0.0))
    merged = torch.optim.AdamW(net.parameters(), lr=0.5, weight_decay=0.7)
    load_optimizer_state(net, merged, saved)
    assert merged.param_groups[0]["weight_decay"] == 0.0


def test_groups_with_different_hyperparameters_may_not():
    net = model()
    saved = optimizer_state(net, groups(net))
    live = torch.optim.AdamW(net.parameters())
    with pytest.raises(IncompatibleCheckpointError, match=r"different weight_decay: 0.weight .* 0.bias"):
        load_optimizer_state(net, live, saved)
    assert live.param_groups[0]["weight_decay"] == 0.01


def test_state_of_unknown_parameters_is_refused_before_anything_is_read(tmp_path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    written = save(TrainState(model=net, optimizer=optimizer), tmp_path)
    part = torch.optim.AdamW(net[0].parameters())
    with pytest.raises(IncompatibleCheckpointError, match=r"3\.weight") as caught:
        load(TrainState(model=net, optimizer=part), written)
    assert caught.value.unexpected == ["1.bias", "1.weight", "3.bias", "3.weight"]


def test_names_that_torch_schedulers_and_users_add_make_no_other_kind(tmp_path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    group = optimizer.param_groups[0]
    del group["decoupled_weight_decay"]  # as of an older release
    group.update(initial_lr=0.1, max_lr=1.0, of_the_user=3)
    written = save(TrainState(model=net, optimizer=optimizer), tmp_path)
    optimizer = torch.optim.AdamW(net.parameters())
    load(TrainState(model=net, optimizer=optimizer), written)
    assert optimizer.param_groups[0]["of_the_user"] == 3


def test_parameters_that_were_not_trained_then_are_named():
    net = model()
    saved = optimizer_state(net, torch.optim.AdamW(net[0].parameters()))
    with pytest.raises(IncompatibleCheckpointError) as caught:
        load_optimizer_state(net, torch.optim.AdamW(net.parameters()), saved)
    assert "3.weight" in caught.value.missing


def test_parameters_outside_of_the_model_are_refused():
    with pytest.raises(ConfigError, match="give every model"):
        optimizer_state(model(), torch.optim.AdamW(model().parameters()))


def test_torchs_flattened_form_is_read(tmp_path):
    net = model()
    optimizer = groups(net)
    train(net, optimizer, 2)
    flat = get_optimizer_state_dict(
        net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    dcp.save({"model": get_model_state_dict(net), "optimizer": flat}, checkpoint_id=tmp_path)
    fresh = model(1)
    again = groups(fresh)
    load(TrainState(model=fresh, optimizer=again), stock(tmp_path))
    assert_equal(snapshot(net, optimizer), snapshot(fresh, again))


class Wrapper(torch.optim.Optimizer):
    """What frameworks hand to users in place of the optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def state(self):
        return self.optimizer.state


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, with state of its own."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def test_wrappers_are_taken_off_but_not_optimizers_with_state_of_their_own():
    inner = torch.optim.AdamW(model().parameters())
    assert unwrap_optimizer(Wrapper(Wrapper(inner))) is inner
    outer = Lookahead(inner)
    assert unwrap_optimizer(outer) is outer
    with pytest.raises(ConfigError, match="expected a torch optimizer"):
        unwrap_optimizer("adam")


def test_one_optimizer_over_two_models(tmp_path):
    def build(seed):
        nets = {"teacher": model(seed), "student": model(seed + 1)}
        return nets, torch.optim.AdamW([p for net in nets.values() for p in net.parameters()])

    nets, optimizer = build(0)
    for net in nets.values():
        train(net, optimizer, 1)
    state = TrainState(model=nets, optimizer=optimizer)
    written = save(state, tmp_path)
    assert "student.0.weight" in state.capture().sharded[""]["optimizer"]["state"]
    fresh, again = build(5)
    loaded = TrainState(model=fresh, optimizer=again)
    load(loaded, written)
    assert_equal(snapshot(state.model, optimizer), snapshot(loaded.model, again))


def test_two_optimizers_over_one_model(tmp_path):
    def build(seed):
        net = model(seed)
        return net, {
            "low": torch.optim.AdamW(net[:2].parameters()),
            "high": torch.optim.SGD(net[3].parameters(), 0.1, 0.9),
        }

    net, optimizers = build(0)
    for optimizer in optimizers.values():
        train(net, optimizer, 2)
    written = save(TrainState(model=net, optimizer=optimizers), tmp_path)
    fresh, again = build(1)
    load(TrainState(model=fresh, optimizer=again), written)
    for name in optimizers:
        assert_equal(snapshot(net, optimizers[name]), snapshot(fresh, again[name]))
