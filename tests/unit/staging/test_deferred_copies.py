from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from ckpt_core.errors import CheckpointError
from ckpt_core.staging import Copy, DeferredCopies, _copies
from ckpt_core.staging._copies import PIECE_BYTES, pieces_of

LONG = 30.0
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64),
    *(torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16),
]


class Gate(torch.Tensor):
    """A slot that nothing can be copied into before it is opened; the copy then fails if told to."""

    opened: threading.Event
    reached: threading.Event
    broken = False

    @staticmethod
    def new() -> Gate:
        # Of another dtype than its source, so that torch copies it as a whole.
        gate = torch.zeros(1, dtype=torch.float64).as_subclass(Gate)
        gate.opened, gate.reached = threading.Event(), threading.Event()
        return gate

    def copy_(self, *_: object, **__: object) -> Gate:
        self.reached.set()
        assert self.opened.wait(LONG)
        if self.broken:
            raise OSError("memory is broken")
        return self


def behind(gate: Gate, name: str, source: torch.Tensor, target: torch.Tensor) -> DeferredCopies:
    copies = DeferredCopies([Copy("gate", torch.zeros(1), gate), Copy(name, source, target)])
    assert gate.reached.wait(LONG)
    return copies


def no_thread(work: object) -> bool:
    """As when the interpreter is ending."""
    return False


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (70_000,), (300, 700), (2, 300, 200)])
def test_every_dtype_and_shape_is_copied_exactly(dtype, shape):
    source = torch.randint(0, 2, shape).to(dtype)
    target = torch.zeros(shape, dtype=dtype)
    DeferredCopies([Copy("w", source, target)]).finish()
    assert torch.equal(
        target.view(torch.uint8) if shape else target, source.view(torch.uint8) if shape else source
    )


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.T,
        lambda base: base[::2, 5:],
        lambda base: base[:, 3],
        lambda base: base[7:].expand(2, -1, -1),
        lambda base: base.to(torch.complex64).conj(),
    ],
)
def test_views_of_any_layout_are_copied_exactly(view):
    source = view(torch.randn(400, 500))
    target = torch.zeros(source.shape, dtype=source.dtype)
    DeferredCopies([Copy("w", source, target)]).finish()
    assert torch.equal(target, source)


def test_a_tensor_of_many_pieces_is_copied_whole():
    source = torch.randint(0, 255, (5 * PIECE_BYTES // 2 + 3,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    copies = [Copy("w", source, target)]
    assert len(list(pieces_of(copies))) == 3
    DeferredCopies(copies).finish()
    assert torch.equal(target, source)


def test_small_tensors_are_copied_in_batches():
    copies = [Copy(str(n), torch.full((10,), n), torch.zeros(10, dtype=torch.int64)) for n in range(3000)]
    assert len(list(pieces_of(copies))) == 3
    DeferredCopies(copies).finish()
    assert all(torch.equal(copy.source, copy.target) for copy in copies)


def test_nothing_to_copy_is_done_at_once():
    copies = DeferredCopies([])
    assert copies.done
    copies.wait()
    copies.finish()


def test_copies_begin_without_anybody_asking():
    gate = Gate.new()
    copies = behind(gate, "w", torch.ones(3), torch.zeros(3))
    gate.opened.set()
    copies.finish()
    assert copies.done


def test_whoever_waits_copies_what_is_left_instead_of_idling():
    """The thread is held at its first piece; all the others are made by the one who waits."""
    gate, last = Gate.new(), Gate.new()
    sources = [torch.full((40_000,), n) for n in range(20)]
    targets = [torch.zeros_like(source) for source in sources]
    between = [Copy("w", *pair) for pair in zip(sources, targets, strict=True)]
    ends = [Copy("gate", torch.zeros(1), each) for each in (gate, last)]
    copies = DeferredCopies([ends[0], *between, ends[1]])
    assert gate.reached.wait(LONG)
    helper = threading.Thread(target=copies.wait)
    helper.start()
    assert last.reached.wait(LONG)
    assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=True))
    assert not copies.done
    for each in (gate, last):
        each.opened.set()
    helper.join(LONG)
    assert copies.done


def test_a_step_waits_for_a_piece_that_another_thread_is_copying():
    gate, source, target = Gate.new(), torch.zeros(40_000), torch.full((40_000,), -1.0)
    copies = behind(gate, "w", source, target)
    stepped = threading.Event()

    def train() -> None:
        copies.wait()
        source.add_(1)
        stepped.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert not stepped.wait(0.05)
    gate.opened.set()
    thread.join(LONG)
    assert stepped.is_set()
    assert torch.all(target == 0)
    copies.finish()


def test_an_error_in_the_copying_thread_reaches_finish_and_nobody_hangs():
    gate = Gate.new()
    gate.broken = True
    copies = behind(gate, "w", torch.ones(3), torch.zeros(3))
    gate.opened.set()
    copies.wait()
    assert copies.done
    with pytest.raises(OSError, match="memory is broken"):
        copies.finish()


def test_an_error_of_whoever_helps_fails_the_save_and_not_the_training(monkeypatch):
    monkeypatch.setattr(_copies, "start_thread", no_thread)
    gate = Gate.new()
    gate.broken = True
    gate.opened.set()
    copies = DeferredCopies([Copy("gate", torch.zeros(1), gate)])
    copies.wait()
    with pytest.raises(OSError, match="memory is broken"):
        copies.finish()


def test_an_interruption_of_whoever_helps_goes_on_and_leaves_nobody_waiting(monkeypatch):
    class Interrupted(Gate):
        def copy_(self, *_: object, **__: object) -> Gate:
            raise KeyboardInterrupt

    monkeypatch.setattr(_copies, "start_thread", no_thread)
    target = torch.zeros(1, dtype=torch.float64).as_subclass(Interrupted)
    copies = DeferredCopies([Copy("w", torch.zeros(1), target)])
    with pytest.raises(KeyboardInterrupt):
        copies.wait()
    with pytest.raises(KeyboardInterrupt):
        copies.finish()
    # Of the thread that writes: it is not interrupted, and the save fails.
    assert isinstance(copies.settle(), KeyboardInterrupt)


def test_a_change_outside_the_step_is_never_saved_as_a_mixture():
    gate, source = Gate.new(), torch.zeros(4)
    copies = behind(gate, "layer.weight", source, torch.zeros(4))
    source.add_(1)
    gate.opened.set()
    with pytest.raises(CheckpointError, match=r"1 tensor.*layer\.weight.*wait_staged.*blocking"):
        copies.finish()


def test_a_change_after_the_copies_are_made_does_no_harm():
    source, target = torch.zeros(4), torch.ones(4)
    copies = DeferredCopies([Copy("w", source, target)])
    copies.wait()
    source.add_(1)
    copies.finish()
    assert torch.all(target == 0)


def test_sources_are_let_go_when_the_copies_are_made():
    source = torch.zeros(40_000)
    gone = weakref.ref(source)
    copies = DeferredCopies([Copy("w", source, torch.zeros(40_000))])
    copies.finish()
    del source
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_copies_are_made_while_the_interpreter_ends():
    """Where no thread can be started any more, whoever waits makes them."""
    code = """
import atexit, torch
from ckpt_core.staging import Copy, DeferredCopies
source, target = torch.ones(50_000_000, dtype=torch.uint8), torch.zeros(50_000_000, dtype=torch.uint8)
def last():
    copies = DeferredCopies([Copy("w", source, target)])
    copies.finish()
    assert torch.equal(source, target)
    print("copied")
atexit.register(last)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "copied"


def test_numpy_sees_the_same_bytes_as_torch():
    source = torch.randn(100_000).to(torch.bfloat16)
    target = torch.zeros_like(source)
    DeferredCopies([Copy("w", source, target)]).finish()
    assert np.array_equal(source.view(torch.int16).numpy(), target.view(torch.int16).numpy())


def test_slots_are_written_while_later_ones_are_still_copied():
    gate = Gate.new()
    small = [Copy("s", torch.full((10,), n), torch.zeros(10, dtype=torch.int64), n) for n in range(3)]
    large = [Copy("l", torch.full((40_000,), n), torch.zeros(40_000, dtype=torch.int64), n) for n in (3, 4)]
    passed = torch.zeros(3 * PIECE_BYTES, dtype=torch.uint8)
    copies = DeferredCopies(
        [*small, *large, Copy("p", passed + 1, passed, 5), Copy("gate", torch.zeros(1), gate, 6)]
    )
    copies.wait_for(5)
    assert not copies.done
    assert all(torch.equal(each.source, each.target) for each in (*small, *large))
    assert passed.all()
    gate.opened.set()
    copies.wait_for(6)
    assert copies.done


def test_whoever_wants_to_know_is_told_once_when_nothing_is_copied_any_more():
    gate, told = Gate.new(), []
    copies = behind(gate, "w", torch.ones(3), torch.zeros(3))
    copies.when_done(told.append)
    assert told == []
    gate.opened.set()
    copies.finish()
    assert told == [None]
    copies.when_done(told.append)
    assert told == [None, None]


def test_whoever_wants_to_know_is_told_of_a_failure():
    gate, told = Gate.new(), []
    gate.broken = True
    copies = behind(gate, "w", torch.ones(3), torch.zeros(3))
    copies.when_done(told.append)
    gate.opened.set()
    copies.wait_for(1)
    (error,) = told
    assert isinstance(error, OSError)
    assert isinstance(copies.settle(), OSError)
