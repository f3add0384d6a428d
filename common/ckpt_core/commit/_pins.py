"""Steps that a person protects from pruning, in `pins.json`, with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ckpt_core.errors import CorruptCheckpointError, FileFailure
from ckpt_core.names import PINS
from ckpt_core.storage import Storage


def read_pins(storage: Storage) -> dict[int, str]:
    """Step -> reason; empty if nothing was ever pinned.

    Raises:
        CorruptCheckpointError: the file cannot be read.
    """
    try:
        content = storage.read_bytes(PINS)
    except FileNotFoundError:
        return {}
    try:
        return {int(step): str(reason) for step, reason in json.loads(content)["pins"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        failure = FileFailure(path=PINS, problem=f"malformed: {error}")
        raise CorruptCheckpointError(
            f"{storage.url}/{failure}; no checkpoint is pruned until the file is repaired or deleted",
            failures=(failure,),
        ) from error


def replace_pins(storage: Storage, pins: Mapping[int, str]) -> None:
    """Write all pins; a reader sees the old ones or the new ones."""
    fields = {"pins": {str(step): pins[step] for step in sorted(pins)}}
    storage.replace(PINS, json.dumps(fields, indent=2).encode() + b"\n")
