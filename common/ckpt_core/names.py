"""Every name that appears on disk, in one place, so that no literal is spelled twice."""

from __future__ import annotations

import os
import re
from functools import lru_cache

FORMAT_VERSION = 1
MARKER = "COMMITTED"
MANIFEST = "manifest.json"
SIGNATURE = f"{MANIFEST}.sig"
METADATA = ".metadata"
SHARED = "shared.json"
KEPT = "kept_by_rank"
PINS = "pins.json"
DAMAGED = "damaged.json"
WRITER = "writer.json"
DATA_SUFFIX = ".distcp"

_STEP = re.compile(r"(step-(\d{9,}))(?:\.run-[0-9a-f]{8,32})?")
_DATA = re.compile(rf"__(\d{{1,9}})_\d+{re.escape(DATA_SUFFIX)}")
_OWN_JSON = re.compile(r"(rank|local|chunks)-\d{5,}\.json")
# The dot keeps them out of the way of `checkpoint-*`, `*.ckpt` and the like, by which hosts and scripts look
# for checkpoints. The forms with the name in front are those of earlier versions.
_RESERVED = re.compile(
    r"\.(?P<kind>incomplete|trash|corrupt|replaced|aside)-(?P<id>[0-9a-f]{8,32})-(?P<name>.+)", re.DOTALL
)
_FORMER = re.compile(r"(?P<name>.+)\.(?P<kind>incomplete|trash|corrupt)-(?P<id>[0-9a-f]{8,32})", re.DOTALL)
_FORMER_ASIDE = re.compile(r"(?P<name>.+)\.incomplete-(?P<id>[0-9a-f]{8,32})\.exchange", re.DOTALL)
_DRAFT = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp")
_SHARED = re.compile(r"shared-(\d{5,9})\.json")
_PROBE = re.compile(r"\.probe-[0-9a-z_]{8,16}")


def step_name(step: int) -> str:
    """Directory name of a step: `step-000001000`."""
    return f"step-{step:09d}"


def parse_step_name(name: str) -> int | None:
    """Step of a directory name, or None if it is none that `step_name` or `run_name` makes."""
    match = _STEP.fullmatch(name)
    if match is None or step_name(int(match[2])) != match[1]:
        return None
    return int(match[2])


def run_name(name: str, lineage_id: str) -> str:
    """Name of a step whose own name is occupied, by an abandoned checkpoint or one that nobody can use."""
    return f"{name}.run-{lineage_id}"


def incomplete_name(name: str, save_id: str) -> str:
    """Name under which checkpoint `name` is written before its commit."""
    return f".incomplete-{save_id}-{name}"


def trash_name(name: str, prune_id: str) -> str:
    """Name under which checkpoint `name` waits for its deletion."""
    return f".trash-{prune_id}-{name}"


def corrupt_name(name: str, quarantine_id: str) -> str:
    """Name under which a damaged checkpoint `name` is kept for a person to look at; it never counts."""
    return f".corrupt-{quarantine_id}-{name}"


def replaced_name(name: str, replace_id: str) -> str:
    """Name under which what is not ours is kept after a checkpoint has taken `name`; it never counts."""
    return f".replaced-{replace_id}-{name}"


def aside_name(name: str, exchange_id: str) -> str:
    """Name under which checkpoint `name` waits while another one takes its place."""
    return f".aside-{exchange_id}-{name}"


def is_corrupt(name: str) -> bool:
    """Whether `name` is a damaged checkpoint that was moved aside."""
    return _parse(name)[0] == "corrupt"


def is_incomplete(name: str) -> bool:
    """Whether `name` is a checkpoint being written, or torn."""
    return _parse(name)[0] == "incomplete"


def is_trash(name: str) -> bool:
    """Whether `name` is a checkpoint being deleted."""
    return _parse(name)[0] == "trash"


def is_replaced(name: str) -> bool:
    """Whether `name` is what another program or a person had where a checkpoint of ours is now."""
    return _parse(name)[0] == "replaced"


def set_aside(name: str) -> str | None:
    """The name of a checkpoint that was to be replaced, if `name` is where it waits; else None."""
    kind, original = _parse(name)
    return original if kind == "aside" else None


def original_name(name: str) -> str:
    """The checkpoint that a name in flight is of; a name that is not in flight is its own."""
    kind, original = _parse(name)
    return name if kind is None else original_name(original)


@lru_cache(maxsize=1 << 13)
def _parse(name: str) -> tuple[str | None, str]:
    """What kind of name in flight this is, and of which checkpoint; (None, name) if it is none."""
    if (match := _FORMER_ASIDE.fullmatch(name)) is not None:
        return "aside", match["name"]
    match = _RESERVED.fullmatch(name) or _FORMER.fullmatch(name)
    return (None, name) if match is None else (match["kind"], match["name"])


def draft_name(name: str, draft_id: str) -> str:
    """Name under which the new content of a small file is written; `draft_id` has 8 hex digits."""
    return f".{name}.{draft_id}.tmp"


def drafted(name: str) -> str | None:
    """The small file that `name` is a draft of; None if it is none."""
    match = _DRAFT.fullmatch(name)
    return None if match is None else str(match["name"])


def is_probe(name: str) -> bool:
    """Whether `name` is the file by which a job found out that it can write to a root."""
    return _PROBE.fullmatch(name) is not None


def rank_name(rank: int) -> str:
    """File with the per-rank items of `rank`: `rank-00000.json`."""
    return f"rank-{rank:05d}.json"


def shared_name(rank: int) -> str:
    """File with shared items that `rank` has and the coordinator has not: `shared-00001.json`."""
    return f"shared-{rank:05d}.json"


def shared_rank(path: str) -> int | None:
    """The rank whose shared items are in the file at `path`, or None if that is not the name of one."""
    match = _SHARED.fullmatch(path)
    return None if match is None else int(match[1])


def local_name(rank: int) -> str:
    """File with the tensors of `rank` that differ from the checkpoint's: `local-00000.json`."""
    return f"local-{rank:05d}.json"


def chunks_name(rank: int) -> str:
    """Chunk table of `rank`, which says where everything lies in its data files: `chunks-00000.json`."""
    return f"chunks-{rank:05d}.json"


def data_name(rank: int, index: int) -> str:
    """DCP data file number `index` of `rank`: `__0_0.distcp`."""
    return f"__{rank}_{index}{DATA_SUFFIX}"


def data_rank(path: str) -> int | None:
    """The rank that wrote the data file at `path`, or None if that is not the name of one."""
    match = _DATA.fullmatch(path.rpartition("/")[2])
    return None if match is None else int(match[1])


def is_own_file(path: str) -> bool:
    """Whether a file of a checkpoint has one of the names that only this package gives; DCP's included."""
    name = path.rpartition("/")[2]
    return name in {MARKER, MANIFEST, SIGNATURE, METADATA, SHARED} or bool(
        _DATA.fullmatch(name) or is_own_json(name)
    )


def is_own_json(path: str) -> bool:
    """Whether it is the name of one of the small files that each rank writes."""
    return _OWN_JSON.fullmatch(path) is not None


def beside_name(name: str, move_id: str) -> str:
    """Name of a user's file whose own name a file of the checkpoint has; `move_id` has 8 hex digits."""
    return f"{os.fsdecode(os.fsencode(name)[:220])}.yours-{move_id}"
