"""Talks of two ranks: messages over the job's Store, bytes over a gloo group.

Every rank has an inbox in the Store: numbered keys, of which a thread takes one after another. Bytes are sent
once the other side has made room for them. So no slow disk keeps a transfer waiting, and only a rank that
dies or hangs in the middle of one costs the group, which gloo cannot mend.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Self, TypeAlias, TypeVar, cast, final

import torch

from ckpt_core import messages
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CoordinationError, DeadlineError, failure_text

T = TypeVar("T")

_SHORTEST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.25
_PAUSE_GROWTH = 1.25
_ANSWER_SECONDS = 5.0
"""Time for an answer of a healthy store on a busy machine."""

_Asked: TypeAlias = tuple[Callable[[], Any], Future[Any]]


@final
class StoreThread:
    """Asks a store one question at a time, on a thread of its own.

    A TCPStore whose server hangs, is stopped or cut off lets its clients wait without end: its own time-out
    covers only keys that are not set yet. So the caller waits for the thread, with a deadline. While a
    question is unanswered, no other can be asked.

    Concurrency: one thread at a time; `close` on any thread when no other asks.
    """

    def __init__(self, store: Any, patience_seconds: float = 1800.0) -> None:
        self._store: Any = store
        self._patience_seconds = patience_seconds
        self._questions: SimpleQueue[_Asked | None] = SimpleQueue()
        self._pending: Future[Any] | None = None
        self._began = 0.0
        self._thread: threading.Thread | None = None
        # Also ends the thread of an object that is collected and was never closed.
        self._end = weakref.finalize(self, self._questions.put, None)
        # A save at the end of the process needs the thread for longer than finalizers wait.
        self._end.atexit = False

    def ask(self, question: Callable[[Any], T], deadline: float | None = None) -> T:
        """Return the outcome of a question to the store.

        `deadline` is until when the asker waits for ranks, on the monotonic clock; None for no limit.

        Raises:
            DeadlineError: no answer in time, or still none to the question before.
            CoordinationError: the store is gone, or the connection is closed.
        """
        store, now, patience = self._store, time.monotonic(), self._patience_seconds
        # Enough time for an answer even if the deadline has nearly passed: then it is the ranks who are late.
        latest = now + patience if deadline is None else max(deadline, now + min(_ANSWER_SECONDS, patience))
        if store is None:
            raise CoordinationError("this rank has closed its connection to the job's store")
        if self._pending is None or self._pending.done():
            self._pending, self._began = self._put(partial(question, store)), now
            futures.wait((self._pending,), latest - now)
            if self._pending.done():
                try:
                    return cast("T", self._pending.result())
                except RuntimeError as error:
                    raise CoordinationError(
                        f"the job's store is gone: {error}. The process that serves it (rank 0 or the "
                        "launcher) has died, or its file was removed"
                    ) from error
        raise DeadlineError(
            f"the job's store has not answered for {time.monotonic() - self._began:.3g} s: the process that "
            "serves it (rank 0 or the launcher) hangs, or cannot be reached"
        )

    def has(self, keys: Sequence[str], deadline: float | None = None) -> bool:
        return self.ask(lambda store: bool(store.check(list(keys))), deadline)

    def wait(self, keys: Sequence[str], deadline: float) -> bool:
        """Wait for all of these keys; False at `deadline` (monotonic)."""
        # Polls, because a store that waits for us writes a line to stderr whenever its own time-out passes.
        # The longer the wait, the less a moment more matters.
        pause = _SHORTEST_PAUSE
        while not self.has(keys, deadline):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            time.sleep(min(pause, remaining))
            pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE)
        return True

    def close(self) -> None:
        """End the thread and drop the store; harmless when repeated.

        A thread that hangs in the store ends when that answers.
        """
        self._store = None
        self._end()
        if self._thread is not None and (self._pending is None or self._pending.done()):
            self._thread.join()
        self._pending = None

    def _put(self, question: Callable[[], Any]) -> Future[Any]:
        if self._thread is None:
            # A daemon: a store that never answers must not keep the process from ending.
            thread = threading.Thread(target=_answer, args=(self._questions,), name="ckpt-store", daemon=True)
            thread.start()
            self._thread = thread
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        return answer


def _answer(questions: SimpleQueue[_Asked | None]) -> None:
    while (asked := questions.get()) is not None:
        question, answer = asked
        try:
            answer.set_result(question())
        except BaseException as error:  # noqa: BLE001 - raised on the thread that asked
            answer.set_exception(error)
        del asked, question, answer


_logger = logger_of(__name__)
_FOREVER: Final = timedelta(days=20)
"""A Store that waits longer has an overflow; one that waits shorter writes to stderr when it ends."""
_CLOSING_SECONDS: Final = 5.0
_SMALL_BYTES: Final = 64 << 10
"""What a message may carry; more goes over gloo."""
_TAGS: Final = 1 << 30
_STOP: Final = (-1, -1)

_Name: TypeAlias = tuple[int, int]
"""Of a talk: the rank that began it, and a number of that rank's."""
_Message: TypeAlias = tuple[_Name, bool, object]
"""The talk, whether it begins, and the content."""


@final
class Talk:
    """One talk with another rank.

    Concurrency: one thread. Left by an error, the context ends the talk for the other side, too. Every method
    raises `OSError` if the other rank is lost, or does not answer in time, and the error that the other side
    told instead of an answer.
    """

    def __init__(self, talks: Talks, other: int, name: _Name) -> None:
        self.other = other
        self._talks = talks
        self._name = name
        self._is_new = name[0] == talks.rank
        self.heard: SimpleQueue[Any] = SimpleQueue()
        """What the other side has told; the thread of the inbox puts it in."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.end()

    def tell(self, content: object) -> None:
        """Send a plain value, or an error that the other side then raises."""
        is_new, self._is_new = self._is_new, False
        self._talks.post(self.other, (self._name, is_new, content))

    def close(self) -> None:
        self._talks.forget(self._name)

    def end(self) -> None:
        """Hear no more, and make the next `hear` of the other side raise, if there is one."""
        self.close()
        try:
            self.tell(ConnectionAbortedError(errno.ECONNABORTED, f"rank {self._talks.rank} ended the talk"))
        except OSError as error:
            _logger.debug("%s", error)

    def hear(self) -> Any:
        try:
            content = self.heard.get(timeout=self._talks.patience_seconds)
        except Empty:
            raise TimeoutError(
                errno.ETIMEDOUT, f"rank {self.other} did not answer for {self._talks.patience_seconds:g} s"
            ) from None
        if isinstance(content, BaseException):
            raise content
        return content

    def give(self, pieces: Sequence[memoryview]) -> None:
        """Send bytes to `take` of the other side, which may tell an error instead."""
        sizes = list(map(len, pieces))
        if sum(sizes) <= _SMALL_BYTES:
            self.tell((sizes, b"".join(pieces)))
            return
        tag = self._talks.tags(len(pieces))
        self.tell((sizes, tag))
        self.hear()  # there is room
        self._talks.move(self.other, pieces, tag)

    def take(self, room: Callable[[int], memoryview] | Sequence[memoryview]) -> Sequence[memoryview]:
        """Receive the pieces of one `give`.

        `room` is the memory for them, or a function that returns so many bytes.
        """
        sizes, sent = self.hear()
        pieces = [room(size) for size in sizes] if callable(room) else room
        if isinstance(sent, int):
            self._talks.move(self.other, pieces, sent, ready=lambda: self.tell(None))
            return pieces
        start = 0
        for piece in pieces:
            piece[:] = sent[start : start + len(piece)]
            start += len(piece)
        return pieces


@final
class Talks:
    """The talks of this rank with others of its job. Construction is collective.

    `connect` makes a connection to the Store with a time-out; nothing else uses the gloo group of all ranks.

    Concurrency: any thread. Talks that others begin are answered on threads of their own.
    """

    def __init__(
        self, connect: Callable[[timedelta], Any], group: Any, rank: int, patience_seconds: float
    ) -> None:
        self.rank = rank
        self.patience_seconds = patience_seconds
        self._group: Any = group
        self._inbox = connect(_FOREVER)
        self._outbox = StoreThread(connect(timedelta(seconds=patience_seconds)), patience_seconds)
        self._posting = threading.Lock()
        self._guard = threading.Lock()
        self._open: dict[_Name, Talk] = {}
        self._lost: OSError | None = None
        self._numbers, self._next_tag = itertools.count(), 0
        self._answer: Callable[[Talk], None] | None = None
        self._ended: Callable[[], None] = lambda: None
        # A daemon: a store that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._listen, name="ckpt-talks", daemon=True)
        self._thread.start()

    @property
    def is_answering(self) -> bool:
        """Whether `answer_with` was called."""
        return self._answer is not None

    def answer_with(
        self, answer: Callable[[Talk], None], *, ended: Callable[[], None] = lambda: None
    ) -> None:
        """Have every talk that another rank begins answered; before one does."""
        self._answer, self._ended = answer, ended

    def begin(self, other: int) -> Talk:
        talk = Talk(self, other, (self.rank, next(self._numbers)))
        with self._guard:
            if self._lost is not None:
                raise self._lost
            self._open[talk._name] = talk
        return talk

    def forget(self, name: _Name) -> None:
        """Let a talk end here."""
        with self._guard:
            self._open.pop(name, None)

    def tags(self, count: int) -> int:
        """Return the first of that many tags that no other transfer of this rank has."""
        with self._guard:
            first, self._next_tag = self._next_tag, (self._next_tag + count) % _TAGS
        return first

    def post(self, rank: int, message: _Message) -> None:
        content = messages.encode(message)

        def put(store: Any) -> None:
            store.set(f"{rank}/{store.add(str(rank), 1)}", content)

        try:
            with self._posting:
                self._outbox.ask(put)
        except CoordinationError as error:
            raise ConnectionResetError(
                errno.ECONNRESET, f"rank {rank} was not reached over the job's store: {failure_text(error)}"
            ) from error

    def move(
        self, other: int, pieces: Sequence[memoryview], tag: int, *, ready: Callable[[], None] | None = None
    ) -> None:
        """Send bytes to another rank, or receive them into the memory of `pieces`.

        `tag` is that of the first piece. To receive, `ready` is called once there is room.
        """
        verb = self._group.send if ready is None else self._group.recv
        try:
            views = [bytearray(piece) if piece.readonly else piece for piece in pieces]
            under_way = [
                verb([torch.frombuffer(view, dtype=torch.uint8)], other, tag + place)
                for place, view in enumerate(views)
                if len(view)
            ]
            if ready is not None:
                ready()
            for each in under_way:
                each.wait()
        except RuntimeError as error:
            raise ConnectionResetError(
                errno.ECONNRESET,
                f"the connection to rank {other} was lost, or it died or hung while bytes were on their way: "
                f"{str(error).partition(chr(10))[0]}",
            ) from error

    def close(self) -> None:
        """End the thread of the inbox and all talks; harmless when repeated."""
        if self._thread.is_alive():
            try:
                self.post(self.rank, (_STOP, False, None))
            except OSError as error:
                _logger.debug("%s", error)
            else:
                self._thread.join(_CLOSING_SECONDS)
        self._end(ConnectionAbortedError(errno.ECONNABORTED, "this manager is closed"))
        self._outbox.close()
        self._group = None
        self._ended()

    def _listen(self) -> None:
        try:
            for number in itertools.count(1):
                key = f"{self.rank}/{number}"
                name, is_new, content = messages.decode(self._inbox.get(key))
                self._inbox.delete_key(key)
                if name == _STOP:
                    return
                self._deliver(name, content, is_new=is_new)
        except (RuntimeError, messages.MessageError) as error:
            self._end(ConnectionResetError(errno.ECONNRESET, f"the job's store is gone: {error}"))

    def _deliver(self, name: _Name, content: object, *, is_new: bool) -> None:
        with self._guard:
            if is_new:
                self._open[name] = Talk(self, name[0], name)
            talk = self._open.get(name)
        if talk is None:
            return  # it has ended here
        talk.heard.put(content)
        if is_new:
            threading.Thread(target=self._respond, args=(talk,), name="ckpt-talk", daemon=True).start()

    def _respond(self, talk: Talk) -> None:
        assert self._answer is not None
        try:
            with talk:
                self._answer(talk)
        except (OSError, ValueError, LookupError, TypeError) as error:
            _logger.debug("rank %d: a talk with rank %d ended: %s", self.rank, talk.other, error)

    def _end(self, error: OSError) -> None:
        with self._guard:
            self._lost = error
            talks = list(self._open.values())
        for talk in talks:
            talk.heard.put(error)
