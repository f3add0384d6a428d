"""Ranks are threads here, over a store of this process and gloo."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from ckpt_core.coordination import Talk, Talks
from tests.kit.talks import LONG, talks_of


@pytest.fixture
def pair() -> Iterator[list[Talks]]:
    made = talks_of(2)
    yield made
    for each in made:
        each.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("ckpt-talk")]


def echo(talk: Talk) -> None:
    while (word := talk.hear()) is not None:
        talk.tell(word)


def test_many_talks_at_once_are_never_mixed_up(pair):
    for each in pair:
        each.answer_with(echo)

    def chat(number: int) -> list[Any]:
        with pair[number % 2].begin(1 - number % 2) as talk:
            heard = []
            for word in range(20):
                talk.tell((number, word))
                heard.append(talk.hear())
            talk.tell(None)
        return heard

    with ThreadPoolExecutor(8) as pool:
        for number, heard in enumerate(pool.map(chat, range(8))):
            assert heard == [(number, word) for word in range(20)]


@pytest.mark.parametrize("sizes", [[], [0], [1], [7, 0, 1 << 15], [5, 0, 1 << 20], [1 << 20] * 3])
def test_bytes_arrive_as_they_were_given_in_both_directions_at_once(pair, sizes):
    def back(talk: Talk) -> None:
        pieces = talk.take(lambda size: memoryview(bytearray(size)))
        talk.give(pieces)

    for each in pair:
        each.answer_with(back)
    sent = [memoryview(bytes([place + 1]) * size) for place, size in enumerate(sizes)]

    def send(rank: int) -> list[bytes]:
        with pair[rank].begin(1 - rank) as talk:
            talk.give(sent)
            return [bytes(piece) for piece in talk.take(lambda size: memoryview(bytearray(size)))]

    with ThreadPoolExecutor(6) as pool:
        for got in pool.map(send, [0, 1] * 3):
            assert got == [bytes(piece) for piece in sent]


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(errno.ENOENT, "gone", "x"), OSError(errno.ENOSPC, "full"), PermissionError(13, "no")],
)
def test_an_error_told_instead_of_an_answer_is_raised_where_it_is_awaited(pair, error):
    pair[1].answer_with(lambda talk: talk.tell(error))
    for await_answer in (
        Talk.hear,
        lambda talk: talk.give([memoryview(bytes(1 << 17))]),
        lambda talk: talk.take([]),
    ):
        with pair[0].begin(1) as talk:
            talk.tell("?")
            with pytest.raises(type(error)) as caught:
                await_answer(talk)
        assert (caught.value.errno, caught.value.filename) == (error.errno, error.filename)


def test_a_side_that_fails_ends_the_talk_for_the_other(pair):
    told: list[BaseException] = []
    ended = threading.Event()

    def listen(talk: Talk) -> None:
        try:
            echo(talk)
        except OSError as error:
            told.append(error)
            ended.set()

    pair[1].answer_with(listen)
    with suppress(ZeroDivisionError), pair[0].begin(1) as talk:
        talk.tell("?")
        talk.hear()
        raise ZeroDivisionError
    assert ended.wait(LONG)
    assert "rank 0 ended the talk" in str(told[0])

    def fail(talk: Talk) -> None:
        talk.hear()
        raise ValueError

    pair[1].answer_with(fail)
    with pair[0].begin(1) as talk:
        talk.tell("?")
        with pytest.raises(ConnectionAbortedError, match="rank 1 ended the talk"):
            talk.hear()


def test_a_rank_that_does_not_answer_is_named_in_time_and_costs_no_later_talk():
    quick, slow = talks_of(2, 0.2)
    woken, answered = threading.Event(), threading.Event()

    def hang(talk: Talk) -> None:
        if talk.hear() == "hang":
            woken.wait(LONG)
        talk.take(lambda size: memoryview(bytearray(size)))
        answered.set()

    slow.answer_with(hang)
    with quick.begin(1) as talk:
        talk.tell("hang")
        with pytest.raises(TimeoutError, match=r"rank 1 did not answer for 0.2 s"):
            talk.give([memoryview(bytes(1 << 17))])
    with quick.begin(1) as talk:
        talk.tell("go on")
        talk.give([memoryview(bytes(1 << 17))])
    assert answered.wait(LONG)
    woken.set()
    for each in (quick, slow):
        each.close()


def test_close_ends_the_talks_that_wait_and_refuses_more():
    one, other = talks_of(2)
    other.answer_with(lambda talk: talk.hear() and talk.hear())
    talk = one.begin(1)
    talk.tell("?")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(talk.hear)
        for _ in range(2):
            one.close()
        assert isinstance(waiting.exception(LONG), ConnectionAbortedError)
    with pytest.raises(ConnectionAbortedError, match="this manager is closed"):
        one.begin(1)
    other.close()


def test_a_lost_store_ends_every_talk():
    class Dying:
        """A store whose server dies when it is asked for a message."""

        def __init__(self) -> None:
            self.gone = threading.Event()

        def get(self, _: str) -> bytes:
            self.gone.wait(LONG)
            raise RuntimeError("Connection reset by peer")

        def add(self, _: str, count: int) -> int:
            return count

        def set(self, _: str, content: bytes) -> None:
            self.gone.set()

    store = Dying()
    lost = Talks(lambda _: store, None, 0, LONG)
    with lost.begin(1) as talk:
        talk.tell("?")
        with pytest.raises(ConnectionResetError, match="the job's store is gone"):
            talk.hear()
    lost.close()
