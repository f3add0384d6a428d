"""How many of our functions a reader follows from a call of the manager to the bytes on disk."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import CheckpointManager
from ckpt_core.crew import Workers
from ckpt_core.saving._in_flight import SaveThread

PACKAGE = Path(ckpt_core.__file__).parent
MOST = 15
"""Frames of ours over all threads, the system call counted, too."""


def ours(frame: FrameType | None) -> list[str]:
    """Our functions on the stack of this thread, from the outermost to the innermost."""
    found: list[str] = []
    while frame is not None:
        code = frame.f_code
        if PACKAGE in Path(code.co_filename).parents:
            found.append(
                f"{threading.current_thread().name}: {Path(code.co_filename).stem}.{code.co_qualname}"
            )
        frame = frame.f_back
    return found[::-1]


class Stacks:
    """Notes the stacks at which functions are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.at: dict[str, list[list[str]]] = {}

    def watch(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.at.setdefault(name, []).append(ours(sys._getframe(1)))
            return original(*args, **kwargs)

        self.monkeypatch.setattr(owner, name, noted)

    def deepest(self, name: str, through: str = "") -> list[str]:
        """The longest stack at which `name` was called, of those that have a function named `through`."""
        return max((s for s in self.at[name] if any(f.endswith(through) for f in s)), key=len)


STATE = {"model": {"weight": torch.arange(1 << 20, dtype=torch.float32)}}


def test_a_save_is_read_in_fifteen_steps_from_the_call_to_the_write(tmp_path, monkeypatch):
    stacks = Stacks(monkeypatch)
    stacks.watch(SaveThread, "submit")
    stacks.watch(Workers, "take")
    stacks.watch(os, "pwrite")
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, STATE)

    path = [
        *(*stacks.deepest("submit"), "submit"),
        *(*stacks.deepest("take", through="write_files"), "take"),
        *(*stacks.deepest("pwrite", through="write"), "os.pwrite"),
    ]
    assert path[0] == "MainThread: manager.CheckpointManager.save"
    assert len(path) <= MOST, "\n".join(["", *path])


def test_a_load_is_read_in_twenty_steps_from_the_call_to_the_read(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, STATE)
    stacks = Stacks(monkeypatch)
    started: list[list[str]] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        if thread.name.startswith("ckpt-read"):
            started.append(ours(sys._getframe(1)))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    stacks.watch(os, "preadv")
    with CheckpointManager(tmp_path / "run") as manager:
        manager.load({"model": {"weight": torch.empty(1 << 20)}})

    inner = stacks.deepest("preadv")
    outer = max(started, key=len) if inner[0].startswith("ckpt-read") else []
    path = [*outer, *inner, "os.preadv"]
    assert path[0] == "MainThread: manager.CheckpointManager.load"
    assert len(path) <= 20, "\n".join(["", *path])
