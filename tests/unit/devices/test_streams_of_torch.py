"""The seam to accelerators, as far as it can be tried without one."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch

from ckpt_core.crew import run_all
from ckpt_core.devices import DeviceFetch, _fetching, _streams, fetch_to, has_streams, to_host
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.state import _items, load_rng_state, rng_state
from tests.streams.mutants import MODULES, ORDERING

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (torch.accelerator, "current_accelerator current_stream"),
        (torch.Stream, "wait_stream wait_event record_event synchronize __enter__ __exit__"),
        (torch.Event, "query synchronize"),
        (torch.Tensor, "record_stream"),
        (torch, "get_device_module"),
        (torch.cuda, "device_count get_rng_state set_rng_state is_available is_initialized"),
        (torch.xpu, "device_count get_rng_state set_rng_state is_available is_initialized"),
        (torch.mps, "device_count get_rng_state set_rng_state is_available"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_the_generic_names_of_torch_are_there(owner, names):
    assert [name for name in names.split() if not hasattr(owner, name)] == []


def test_tensors_without_streams_are_copied_at_the_call():
    live = torch.arange(3.0)
    assert not has_streams(live)
    assert not has_streams(torch.empty(2, device="meta"))
    (copy,), events = to_host([live])
    live.add_(1)
    assert copy.tolist() == [0, 1, 2]
    assert events == []
    with fetch_to(set()) as fetch:
        assert fetch is None


def test_the_accelerator_of_torch_is_looked_up_by_its_type(monkeypatch):
    kinds = {"cuda": True, "xpu": True, "mps": False}
    tensor = torch.empty(2, device="meta")
    for kind, streams in kinds.items():
        monkeypatch.setattr(_streams, "accelerator_type", lambda kind=kind: kind)
        monkeypatch.setattr(torch.Tensor, "device", torch.device(kind, 0))
        assert has_streams(tensor) == streams


def test_every_module_that_orders_work_of_devices_is_mutated():
    """So that a call added elsewhere has a mutant, too."""
    names = ORDERING - {"synchronize", "finish", "settle", "wait_for"} | {"record_event", "side_stream"}
    modules = {Path(str(module.__file__)) for module in MODULES}
    sources = {
        path: path.read_text()
        for folder in ("common/ckpt_core", "accelerate_ckpt", "lightning_ckpt")
        for path in (ROOT / folder).rglob("*.py")
    }
    found = {
        path
        for path, source in sources.items()
        if any(f"{name}(" in source for name in names)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names
    }
    assert found - modules == set()


class Ready:
    """A stream and its events, whose work has always ended."""

    def __enter__(self) -> Ready:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def record_event(self) -> Ready:
        return self

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self.ended

    ended = True


@pytest.mark.parametrize("ended", [True, False])
def test_threads_share_a_bounded_number_of_pinned_buffers(monkeypatch, ended):
    made, lent, guard = [], set(), threading.Lock()
    stream = Ready()
    stream.ended = ended
    monkeypatch.setattr(_fetching, "MOST_BUFFERS", 4)
    monkeypatch.setattr(_fetching, "_pinned", lambda size: made.append(size) or memoryview(bytearray(size)))
    monkeypatch.setattr(_fetching, "side_stream", lambda device: stream)
    monkeypatch.setattr(_fetching, "current_stream", lambda device: stream)
    fetch = DeviceFetch([torch.device("cuda", 0)])

    def use(number: int) -> None:
        with fetch.lend(number, 8) as memory:
            with guard:
                assert id(memory.obj) not in lent
                lent.add(id(memory.obj))
            memory[:] = number.to_bytes(8, "little")
            assert bytes(memory) == number.to_bytes(8, "little")
            with guard:
                lent.remove(id(memory.obj))

    run_all(use, range(200), 16)
    assert 1 <= len(made) <= 4


class Module:
    """The module of torch for a kind of accelerator."""

    def __init__(self, *states: int) -> None:
        self.states = [torch.tensor([state], dtype=torch.uint8) for state in states]
        self.used = True

    def device_count(self) -> int:
        return len(self.states)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.used

    def get_rng_state(self, device: int) -> torch.Tensor:
        return self.states[device].clone()

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state


@pytest.fixture
def accelerator(monkeypatch):
    def install(kind: str, *states: int) -> Module:
        module = Module(*states)
        monkeypatch.setattr(_items, "accelerator_type", lambda: kind)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        return module

    return install


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_generators_of_any_accelerator_come_back(accelerator, kind):
    module = accelerator(kind, 3, 4)
    state = rng_state()
    assert [int(each) for each in state[kind]] == [3, 4]
    module.states = [torch.tensor([9], dtype=torch.uint8)] * 2
    assert load_rng_state(state) == []
    assert [int(each) for each in module.states] == [3, 4]


def test_devices_that_were_not_used_are_not_asked(accelerator):
    accelerator("xpu", 3).used = False
    assert set(rng_state()) == {"python", "numpy", "torch"}


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_states_of_another_kind_or_number_of_devices_are_reported(accelerator, kind):
    state = {**rng_state(), "cuda": [torch.tensor([1], dtype=torch.uint8)] * 2}
    module = accelerator(kind, 7)
    there = 1 if kind == "cuda" else 0
    assert load_rng_state(state) == [
        f"the checkpoint has RNG states of 2 CUDA devices per rank; there are {there} here"
    ]
    assert int(module.states[0]) == (1 if kind == "cuda" else 7)


def test_a_state_that_is_none_is_refused():
    with pytest.raises(IncompatibleCheckpointError):
        load_rng_state({**rng_state(), "cuda": 7})
