"""What ranks tell one another: whole after the trip, of declared classes, and never code."""

from __future__ import annotations

import errno
import inspect
import math
import os
import pickle
import random
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_core import errors, messages
from ckpt_core.commit import Occupant, Survey
from ckpt_core.dcp import Outline, Part
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CoordinationError,
    CorruptCheckpointError,
    DeadlineError,
    DivergenceError,
    Failure,
    FileFailure,
    IncompatibleCheckpointError,
    NoRoomError,
    SaveError,
    StagingMemoryError,
)
from ckpt_core.messages import MessageError, decode, encode
from ckpt_core.saving._plan_cache import KeepOwn, Offer
from ckpt_core.types import CheckpointInfo, Lineage

ERRORS = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, CheckpointError) and member.__module__ == errors.__name__
]
FAILURES = {3: "OSError: disk", 11: "KeyError: 'x'"}
CAUSES = {3: Failure(kind="OSError", text="OSError: disk", errno=5, phase="write")}
OF_SAVE = {"step": 7, "phase": "write", "failures": FAILURES, "in_doubt": True}
ATTRIBUTES: dict[type, dict[str, Any]] = {
    CorruptCheckpointError: {"failures": (FileFailure(path="a/b", problem="3 bytes short"),)},
    IncompatibleCheckpointError: {"missing": ("a",), "unexpected": ["b"], "mismatched": ()},
    SaveError: OF_SAVE,
    NoRoomError: {**OF_SAVE, "needed_bytes": 2**50, "free_bytes": None, "free_files": 4},
    DivergenceError: {**OF_SAVE, "differing": {"model.w": [1, 3]}},
    StagingMemoryError: {"needed_bytes": 9, "available_bytes": 8},
    CoordinationError: {"failures": FAILURES, "causes": CAUSES, "in_doubt": True},
    DeadlineError: {"failures": FAILURES, "causes": CAUSES, "awaited": (1, 2), "in_doubt": True},
}


def same(value: object) -> bool:
    there = decode(encode(value))
    return type(there) is type(value) and there == value


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_its_class_with_its_attributes(kind):
    error = kind("step 5: disk full", **ATTRIBUTES.get(kind, {}), rank=3, path="s3://b/step-5")
    there = decode(encode(error))
    assert type(there) is kind
    assert str(there) == "step 5: disk full"
    assert vars(there) == vars(error)
    assert isinstance(there, kind.__mro__[1])


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left"), PermissionError(errno.EACCES, "denied", "/a"), OSError("odd")],
    ids=repr,
)
def test_errors_of_the_system_arrive_with_their_number(error):
    there = decode(encode({"name": error}))["name"]
    assert type(there) is type(error)
    assert (str(there), there.errno, there.filename) == (str(error), error.errno, error.filename)


def test_an_error_of_somebody_elses_arrives_as_what_it_is_one_of():
    class OwnError(CheckpointNotFoundError):
        pass

    there = decode(encode(OwnError("gone", step=4, odd=object())))
    assert (type(there), str(there), vars(there)["step"]) == (CheckpointNotFoundError, "gone", 4)


def test_an_attribute_that_cannot_travel_does_not_keep_the_error_from_it():
    there = decode(encode(SaveError("x", lock=object(), lost=[Canary()], step=3, phase="open")))
    assert (there.step, there.failures, there.phase) == (3, {}, "open")
    assert not hasattr(there, "lock")
    assert not hasattr(there, "lost")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**70,
        -0.0,
        math.inf,
        "\ud800 \x00 é",
        b"",
        b"\x00\xff" * 10,
        (),
        [],
        {},
        frozenset(),
        (1, [2, (3,)], {"a": (b"x", b"y")}),
        {("part", "key"): [None, 1], 3: {"3": 3}},
        pytest.param(frozenset({("", "a"), ("b", "")}), id="a set, which has no order"),
        {"bytes": 3, "tuple": [1]},
    ],
    ids=repr,
)
def test_plain_values_arrive_as_they_were(value):
    assert same(value)


def test_what_is_declared_arrives_as_it_was():
    info = CheckpointInfo(step=3, name="step-3", created=1, metrics={"loss": math.inf}, pinned=None)
    lineage = Lineage(id="a", number=2, ancestry=(("b", 4),))
    survey = Survey(
        committed=[info],
        unreadable={"step-4": CorruptCheckpointError("x", failures=(FileFailure(path="p", problem="q"),))},
        lineage=lineage,
    )
    there = decode(encode(survey))
    assert (there.committed, there.lineage) == ([info], lineage)
    assert same(KeepOwn.ALWAYS)
    assert same(Occupant.TORN)
    assert same(Offer(rank_local=frozenset({("a", "b")}), groups={"p": {("o", 0): [("n",), ()]}}))


def outline_of(tree: dict[str, Any]) -> Outline:
    part = Part()
    part.update(tree)
    return part.local_plan().outline


def test_outlines_arrive_equal():
    tree = {
        "model": {
            "w": torch.zeros(3, 4),
            "scalar": torch.ones((), dtype=torch.bfloat16),
            "empty": torch.zeros(0, 2),
        },
        "optim": {"lr": 0.1, "groups": [{"betas": (0.9, 0.99)}, {"name": "é"}]},
    }
    assert same(outline_of(tree))
    assert decode(encode(outline_of(tree))).paths[3:] == [
        ("optim", "lr"),
        ("optim", "groups", 0, "betas"),
        ("optim", "groups", 1, "name"),
    ]


def test_ten_thousand_mutations_of_an_outline_are_read_or_refused():
    chance, refused = random.Random(11), 0
    honest = encode(outline_of({"model": {f"layer{i}": torch.zeros(2, i) for i in range(4)}, "step": 3}))
    for _ in range(10_000):
        try:
            decode(mutated(honest, chance))
        except MessageError:
            refused += 1
    assert refused > 5_000


def test_bytes_travel_as_they_are():
    assert len(encode({"content": bytes(1 << 20)})) < (1 << 20) + 100


def test_numbers_and_text_of_other_classes_arrive_plain():
    class Text(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "something else"

    assert decode(encode([Text("a"), MappingProxyType({"b": 1}), OrderedDict(c=2)])) == [
        "a",
        {"b": 1},
        {"c": 2},
    ]


class Colour(StrEnum):
    RED = "red"


@dataclass
class Point:
    x: int = 0


class Canary:
    """Executed if anything unpickles it."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('CODE RAN')",)


@pytest.mark.parametrize(
    "value",
    [Canary(), Colour.RED, Point(), object, len, {1, 2}, KeyError("x"), range(3), Ellipsis, np.float32(1)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("around", [lambda v: v, lambda v: {"a": [(v,)]}, lambda v: {v.__class__: (v,)}])
def test_what_is_not_plain_is_refused_by_name(value, around):
    with pytest.raises(MessageError, match=r"cannot go to other ranks: only numbers"):
        encode(around(value))


def test_the_refusal_says_where_it_is():
    with pytest.raises(MessageError, match=r"Point \(\['metrics'\]\[1\]\) cannot go"):
        encode({"metrics": [1, Point()]})


def test_what_is_nested_too_deep_is_refused():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MessageError, match="nested too deep"):
        encode(deep)


class Call:
    """Pickled as a call of something by its name."""

    def __init__(self, made: Any, *arguments: Any) -> None:
        self.made = made
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return self.made, self.arguments


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        pickle.dumps(Canary()),
        pickle.dumps({"value": [Canary()]}, protocol=0),
        pickle.dumps(Call(os.system, "exit 3")),
        pickle.dumps(Call(eval, "1")),
        pickle.dumps(Call(getattr, "x", "upper")),
        pickle.dumps(Call(messages.decode, b"")),
        pickle.dumps(Call(messages._error, "Any", "x", {})),
        pickle.dumps(Call(messages._error, "dataclass", "x", {})),
        pickle.dumps(errors.SaveError),
        pickle.dumps(CheckpointInfo),
        pickle.dumps(CheckpointInfo(step=3, name="step-3", created=1.5)),
        pickle.dumps(KeepOwn),
        b"cckpt_core.types\nCheckpointInfo\n(N(dVusable\nI01\nstb.",
        pickle.dumps(Call(bytes, 2**62), protocol=3),
        pickle.dumps(Call(bytearray, 2**62), protocol=3),
        b"\x80\x03Kr\xff\xff\xff\x7f.",
        b"\x80\x03B\xff\xff\xff\x7fx.",
        b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\x00\x00x.",
        b"\x80\x03" + b"]" * 200_000,
        pickle.dumps(torch.zeros(1)),
        pickle.dumps(Point(3)),
        b"cckpt_core.errors\nCheckpointError.__init__.__globals__\n.",
        b"cckpt_core.messages\nio.open\n.",
        b"\x80\x05(lp0\n0",
    ],
    ids=lambda content: repr(content[-40:]),
)
def test_what_no_rank_wrote_calls_nothing(content):
    with pytest.raises(MessageError):
        decode(content)


def mutated(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(len(changed))
        match chance.randrange(4):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at : at + chance.randrange(9)] = b""
            case 2:
                changed[at:at] = chance.choice((b"{", b"[", b'"', b"-", b"9", b"null", b"1e999", b"\x00"))
            case _:
                del changed[at:]
        if not changed:
            break
    return bytes(changed)


def test_ten_thousand_mutations_are_read_or_refused():
    chance, refused = random.Random(7), 0
    error = CoordinationError("x", failures=FAILURES, causes=CAUSES)
    info = CheckpointInfo(step=3, name="step-3", created=1.5, lineage=Lineage(ancestry=(("a", 1),)))
    honest = [
        encode(value)
        for value in (
            error,
            {"info": [info, KeepOwn.NEVER], ("a", 1): frozenset({1})},
            Offer(rank_local=frozenset({("", "a")})),
            (b"12345", "name"),
        )
    ]
    for number in range(10_000):
        try:
            decode(mutated(honest[number % len(honest)], chance))
        except MessageError:
            refused += 1
    assert refused > 5_000
