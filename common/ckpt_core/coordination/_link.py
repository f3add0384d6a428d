"""Connections between two ranks: bytes over TCP, behind a proof of a secret.

A dead rank ends its connections at once. One rank listens, the other connects:

    listener   a random number
    caller     its rank and the topic, signed with that number; a random number of its own
    listener   once it is ready for that topic: an answer, signed with that number

What follows is up to the topic. A connection for twins serves one save (the topic is its id), so that nothing
of a failed save is left for the next one:

    caller     the path of a file, its pieces, an empty piece; and so on
    listener   after each file: its CRC-32, or the error
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, final

from ckpt_core.coordination._signer import Signer
from ckpt_core.errors import CoordinationError, failure_text

PIECE_BYTES: Final = 16 << 20
_HEADER: Final = struct.Struct("!I")
_MESSAGE_BYTES: Final = 64 << 10
_NONCE_BYTES: Final = 16
_GREETING_SECONDS: Final = 30.0
"""Time for a signed greeting: a rank sends it at once."""
_PAUSE_SECONDS: Final = 0.1
_CONNECT_SECONDS: Final = 10.0


@final
class Link:
    """One connection: messages and pieces, each behind its length.

    Concurrency: one thread sends and receives; `abort` on any thread.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def limit(self, seconds: float | None) -> None:
        """Set the longest wait for the other side."""
        self._connection.settimeout(seconds)

    def send(self, content: bytes | memoryview) -> None:
        """Send one message or piece."""
        self._connection.sendall(_HEADER.pack(len(content)))
        self._connection.sendall(content)

    def receive(self, most: int = _MESSAGE_BYTES) -> bytes:
        """Receive one message of so many bytes at most.

        Raises:
            EOFError: the other side has ended the connection, and no message has begun.
            OSError: the connection was lost.
        """
        found = bytearray(self._length(most))
        self._fill(memoryview(found))
        return bytes(found)

    def receive_into(self, buffer: memoryview) -> int:
        """Receive one piece; return its length, 0 at the end of a file."""
        size = self._length(len(buffer))
        self._fill(buffer[:size])
        return size

    def send_fields(self, **fields: Any) -> None:
        """Send a small message of plain values."""
        self.send(json.dumps(fields).encode())

    def receive_fields(self, most: int = _MESSAGE_BYTES) -> Mapping[str, Any]:
        """Receive a small message of plain values."""
        return _fields(self.receive(most))

    def is_ended(self) -> bool:
        """Return whether the other side has ended the connection, without waiting."""
        with suppress(BlockingIOError):
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return False

    def abort(self) -> None:
        """Make every call, also one that waits on another thread, fail."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.abort()
        self._connection.close()

    def _length(self, most: int) -> int:
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header), may_end=True)
        (size,) = _HEADER.unpack(header)
        if size > most:
            raise ConnectionError(f"{size} bytes were announced where {most} are the most")
        return int(size)

    def _fill(self, buffer: memoryview, *, may_end: bool = False) -> None:
        size = len(buffer)
        while buffer:
            count = self._connection.recv_into(buffer)
            if not count:
                if may_end and len(buffer) == size:
                    raise EOFError("the connection has ended")
                raise ConnectionResetError("the connection ended in the middle of a message")
            buffer = buffer[count:]


@final
class Doorway:
    """The port at which other ranks connect.

    Concurrency: `welcome` on several threads, `close` on any.
    """

    def __init__(self) -> None:
        self._listener = _listening()
        self._listener.settimeout(0)
        self._woken, self._waker = socket.socketpair()
        self.port = int(self._listener.getsockname()[1])

    def welcome(self, signer: Signer, rank: int) -> tuple[Link, Mapping[str, Any]] | None:
        """Wait for a connection and its greeting; None after `close`.

        Raises:
            OSError: a connection was lost, or is not of a rank of this job.
            CoordinationError: the same.
        """
        while True:
            ready, _, _ = select.select([self._listener, self._woken], [], [])
            if self._woken in ready:
                return None
            with suppress(BlockingIOError):  # another thread was faster
                connection, _ = self._listener.accept()
                break
        link = Link(connection)
        try:
            return link, _greeted(link, signer, rank)
        except BaseException:
            link.close()
            raise

    def close(self) -> None:
        """End every `welcome`, and refuse connections."""
        with suppress(OSError):
            self._waker.send(b"x")

    def release(self) -> None:
        """Close the port, once no thread is in `welcome`."""
        for each in (self._listener, self._woken, self._waker):
            each.close()


def _greeted(link: Link, signer: Signer, rank: int) -> Mapping[str, Any]:
    """Check that a rank of this job connected; return its rank, topic and number."""
    link.limit(_GREETING_SECONDS)
    nonce = secrets.token_hex(_NONCE_BYTES)
    link.send(nonce.encode())
    sender = int(_fields(link.receive())["rank"])
    greeting = _fields(signer.verify(f"to {rank} {nonce}", sender, link.receive()))
    link.limit(None)
    return {**greeting, "rank": sender}


def answer(link: Link, signer: Signer, greeting: Mapping[str, Any], rank: int) -> None:
    """Tell the other side that this is the rank it wants, and ready."""
    link.send(signer.sign(f"ready {greeting['nonce']}", rank, b""))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Greeting:
    """The words by which a rank proves itself to another one, for one topic."""

    signer: Signer
    rank: int
    topic: str

    def say(self, link: Link, other: int, seconds: float) -> None:
        """Greet the other rank, and wait until it is ready for the topic.

        Raises:
            OSError: the connection was lost, or there was no answer in time.
            CoordinationError: the other side is not that rank.
        """
        link.limit(min(seconds, _CONNECT_SECONDS))
        theirs, own = link.receive().decode(), secrets.token_hex(_NONCE_BYTES)
        link.limit(seconds)
        link.send_fields(rank=self.rank)
        content = json.dumps({"topic": self.topic, "nonce": own}).encode()
        link.send(self.signer.sign(f"to {other} {theirs}", self.rank, content))
        self.signer.verify(f"ready {own}", other, link.receive())


@final
class Addressee:
    """A rank and the places where it may be reached; the best is remembered."""

    def __init__(self, rank: int, addresses: Sequence[str], port: int) -> None:
        self.rank = rank
        self._addresses = list(addresses)
        self._port = port

    def connect(self, greeting: Greeting, seconds: float, *, begun: Callable[[Link], None]) -> Link:
        """Connect to the rank for one topic, and wait until it is ready.

        Args:
            greeting: of this rank.
            seconds: how long to try.
            begun: called with every attempt; what it raises ends them.

        Raises:
            OSError: it could not be reached, or did not become ready.
        """
        deadline, problem = time.monotonic() + seconds, "it has no address"
        while True:
            for address in list(self._addresses):
                left = max(_PAUSE_SECONDS, deadline - time.monotonic())
                try:
                    link = Link(socket.create_connection((address, self._port), min(_CONNECT_SECONDS, left)))
                except OSError as error:
                    problem = failure_text(error)
                    continue
                begun(link)
                try:
                    greeting.say(link, self.rank, left)
                except (OSError, EOFError, CoordinationError) as error:
                    link.close()
                    problem = failure_text(error)
                    continue
                self._addresses.remove(address)
                self._addresses.insert(0, address)
                return link
            if time.monotonic() + _PAUSE_SECONDS > deadline:
                places = ", ".join(f"{address} port {self._port}" for address in self._addresses)
                raise TimeoutError(f"not reached at {places} within {seconds:g} s ({problem})")
            time.sleep(_PAUSE_SECONDS)


def own_addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this one, likeliest first."""
    named = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    found = [address for name in named for address in _of_interface(name)]
    found += _towards(os.environ.get("MASTER_ADDR", ""))
    with suppress(OSError):
        found += [str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None)]
    # Loopback is for ranks of one host only: a signed greeting tells whether the right one answers.
    return sorted(dict.fromkeys([*found, "127.0.0.1"]), key=_is_loopback)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _of_interface(name: str) -> list[str]:
    """Return the IPv4 address of a network interface, as gloo uses it; Linux only."""
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        request = struct.pack("256s", name.encode()[:15])
        return [socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])]  # SIOCGIFADDR
    return []


def _towards(host: str) -> list[str]:
    """Return the own address on the way to a host; nothing is sent."""
    found: list[str] = []
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host or None, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                found.append(str(probe.getsockname()[0]))
    return found


def _listening() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _fields(content: bytes) -> Mapping[str, Any]:
    found: Any = json.loads(content)
    if type(found) is not dict:
        raise ConnectionError("a message that is not of a rank")
    return found
