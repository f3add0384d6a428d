"""An overlapped save holds the state of the moment of the call, whatever the training does right after it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckpt_core import CheckpointManager, SaveError, TrainState
from ckpt_core.staging import _copies

TENSORS = 40
LONG = 60.0


@pytest.fixture
def held(monkeypatch):
    """Keeps the thread that copies from beginning until it is set: whoever needs a copy has to make it."""
    begin, start = threading.Event(), _copies.start_thread

    def start_later(work: Callable[[], None]) -> bool:
        return start(lambda: begin.wait(LONG) and work())

    monkeypatch.setattr(_copies, "start_thread", start_later)
    yield begin
    begin.set()


def training():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(TENSORS)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def step(model, optimizer):
    model(torch.randn(8, 64)).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def values(model, optimizer):
    tensors = [value.clone() for value in model.state_dict().values()]
    return tensors + [v.clone() for s in optimizer.state.values() for v in s.values()]


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_training_that_changes_everything_after_the_call_does_not_reach_the_checkpoint(tmp_path):
    model, optimizer = training()
    state = TrainState(model=model, optimizer=optimizer)
    moments = {}
    with CheckpointManager(tmp_path, staging="overlapped") as checkpoints:
        for number in range(1, 9):
            step(model, optimizer)
            moments[number] = values(model, optimizer)
            checkpoints.save(number, state)
            model(torch.randn(8, 64))  # batch-norm statistics move on before the next step
        for number, expected in moments.items():
            checkpoints.load(state, step=number)
            assert same(values(model, optimizer), expected), f"step {number}"


def ema_of(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


def change_by_step(model, optimizer, ema):
    step(model, optimizer)


def change_batch_norm(model, optimizer, ema):
    model(torch.randn(8, 64))


def change_ema(model, optimizer, ema):
    ema.update_parameters(model)


def change_gradients(model, optimizer, ema):
    model(torch.randn(8, 64)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.zero_grad(set_to_none=True)


def change_parameter_set(model, optimizer, ema):
    extra = nn.Parameter(torch.ones(3))
    model.register_parameter("extra", extra)
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    extra.grad = torch.ones(3)
    optimizer.step()


def change_what_is_trained(model, optimizer, ema):
    next(model.parameters()).requires_grad_(requires_grad=False)
    step(model, optimizer)


def change_by_replacing(model, optimizer, ema):
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)  # another storage: the copied one stays as it is
    step(model, optimizer)


def change_learning_rate(model, optimizer, ema):
    optimizer.param_groups[0]["lr"] = 7.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        change_by_step,
        change_batch_norm,
        change_ema,
        change_gradients,
        change_parameter_set,
        change_what_is_trained,
        change_by_replacing,
        change_learning_rate,
    ],
)
def test_what_changes_right_after_the_call_does_not_reach_the_checkpoint(tmp_path, held, change):
    model, optimizer = training()
    ema = ema_of(model)
    step(model, optimizer)
    expected, average = values(model, optimizer), [v.clone() for v in ema.state_dict().values()]
    with CheckpointManager(tmp_path, staging="overlapped") as checkpoints:
        checkpoints.save(1, TrainState(model=model, optimizer=optimizer, ema=ema))
        change(model, optimizer, ema)
        held.set()
        checkpoints.wait()
        model, optimizer = training()
        ema = ema_of(model)
        checkpoints.load(TrainState(model=model, optimizer=optimizer, ema=ema), step=1)
    assert same(values(model, optimizer), expected)
    assert same(list(ema.state_dict().values()), average)
    assert optimizer.param_groups[0]["lr"] == 0.1


def swap(model):
    for parameter in model.parameters():
        parameter.data.copy_(torch.full_like(parameter, 3.0))


def test_weights_swapped_through_data_after_wait_staged_do_not_reach_the_checkpoint(tmp_path, held):
    model, optimizer = training()
    step(model, optimizer)
    expected = values(model, optimizer)
    state = TrainState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path, staging="overlapped") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait_staged()
        swap(model)
        held.set()
        checkpoints.load(state, step=1)
    assert same(values(model, optimizer), expected)


@pytest.mark.slow
def test_wait_staged_guards_every_save_in_flight_and_so_does_a_step(tmp_path, held):
    model, optimizer = training()
    step(model, optimizer)
    state = TrainState(model=model, optimizer=optimizer)
    for guard in ("wait_staged", "step"):
        expected = values(model, optimizer)
        with CheckpointManager(tmp_path / guard, staging="overlapped", arenas=2) as checkpoints:
            checkpoints.save(1, state)
            checkpoints.save(2, state)  # no step between them
            if guard == "step":
                step(model, optimizer)
            else:
                checkpoints.wait_staged()
                swap(model)
            held.set()
            for number in (1, 2):
                checkpoints.load(state, step=number)
                assert same(values(model, optimizer), expected), (guard, number)
        held.clear()


def test_without_overlap_there_is_nothing_to_wait_for(tmp_path):
    model, optimizer = training()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.wait_staged()
        checkpoints.save(1, TrainState(model=model, optimizer=optimizer))
        checkpoints.wait_staged()


def test_a_save_spoilt_by_another_change_is_reported_and_the_next_one_succeeds(tmp_path, held):
    model, optimizer = training()
    state = TrainState(model=model, optimizer=optimizer)
    step(model, optimizer)
    with CheckpointManager(tmp_path, staging="overlapped") as checkpoints:
        checkpoints.save(1, state)
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        held.set()
        with pytest.raises(SaveError, match="staging") as failed:
            checkpoints.wait()
        assert failed.value.phase == "stage"
        assert checkpoints.checkpoints() == []
        checkpoints.save(2, state)
    assert [info.step for info in checkpoints.checkpoints()] == [2]
