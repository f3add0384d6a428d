"""All names that appear on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

FORMAT_VERSION = 2
EVERY_GROUP = -1  # instead of the number of a filesystem group: the file is on the disk of each of them
MARKER = "COMMITTED"
MANIFEST = "manifest.json"
SIGNATURE = f"{MANIFEST}.sig"
METADATA = ".metadata"
PLAIN = "plain.json.z"
"""Of a compressed checkpoint: the frames, and what the plain one has otherwise."""
SHARED = "shared.json"
KEPT = "kept_by_rank"
IMPORTED = "imported"
IN_FILES = "model.in_files"
"""Shared item: tensor of the model that only a file of the host holds -> file, and name in it."""
"""Among the producers of a checkpoint that was made of another program's, and loads as that does."""
OWN = ".ckpt-suite"
"""The directory of a root for all that is ours and no checkpoint; hosts list the root for theirs."""
PINS = f"{OWN}/pins.json"
DAMAGED = f"{OWN}/damaged.json"
WRITER = f"{OWN}/writer.json"
TIERS = f"{OWN}/tiers.json"
NOTES = f"{OWN}/notes"
SPARES = frozenset({".spare-0", ".spare-1", ".spare-2"})
"""Beside lock files: the room that pins, marks and the record of an owner take on a full disk."""
DATA_SUFFIX = ".distcp"
TWIN_SUFFIX = ".replica"
WEIGHTS_SUFFIX = ".weights"
"""Behind the name of a checkpoint: its weights alone. No host takes that for one of its own."""

_STEP = re.compile(r"(step-([0-9]{9,}))(?:\.run-[0-9a-f]{8,32})?")
_DATA = re.compile(rf"__([0-9]{{1,9}})_[0-9]+{re.escape(DATA_SUFFIX)}")
_OWN_JSON = re.compile(r"(?:rank|local|chunks)-([0-9]{5,})\.json(?:\.z)?")
# Hosts and scripts find checkpoints by `checkpoint-*`, `*.ckpt` and the like: because of the dot in front and
# the tilde at the end these match neither, also where `*` stands for a dot (`Path.glob`).
_RESERVED = re.compile(
    r"\.(?P<kind>incomplete|trash|replaced|aside)-(?P<id>[0-9a-f]{8,32})-(?P<name>.+?)~?", re.DOTALL
)
_DRAFT = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp")
_SHARED = re.compile(r"shared-([0-9]{5,9})\.json")
_RUN = re.compile(r"run-[0-9]{16,}-.+\.jsonl", re.DOTALL)
_PROBE = re.compile(r"\.probe-[0-9a-z_]{8,16}")


def step_name(step: int) -> str:
    """Return the directory name of a step: `step-000001000`."""
    return f"step-{step:09d}"


def parse_step_name(name: str) -> int | None:
    """Parse a name of `step_name` or `run_name`; return None for another one."""
    match = _STEP.fullmatch(name)
    return None if match is None or step_name(int(match[2])) != match[1] else int(match[2])


def run_name(name: str, lineage_id: str) -> str:
    """Return another name for a step whose own name is occupied."""
    return f"{name}.run-{lineage_id}"


def _in_flight(kind: str) -> Callable[[str, str], str]:
    return lambda name, number: f".{kind}-{number}-{name}~"


incomplete_name: Final = _in_flight("incomplete")
"""Name of checkpoint `name` before its commit, by the id of its save."""
trash_name: Final = _in_flight("trash")
"""Name of a checkpoint during its deletion; this and the following with 8 hex digits."""
replaced_name: Final = _in_flight("replaced")
"""Name of what was moved aside for a checkpoint; it never counts."""
aside_name: Final = _in_flight("aside")
"""Name of a checkpoint while another one replaces it."""


def is_incomplete(name: str) -> bool:
    """Return whether `name` is a checkpoint being written, or torn."""
    return _parse(name)[0] == "incomplete"


def is_trash(name: str) -> bool:
    """Return whether `name` is a checkpoint being deleted."""
    return _parse(name)[0] == "trash"


def is_replaced(name: str) -> bool:
    """Return whether `name` is of something that was moved aside for a checkpoint."""
    return _parse(name)[0] == "replaced"


def can_count(name: str) -> bool:
    """Return whether a directory of that name is a checkpoint if it holds a marker."""
    # At the top of some filesystems is a directory that only the administrator may list.
    return name not in {OWN, "lost+found"} and _parse(name)[0] not in {"incomplete", "trash", "replaced"}


def set_aside(name: str) -> str | None:
    """Return the original name if `name` is a checkpoint being replaced; else None."""
    kind, original = _parse(name)
    return original if kind == "aside" else None


def original_name(name: str) -> str:
    """Return the checkpoint of a name in flight; any other name unchanged."""
    kind, original = _parse(name)
    return name if kind is None else original_name(original)


@lru_cache(maxsize=1 << 13)
def _parse(name: str) -> tuple[str | None, str]:
    """Parse a name in flight to its kind and checkpoint; (None, name) for another one."""
    match = _RESERVED.fullmatch(name)
    return (None, name) if match is None else (match["kind"], match["name"])


def draft_name(name: str, draft_id: str) -> str:
    """Return the name of a small file's draft; `draft_id` has 8 hex digits."""
    return f".{name}.{draft_id}.tmp"


def export_draft(name: str) -> str:
    """Return where an export lies beside its place until it is whole."""
    return f".{name}.export~"


def drafted(name: str) -> str | None:
    """Return the small file of a draft `name`; None for another name."""
    match = _DRAFT.fullmatch(name)
    return None if match is None else str(match["name"])


def run_file(begun: float, run: str) -> str:
    """Return the key of the journal of a run; keys sort by its begin, in Unix time."""
    return f"{OWN}/run-{max(0, int(begun * 1e6)):016d}-{run}.jsonl"


def is_run_file(name: str) -> bool:
    """Return whether `name`, without its directory, is that of the journal of a run."""
    return _RUN.fullmatch(name) is not None


def is_probe(name: str) -> bool:
    """Return whether `name` is a file by which a job tested writes to a root."""
    return _PROBE.fullmatch(name) is not None


def probe_name(token: str, rank: int) -> str:
    """Return the file by which a rank shows which others see its disk; 8 hex digits."""
    return f".probe-{token}{rank:08d}"


def probed_by(name: str, token: str) -> int | None:
    """Return the rank of a file of `probe_name`; None for another name."""
    rank = name.removeprefix(f".probe-{token}")
    return int(rank) if len(rank) < len(name) and len(rank) == 8 and rank.isdecimal() else None


def rank_name(rank: int) -> str:
    """Return the file of the per-rank items of `rank`: `rank-00000.json`."""
    return f"rank-{rank:05d}.json"


def shared_name(rank: int) -> str:
    """Return the file of shared items that only `rank` has: `shared-00001.json`."""
    return f"shared-{rank:05d}.json"


def shared_rank(path: str) -> int | None:
    """Return the rank of a file of shared items; None for another file."""
    match = _SHARED.fullmatch(path)
    return None if match is None else int(match[1])


def local_name(rank: int) -> str:
    """Return the file of the rank-local buffers of `rank`: `local-00000.json`."""
    return f"local-{rank:05d}.json"


def chunks_name(rank: int) -> str:
    """Return the file of the chunk table of `rank`: `chunks-00000.json.z`."""
    return f"chunks-{rank:05d}.json.z"


def data_name(rank: int, index: int) -> str:
    """Return DCP's data file number `index` of `rank`: `__0_0.distcp`."""
    return f"__{rank}_{index}{DATA_SUFFIX}"


def data_rank(path: str) -> int | None:
    """Return the rank that wrote a data file; None for another file."""
    match = _DATA.fullmatch(path.rpartition("/")[2])
    return None if match is None else int(match[1])


def twin_name(path: str) -> str:
    """Return the second file with the content of `path`: `__0_0.distcp.replica`."""
    return path + TWIN_SUFFIX


def is_own_file(path: str) -> bool:
    """Return whether a file has a name that only this package or DCP gives."""
    name = path.rpartition("/")[2].removesuffix(TWIN_SUFFIX)
    return name in {MARKER, MANIFEST, SIGNATURE, METADATA, PLAIN, SHARED} or bool(
        _DATA.fullmatch(name) or is_own_json(name) or _SHARED.fullmatch(name)
    )


def is_own_json(path: str) -> bool:
    """Return whether it is the name of a small file that each rank writes."""
    return _OWN_JSON.fullmatch(path) is not None


def beside_name(name: str, move_id: str) -> str:
    """Return another name for a user's file in the way; `move_id` has 8 hex digits."""
    return f"{os.fsdecode(os.fsencode(name)[:220])}.yours-{move_id}"
