"""Faults put into the shipped code, one at a time, without a copy of it."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import pytest

from ckpt_core.dcp import _fingerprints, _tensor_reads
from ckpt_core.devices import _fetching, _streams
from ckpt_core.saving import _stager
from ckpt_core.staging import _device_copies, _overlap
from ckpt_core.state import _rank_buffers

MODULES = [
    _streams,
    _fetching,
    _device_copies,
    _overlap,
    _stager,
    _fingerprints,
    _rank_buffers,
    _tensor_reads,
]
ORDERING = {
    "wait_stream",
    "wait_event",
    "synchronize",
    "record_stream",
    "let_pass",
    "finish",
    "settle",
    "wait_for",
}
"""Methods that order work; a statement that calls one is left out by a mutant, but for copies on the host."""


@dataclass(frozen=True)
class Mutant:
    """A module of ours with one fault."""

    name: str
    module: ModuleType
    source: str

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Let every function of the module behave as the faulty one does."""
        faulty = dict(vars(self.module))
        exec(compile(self.source, str(self.module.__file__), "exec"), faulty)
        with pytest.MonkeyPatch.context() as patch:
            ours, theirs = (
                dict(_functions(vars(self.module), self.module)),
                dict(_functions(faulty, self.module)),
            )
            assert ours.keys() <= theirs.keys()
            for name, function in ours.items():
                patch.setattr(function, "__code__", theirs[name].__code__)
            yield


def _functions(
    names: dict[str, Any], module: ModuleType, prefix: str = ""
) -> Iterator[tuple[str, FunctionType]]:
    for name, value in list(names.items()):
        for each in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
            function = inspect.unwrap(each) if callable(each) else each
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield prefix + name, function
        if inspect.isclass(value) and value.__module__ == module.__name__:
            yield from _functions(dict(vars(value)), module, f"{prefix}{name}.")


def without_a_call() -> Iterator[Mutant]:
    """Yield the modules, each time with another call left out that orders work."""
    for module in MODULES:
        tree = ast.parse(inspect.getsource(module))
        for at in range(len(_calls(tree))):
            changed = copy.deepcopy(tree)
            call = _calls(changed)[at]
            name = f"{module.__name__.rpartition('.')[2]}:{call.lineno} without {ast.unparse(call)}"
            call.value = ast.copy_location(ast.Constant(None), call.value)
            yield Mutant(name, module, ast.unparse(changed))


def _calls(tree: ast.Module) -> list[ast.Expr]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in ORDERING
        and "._host." not in ast.unparse(node)
    ]


def changed(name: str, module: ModuleType, *edits: tuple[str, str]) -> Mutant:
    """Make a mutant by edits of its source, each of which must find its text once."""
    source = inspect.getsource(module)
    for old, new in edits:
        assert source.count(old) == 1, f"{name}: {old!r} is {source.count(old)} times in {module.__name__}"
        source = source.replace(old, new)
    return Mutant(name, module, source)


RECORD = "            events.append(side.record_event())\n"
COPIES = "            for copy in group:\n"
WRONG: list[tuple[Any, ...]] = [
    (
        "events of groups recorded before their copies",
        _device_copies,
        (RECORD, ""),
        (COPIES, RECORD + COPIES),
    ),
    (
        "events recorded on the training's stream",
        _device_copies,
        (
            "    with side, torch.no_grad",
            "    training = current_stream(device)\n    with side, torch.no_grad",
        ),
        ("append(side.record_event", "append(training.record_event"),
    ),
    (
        "copies enqueued on the training's stream",
        _device_copies,
        ("with side, torch.no_grad", "with torch.no_grad"),
    ),
    (
        "the side stream asked to wait for itself",
        _device_copies,
        ("wait_stream(current_stream(device))", "wait_stream(side)"),
    ),
    (
        "the training made to wait for the first group only",
        _device_copies,
        ("wait_event(groups.events[-1])", "wait_event(groups.events[0])"),
    ),
    (
        "the side stream made to wait, not the training's",
        _device_copies,
        ("current_stream(device).wait_event", "side_stream(device).wait_event"),
    ),
    ("a writer that waits for the group before", _device_copies, ("begun - 1", "max(0, begun - 2)")),
    (
        "the group of a slot looked up in the wrong half",
        _device_copies,
        ("bisect_right(groups.slots, slot)", "bisect_right(groups.slots, slot - 1)"),
    ),
    (
        "done when the first group has ended",
        _device_copies,
        ("groups.events[-1].query()", "groups.events[0].query()"),
    ),
    ("done when one device has ended", _device_copies, ("ended = all(", "ended = any(")),
    ("done without a comparison of versions", _device_copies, ("        if ended:\n", "        if False:\n")),
    (
        "the end waited for on the first group",
        _device_copies,
        ("groups.events[-1].synchronize()", "groups.events[0].synchronize()"),
    ),
    (
        "one device forgotten in a group",
        _device_copies,
        ("by_device.setdefault(copy.source.device, [])", "by_device.setdefault(copies[0].source.device, [])"),
    ),
    ("buffers copied without a clone", _stager, ("source.detach().clone()", "source.detach()")),
    (
        "a step that waits for the last save only",
        _stager,
        ("if not each.done] + [deferred]", "if False] + [deferred]"),
    ),
    (
        "host memory with an event recorded before the copies",
        _streams,
        ("    copies = [_to_host(each.detach()) for each in tensors]\n", ""),
        (
            "    return copies, [current_stream(device).record_event() for device in devices]\n",
            "    events = [current_stream(device).record_event() for device in devices]\n    return [_to_host(each.detach()) for each in tensors], events\n",
        ),
    ),
    (
        "host memory with an event of the side stream",
        _streams,
        ("[current_stream(device).record_event()", "[side_stream(device).record_event()"),
    ),
    (
        "a pinned buffer whose events come before its copies",
        _fetching,
        (
            "            try:\n                yield buffer.memory[:size_bytes]\n            finally:\n                buffer.events = [stream.record_event() for stream in self._streams.values()]\n",
            "            buffer.events = [stream.record_event() for stream in self._streams.values()]\n            try:\n                yield buffer.memory[:size_bytes]\n            finally:\n",
        ),
    ),
    (
        "a pinned buffer whose events are those of another stream",
        _fetching,
        (
            "[stream.record_event() for stream in self._streams.values()]",
            "[current_stream(device).record_event() for device in self._streams]",
        ),
    ),
    (
        "a pinned buffer with the event of one device",
        _fetching,
        (
            "for stream in self._streams.values()]\n                self._idle",
            "for stream in list(self._streams.values())[:1]]\n                self._idle",
        ),
    ),
    (
        "a load whose copies are on the current stream",
        _fetching,
        (
            "        with stream:\n            target.copy_(source, non_blocking=plain)",
            "        target.copy_(source, non_blocking=plain)",
        ),
    ),
    (
        "a load that returns before its copies have ended",
        _fetching,
        (
            "    finally:\n        # After an error, too: no copy may reach live memory after the return.\n        fetch.finish()",
            "    finally:\n        pass",
        ),
    ),
    (
        "a load that is not awaited after an error",
        _fetching,
        (
            "    try:\n        yield fetch\n    finally:\n        # After an error, too: no copy may reach live memory after the return.\n        fetch.finish()",
            "    yield fetch\n    fetch.finish()",
        ),
    ),
    (
        "bytes of other ranks copied from the inbox",
        _tensor_reads,
        ("self.target.fill(start, pinned, fetch.place)", "self.target.fill(start, content, fetch.place)"),
    ),
]
