"""The thread that asks the store: it ends with its channel, and a hanging store holds up no one."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_core.coordination._channel import Channel
from ckpt_core.coordination._talks import StoreThread
from ckpt_core.errors import CoordinationError, DeadlineError

LONG = 30.0


def soon() -> float:
    return time.monotonic() + LONG


def asked(store: Any) -> tuple[StoreThread, threading.Thread]:
    """A thread that has answered a question."""
    store_thread = StoreThread(store)
    return store_thread, store_thread.ask(lambda _: threading.current_thread(), soon())


def test_a_closed_thread_has_ended_and_has_dropped_its_store():
    store = dist.HashStore()
    store_thread, thread = asked(store)
    dropped = weakref.ref(store)
    del store
    assert dropped() is not None
    for _ in range(2):
        store_thread.close()
        assert not thread.is_alive()
    assert dropped() is None


def test_a_thread_that_was_never_closed_ends_when_its_owner_is_collected():
    store_thread, thread = asked(dist.HashStore())
    del store_thread
    gc.collect()
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_channel_that_never_asked_has_no_thread():
    before = set(threading.enumerate())
    channel = Channel(dist.HashStore(), 0, 2)
    assert set(threading.enumerate()) == before
    channel.close()


def test_a_question_after_close_is_refused_with_the_reason():
    channel = Channel(dist.HashStore(), 0, 1)
    channel.close()
    with pytest.raises(CoordinationError, match="closed its connection to the job's store"):
        channel.commit_barrier("save/1", 1, sum, LONG)


def test_close_does_not_wait_for_an_answer_that_never_comes():
    answers = threading.Event()
    store_thread = StoreThread(dist.HashStore(), 0.05)
    threads: list[threading.Thread] = []

    def hang(_: Any) -> None:
        threads.append(threading.current_thread())
        answers.wait(LONG)

    with pytest.raises(DeadlineError, match="has not answered"):
        store_thread.ask(hang, time.monotonic() + 0.05)
    store_thread.close()
    assert not answers.is_set()
    answers.set()
    threads[0].join(LONG)
    assert not threads[0].is_alive(), "it ends once the store answers"
