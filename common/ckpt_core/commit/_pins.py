"""Steps that a person protects from pruning, in `pins.json`, with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from ckpt_core.errors import ConfigError, CorruptCheckpointError, FileFailure
from ckpt_core.names import PINS
from ckpt_core.storage import Storage, read_small

MAX_PINS_BYTES: Final = 16 << 20

_REMEDY: Final = "no checkpoint is pruned until the file is repaired or deleted"


def read_pins(storage: Storage) -> dict[int, str]:
    """Step -> reason; empty if nothing was ever pinned.

    Raises:
        CorruptCheckpointError: the file cannot be read.
    """
    try:
        content = read_small(storage, PINS, MAX_PINS_BYTES)
    except FileNotFoundError:
        return {}
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{error}; {_REMEDY}", failures=error.failures) from error
    try:
        return {int(step): str(reason) for step, reason in json.loads(content)["pins"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        failure = FileFailure(path=PINS, problem=f"malformed: {error}")
        raise CorruptCheckpointError(f"{storage.url}/{failure}; {_REMEDY}", failures=(failure,)) from error


def replace_pins(storage: Storage, pins: Mapping[int, str]) -> None:
    """Write all pins; a reader sees the old ones or the new ones.

    Raises:
        ConfigError: they would be too many to be read again.
    """
    fields = {"pins": {str(step): pins[step] for step in sorted(pins)}}
    content = json.dumps(fields, indent=2).encode() + b"\n"
    if len(content) > MAX_PINS_BYTES:
        raise ConfigError(f"the reasons of {len(pins)} pins have {len(content)} bytes in all: shorten them")
    storage.replace(PINS, content)
