"""The file `tiers.json`: where checkpoints of a root are uploaded to.

It is for people and commands, and never decides what counts: that each tier says by itself. It holds no
secrets; credentials are given to a command as for any other URL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.formats import codec
from ckpt_core.names import FORMAT_VERSION, TIERS
from ckpt_core.storage import Storage, read_small

_MAX_BYTES: Final = 1 << 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Uploading:
    """The upload that is running, or was when the job died.

    Attributes:
        name: of the checkpoint.
        done_bytes: of its files, those found at the target included.
        size_bytes: of its files.
    """

    name: str
    done_bytes: int
    size_bytes: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TierRecord:
    """One tier that a root is uploaded to.

    Attributes:
        url: path or URL, without secrets.
        every: every n-th checkpoint is uploaded.
        due: names of local checkpoints whose upload has not ended, the next one first.
        uploading: the present upload; None if there is none.
    """

    url: str
    every: int = 1
    due: Sequence[str] = ()
    uploading: Uploading | None = None


def write_tiers(storage: Storage, tiers: Sequence[TierRecord]) -> None:
    """Replace `tiers.json` in one step; the caller owns the root."""
    fields = {"format_version": FORMAT_VERSION, "tiers": [_fields(tier) for tier in tiers]}
    # In ASCII: the name of a directory need not be valid Unicode.
    content = json.dumps(fields, separators=(",", ":")).encode()
    storage.replace(TIERS, codec.add_checksum(content))


def read_tiers(storage: Storage) -> list[TierRecord]:
    """Read `tiers.json`; none if the root is not uploaded.

    Raises:
        CorruptCheckpointError: it is malformed, or has changed since it was written.
        IncompatibleCheckpointError: it was written by a newer version.
        OSError: it cannot be read.
    """
    try:
        content = read_small(storage, TIERS, _MAX_BYTES)
    except FileNotFoundError:
        return []
    if not codec.has_checksum(content, source=TIERS):
        raise CorruptCheckpointError(f"{storage.url}/{TIERS} does not name its checksum")
    with codec.Fields.parse(content, source=TIERS) as fields:
        return [_tier(each) for each in fields.objects("tiers")]


def _fields(tier: TierRecord) -> dict[str, Any]:
    running = tier.uploading
    return {
        "url": tier.url,
        "every": tier.every,
        "due": list(tier.due),
        **({} if running is None else {"uploading": asdict(running)}),
    }


def _tier(fields: codec.Fields) -> TierRecord:
    running = fields.optional("uploading")
    return TierRecord(
        url=fields.get("url", str),
        every=fields.count("every", least=1),
        due=_names(fields.get("due", list)),
        uploading=None if running is None else _uploading(running),
    )


def _names(values: list[Any]) -> tuple[str, ...]:
    if not {str}.issuperset(map(type, values)):
        raise ValueError("'due' should hold only names")
    return tuple(values)


def _uploading(fields: codec.Fields) -> Uploading:
    return Uploading(
        name=fields.get("name", str),
        done_bytes=fields.count("done_bytes"),
        size_bytes=fields.count("size_bytes"),
    )
