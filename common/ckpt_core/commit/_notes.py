"""What others note of committed checkpoints: that one is in use, and what was measured.

Each note is a file of its own, which nobody else changes: where storage cannot lock, none is lost either. Its
writer need not own the root.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, final
from weakref import WeakKeyDictionary

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError
from ckpt_core.formats import codec
from ckpt_core.names import FORMAT_VERSION, NOTES, drafted
from ckpt_core.storage import Storage, read_small

_logger = logger_of(__name__)

LEASE_SECONDS: Final = 900
"""How long a pin outlives its process, and how far clocks may be apart."""
_RENEW_SECONDS: Final = LEASE_SECONDS / 5
_IN_USE: Final = re.compile(r"in-use-(?P<step>[0-9]{9,18})-(?P<until>[0-9]{1,12})-[0-9a-f]{16}")
_MEASURED: Final = re.compile(r"measured-[0-9a-f]{32}-[0-9a-f]{16}\.json")
_MAX_BYTES: Final = 1 << 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """All notes of a root.

    Attributes:
        in_use: step -> until when somebody uses it, in words.
        measured: save id -> metric -> the number written back last.
    """

    in_use: Mapping[int, str]
    measured: Mapping[str, Mapping[str, float]]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Measurement:
    save_id: str = ""
    written: float = 0.0
    metrics: Mapping[str, float]


_known: Final[WeakKeyDictionary[Storage, dict[str, _Measurement]]] = WeakKeyDictionary()
"""They never change: each is read once."""


def read_notes(storage: Storage) -> Notes:
    """Read all notes; one that cannot be read is a warning."""
    names = [entry.name for entry in storage.list(NOTES)]
    known, before = dict[str, _Measurement](), _known.get(storage, {})
    for name in filter(_MEASURED.fullmatch, names):
        with suppress(FileNotFoundError):  # its checkpoint was pruned meanwhile
            known[name] = before.get(name) or _read(storage, name)
    _known[storage] = known
    measured: dict[str, dict[str, float]] = {}
    for each in sorted(known.values(), key=lambda each: each.written):
        measured.setdefault(each.save_id, {}).update(each.metrics)
    now, until = time.time(), dict[int, int]()
    for pin in filter(None, map(_IN_USE.fullmatch, names)):
        if now < (end := int(pin["until"])):
            until[int(pin["step"])] = max(end, until.get(int(pin["step"]), 0))
    words = "in use, at least until %Y-%m-%d %H:%M:%S UTC"
    in_use = {step: time.strftime(words, time.gmtime(end)) for step, end in until.items()}
    return Notes(in_use=in_use, measured=measured)


def _read(storage: Storage, name: str) -> _Measurement:
    key = f"{NOTES}/{name}"
    try:
        content = read_small(storage, key, _MAX_BYTES)
        is_whole = codec.has_checksum(content, source=key)
        with codec.Fields.parse(content, source=key) as fields:
            if not is_whole:
                raise ValueError("it does not name its checksum")
            values = fields.numbers("metrics")
            return _Measurement(
                save_id=fields.get("save_id", str), written=fields.number("written"), metrics=values
            )
    except CheckpointError as error:
        _logger.warning("%s/%s is left out: %s", storage.url, key, error)
        return _Measurement(metrics={})


def _prefix(save_id: str) -> str:
    return f"measured-{hashlib.sha256(save_id.encode(errors='replace')).hexdigest()[:32]}-"


def note_measured(storage: Storage, save_id: str, metrics: Mapping[str, float]) -> str:
    """Write numbers measured of the checkpoint that a save wrote; return the key."""
    content = codec.encode(
        {
            "format_version": FORMAT_VERSION,
            "save_id": save_id,
            "written": time.time(),
            "metrics": dict(metrics),
        }
    )
    key = f"{NOTES}/{_prefix(save_id)}{secrets.token_hex(8)}.json"
    storage.replace(key, codec.add_checksum(content))
    return key


def forget_measured(storage: Storage, save_id: str) -> None:
    """Delete what was measured of a checkpoint that is about to be removed."""
    prefix = _prefix(save_id)
    for entry in storage.list(NOTES):
        if (drafted(entry.name) or entry.name).startswith(prefix):
            storage.delete(f"{NOTES}/{entry.name}")


@final
class _Pin:
    """A lease on one step, as a file whose name says until when; renewed by a thread."""

    def __init__(self, storage: Storage, step: int) -> None:
        self._storage, self._step = storage, step
        self._token = secrets.token_hex(8)
        self._key = ""
        self.over = threading.Event()

    def renew(self) -> None:
        """Write the name with a later end, then delete the one before."""
        until = int(time.time()) + LEASE_SECONDS
        before, key = self._key, f"{NOTES}/in-use-{self._step:09d}-{until}-{self._token}"
        if key != before:
            who = {"host": socket.gethostname(), "pid": os.getpid()}
            self._storage.write_bytes(key, json.dumps(who).encode())
            self._key = key
            if before:
                self._storage.delete(before)

    def keep(self) -> None:
        """Renew the lease until it is over; on the thread."""
        while not self.over.wait(_RENEW_SECONDS):
            try:
                self.renew()
            except OSError as error:  # there is time for another try
                _logger.warning(
                    "the pin of step %d in %s was not renewed: %s", self._step, self._storage.url, error
                )

    def release(self) -> None:
        """Delete the lease; one that cannot be ends by itself."""
        with suppress(OSError):
            self._storage.delete(self._key)


@contextmanager
def in_use(storage: Storage, step: int) -> Generator[None]:
    """Protect a step from pruning in this block, by a pin that ends with the process.

    After a crash it counts for `LEASE_SECONDS` at most. A removal that was decided before may still come:
    whoever relies on the checkpoint looks for its marker in this block.

    Raises:
        OSError: nothing can be written there.
    """
    for entry in storage.list(NOTES):
        left = _IN_USE.fullmatch(entry.name)
        if left is not None and int(left["until"]) < time.time():
            storage.delete(f"{NOTES}/{entry.name}")
    pin = _Pin(storage, step)
    pin.renew()
    # A daemon: a process that ends need not wait for storage.
    thread = threading.Thread(target=pin.keep, name="ckpt-pin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        pin.over.set()
        thread.join()
        pin.release()
