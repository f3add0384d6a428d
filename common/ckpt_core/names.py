"""Every name that appears on disk, in one place, so that no literal is spelled twice."""

from __future__ import annotations

import re

FORMAT_VERSION = 1
MARKER = "COMMITTED"
MANIFEST = "manifest.json"
METADATA = ".metadata"
SHARED = "shared.json"
PINS = "pins.json"
DAMAGED = "damaged.json"
WRITER = "writer.json"
DATA_SUFFIX = ".distcp"

_STEP = re.compile(r"(step-(\d{9,}))(?:\.run-[0-9a-f]{8,32})?")
_INCOMPLETE = re.compile(r"(?P<name>.+)\.incomplete-(?P<id>[0-9a-f]{8,32})")
_CORRUPT = re.compile(r"(?P<name>.+)\.corrupt-(?P<id>[0-9a-f]{8,32})")
_DATA = re.compile(rf"__(\d{{1,9}})_\d+{re.escape(DATA_SUFFIX)}")
_TRASH = re.compile(r"(?P<name>.+)\.trash-(?P<id>[0-9a-f]{8,32})")
_ASIDE = re.compile(rf"{_INCOMPLETE.pattern}\.exchange")
_DRAFT = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp")
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
    return f"{name}.incomplete-{save_id}"


def trash_name(name: str, prune_id: str) -> str:
    """Name under which checkpoint `name` waits for its deletion."""
    return f"{name}.trash-{prune_id}"


def corrupt_name(name: str, quarantine_id: str) -> str:
    """Name under which a damaged checkpoint `name` is kept for a person to look at; it never counts."""
    return f"{name}.corrupt-{quarantine_id}"


def is_corrupt(name: str) -> bool:
    """Whether `name` is a damaged checkpoint that was moved aside."""
    return _CORRUPT.fullmatch(name) is not None


def is_incomplete(name: str) -> bool:
    """Whether `name` is a checkpoint being written, or torn."""
    return _INCOMPLETE.fullmatch(name) is not None


def is_trash(name: str) -> bool:
    """Whether `name` is a checkpoint being deleted."""
    return _TRASH.fullmatch(name) is not None


def aside_name(working: str) -> str:
    """Name under which a checkpoint waits while the one in `working` takes its place."""
    return f"{working}.exchange"


def set_aside(name: str) -> str | None:
    """The name of a checkpoint that was to be replaced, if `name` is where it waits; else None."""
    match = _ASIDE.fullmatch(name)
    return None if match is None else str(match["name"])


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
