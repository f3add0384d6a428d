"""Notes of others on committed checkpoints: one is in use, a number was measured.

Each is a file that says everything by its name: it appears as a whole, is read by a listing, and belongs to
its writer alone. So nobody needs the root, or a lock, and where storage cannot lock nothing is lost either.
"""

from __future__ import annotations

import hashlib
import json
import math
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

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError
from ckpt_core.names import NOTES
from ckpt_core.storage import Storage

_logger = logger_of(__name__)

LEASE_SECONDS: Final = 900
"""How long a pin outlives its process, and how far clocks may be apart."""
_RENEW_SECONDS: Final = LEASE_SECONDS / 5
_IN_USE: Final = re.compile(r"in-use-(?P<step>[0-9]{9,18})-(?P<until>[0-9]{1,12})-[0-9a-f]{16}")
_MEASURED: Final = re.compile(r"measured-(?P<of>[0-9a-f]{32})-[0-9a-f]{16}-(?P<name>[0-9a-f]+)=(?P<value>.+)")
_LONGEST_NAME: Final = 80
"""In bytes: a file has at most 255."""


@final
@dataclass(frozen=True, slots=True)
class Notes:
    """All notes of a root; `in_use` is step -> until when somebody uses it, in words."""

    in_use: Mapping[int, str]
    _measured: Mapping[str, Mapping[str, float]]

    def measured(self, save_id: str) -> Mapping[str, float]:
        """Return the numbers written back last of the checkpoint that a save wrote."""
        return self._measured.get(_key(save_id), {})


def read_notes(storage: Storage) -> Notes:
    """Read all notes, by one listing."""
    now, in_use, measured = time.time(), dict[int, str](), dict[str, dict[str, float]]()
    for name in sorted(entry.name for entry in storage.list(NOTES)):  # later ones last
        if (pin := _IN_USE.fullmatch(name)) is not None and now < int(pin["until"]):
            words = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(int(pin["until"])))
            in_use[int(pin["step"])] = f"in use, at least until {words}"
        with suppress(ValueError):
            if (found := _MEASURED.fullmatch(name)) is not None and math.isfinite(float(found["value"])):
                of_save = measured.setdefault(found["of"], {})
                of_save[bytes.fromhex(found["name"]).decode()] = float(found["value"])
    return Notes(in_use, measured)


def note_measured(storage: Storage, save_id: str, metrics: Mapping[str, float]) -> None:
    """Write finite numbers of the checkpoint of a save; ConfigError for long names."""
    names = {name: name.encode().hex() for name in metrics}
    if long := [name for name, digits in names.items() if len(digits) > 2 * _LONGEST_NAME]:
        raise ConfigError(f"the name of a metric has at most {_LONGEST_NAME} bytes: {long[0]!r:.100}")
    for name, value in metrics.items():
        moment = int(time.time() * 1e6)
        with suppress(FileExistsError):  # the same number at the same moment
            key = f"{NOTES}/measured-{_key(save_id)}-{moment:016x}-{names[name]}={float(value)!r}"
            storage.write_bytes(key, _who())


def forget_notes(storage: Storage, save_id: str) -> None:
    """Delete what was measured of a checkpoint, and pins that have ended."""
    for name in [entry.name for entry in storage.list(NOTES)]:
        pin = _IN_USE.fullmatch(name)
        if name.startswith(f"measured-{_key(save_id)}-") or (pin and int(pin["until"]) < time.time()):
            storage.delete(f"{NOTES}/{name}")


@contextmanager
def in_use(storage: Storage, step: int) -> Generator[None]:
    """Protect a step from pruning in this block, by a pin that ends with the process.

    A thread renews it; after a crash it counts for `LEASE_SECONDS` at most. A removal that was decided before
    may still come: look for the checkpoint in this block. OSError if nothing can be written there.
    """
    over, keys = threading.Event(), list[str]()

    def renew() -> None:
        until = int(time.time()) + LEASE_SECONDS
        keys.append(f"{NOTES}/in-use-{step:09d}-{until}-{secrets.token_hex(8)}")
        storage.write_bytes(keys[-1], _who())
        while len(keys) > 1:
            storage.delete(keys.pop(0))

    def keep() -> None:
        while not over.wait(_RENEW_SECONDS):
            try:
                renew()
            except OSError as error:  # there is time for another try
                _logger.warning("the pin of step %d in %s was not renewed: %s", step, storage.url, error)

    renew()
    # A daemon: a process that ends need not wait for storage.
    thread = threading.Thread(target=keep, name="ckpt-pin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(OSError):  # it ends by itself
            for key in keys:
                storage.delete(key)


def _key(save_id: str) -> str:
    return hashlib.sha256(save_id.encode(errors="replace")).hexdigest()[:32]


def _who() -> bytes:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
