"""The host memory for staging: free memory of the machine, and limits of cgroups."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import final

_HEADROOM_BYTES = 512 << 20
_PART_OF_TOTAL = 20
_PART_OF_AVAILABLE = 4


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FreeMemory:
    """Host memory in bytes: available without swapping, and total."""

    available_bytes: int
    total_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Bytes for staging; a headroom stays for data loaders and the page cache.

        It is 5 % of the total, at least 512 MiB; but where little is available, a quarter of that, so that a
        small state can be saved on a machine that others have filled.
        """
        headroom = max(_HEADROOM_BYTES, self.total_bytes // _PART_OF_TOTAL)
        return self.available_bytes - min(headroom, self.available_bytes // _PART_OF_AVAILABLE)


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> FreeMemory | None:
    """Return the free memory, the machine's or the cgroup's; None if unknown.

    Args:
        proc: where the proc filesystem is mounted.
        cgroups: where the cgroup filesystems are mounted, version 1 or 2.
    """
    found = [_of_machine(proc), *_of_cgroups(proc, cgroups)]
    known = [each for each in found if each is not None]
    return min(known, key=lambda each: each.usable_bytes, default=None)


def _of_machine(proc: Path) -> FreeMemory | None:
    fields = _table(proc / "meminfo")
    if "MemAvailable:" not in fields or "MemTotal:" not in fields:
        return None
    return FreeMemory(available_bytes=fields["MemAvailable:"] << 10, total_bytes=fields["MemTotal:"] << 10)


def _of_cgroups(proc: Path, cgroups: Path) -> Generator[FreeMemory | None]:
    """Yield the limits of this process's groups, of which containers may see one only."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            for folder in _upwards(cgroups, path):
                yield _of_group(folder, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _upwards(cgroups / "memory", path):
                yield _of_group(
                    folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                )


def _upwards(mount: Path, path: str) -> Generator[Path]:
    parts = [part for part in path.split("/") if part not in {"", ".."}]
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _of_group(folder: Path, limit: str, usage: str, reclaimable: str) -> FreeMemory | None:
    allowed, used = _text(folder / limit).strip(), _text(folder / usage).strip()
    if not allowed.isdecimal() or not used.isdecimal():
        return None  # no such group, or "max"
    # The page cache counts as used but is evicted on demand.
    cached = _table(folder / "memory.stat").get(reclaimable, 0)
    return FreeMemory(available_bytes=max(0, int(allowed) - int(used) + cached), total_bytes=int(allowed))


def _table(path: Path) -> dict[str, int]:
    words = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in words if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
