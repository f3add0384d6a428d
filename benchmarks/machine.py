"""On what something was measured, without saying whose machine it is."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

import ckpt_core

CONDITIONS = (
    "Durable means fsync, which is part of every durable time; where a contender does not fsync, it is done "
    "for it and counted.",
    "The page cache is not dropped: the state is in memory, and saves write. After every save its files are "
    "deleted and all dirty pages written back (os.sync), outside the timing.",
)


def machine_facts(root: Path, device: torch.device) -> dict[str, Any]:
    """Hardware and versions; no host name, user or path."""
    facts: dict[str, Any] = {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "filesystem": _filesystem(root),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "ckpt_suite": ckpt_core.__version__,
        "device": device.type,
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def in_words(facts: dict[str, Any]) -> str:
    """One line of them."""
    where = facts.get("gpu", f"{facts['cpus']} CPUs")
    return (
        f"{where}, {facts['memory_gib']:.0f} GiB, {facts['filesystem']}, Linux {facts['kernel']}, "
        f"torch {facts['torch']}"
    )


def _filesystem(root: Path) -> str:
    """Type of the filesystem that `root` is on."""
    place = root.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"
