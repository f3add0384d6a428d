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
from ckpt_core.staging import _overlap
from ckpt_core.state import _items

MODULES = [
    _streams,
    _fetching,
    _overlap,
    _stager,
    _fingerprints,
    _items,
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
EVENTS_OF_HOST = "[current_stream(device).record_event() for device in devices]"
COPIES_TO_HOST = "[_to_host(each.detach()) for each in tensors]"
EVENTS_OF_BUFFER = "[stream.record_event() for stream in self._streams.values()]"
LENT = "            try:\n                yield buffer.memory[:size_bytes]\n            finally:\n"
FETCHED = """\
    try:
        yield fetch
    finally:
        # After an error, too: no copy may reach live memory after the return.
        fetch.finish()
"""
WRONG: list[tuple[Any, ...]] = [
    ("an event before the copies of its group", _overlap, (RECORD, ""), (COPIES, RECORD + COPIES)),
    (
        "events of the training's stream",
        _overlap,
        (
            "    with side, torch.no_grad",
            "    training = current_stream(device)\n    with side, torch.no_grad",
        ),
        ("append(side.record_event", "append(training.record_event"),
    ),
    ("copies on the training's stream", _overlap, ("with side, torch.no_grad", "with torch.no_grad")),
    (
        "a side stream that waits for itself",
        _overlap,
        ("wait_stream(current_stream(device))", "wait_stream(side)"),
    ),
    (
        "a step that waits for the first group",
        _overlap,
        ("wait_event(groups.events[-1])", "wait_event(groups.events[0])"),
    ),
    (
        "a side stream that waits instead of the training's",
        _overlap,
        ("current_stream(device).wait_event", "side_stream(device).wait_event"),
    ),
    (
        "a writer that waits for the group before",
        _overlap,
        ("begun - 1", "max(0, begun - 2)"),
    ),
    (
        "a slot that counts to the group before",
        _overlap,
        ("bisect_right(groups.slots, slot)", "bisect_right(groups.slots, slot - 1)"),
    ),
    (
        "done when the first group is",
        _overlap,
        ("groups.events[-1].query()", "groups.events[0].query()"),
    ),
    ("done when one device is", _overlap, ("ended = all(", "ended = any(")),
    ("done without a look at versions", _overlap, ("        if ended:\n", "        if False:\n")),
    (
        "an end that is that of the first group",
        _overlap,
        ("groups.events[-1].synchronize()", "groups.events[0].synchronize()"),
    ),
    (
        "all copies on one device",
        _overlap,
        ("setdefault(copy.source.device, [])", "setdefault(copies[0].source.device, [])"),
    ),
    ("buffers without a clone", _stager, ("source.detach().clone()", "source.detach()")),
    (
        "a step that waits for the last save",
        _stager,
        ("if not each.done] + [deferred]", "if False] + [deferred]"),
    ),
    (
        "events before copies to the host",
        _streams,
        (f"    copies = {COPIES_TO_HOST}\n", ""),
        (
            f"return copies, {EVENTS_OF_HOST}",
            f"events = {EVENTS_OF_HOST}\n    return {COPIES_TO_HOST}, events",
        ),
    ),
    (
        "events of the side stream for copies to the host",
        _streams,
        (EVENTS_OF_HOST, EVENTS_OF_HOST.replace("current", "side")),
    ),
    (
        "events of a pinned buffer before its copies",
        _fetching,
        (
            f"{LENT}                buffer.events = {EVENTS_OF_BUFFER}\n",
            f"            buffer.events = {EVENTS_OF_BUFFER}\n{LENT}",
        ),
    ),
    (
        "events of a pinned buffer on the training's stream",
        _fetching,
        (EVENTS_OF_BUFFER, "[current_stream(device).record_event() for device in self._streams]"),
    ),
    (
        "events of a pinned buffer on one device",
        _fetching,
        (
            EVENTS_OF_BUFFER,
            EVENTS_OF_BUFFER.replace("self._streams.values()", "[*self._streams.values()][:1]"),
        ),
    ),
    ("a load on the training's stream", _fetching, ("        with stream:\n", "        if True:\n")),
    (
        "a load without a wait after an error",
        _fetching,
        (FETCHED, "    yield fetch\n    fetch.finish()\n"),
    ),
    (
        "bytes of other ranks copied from where they came",
        _tensor_reads,
        ("fill(start, pinned, fetch.place)", "fill(start, content, fetch.place)"),
    ),
]
"""Name, module, and the edits of its source."""
