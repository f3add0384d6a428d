"""How far it is from a call of the manager to the system call that moves the bytes.

A hop is a frame of ours on the way: those in the thread that makes the system call, those in the thread
that started it, and so on up to the call. What returns before is not on the way, but a reader meets it all
the same: every function of ours that the call entered, on any thread, is counted beside.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from tests.judges.figures import ROOT

_OURS = tuple(str(ROOT / each) for each in ("common/ckpt_core", "lightning_ckpt", "accelerate_ckpt"))
_LARGE = 1 << 16
"""Bytes of one call: what is smaller is no tensor."""


class Walk:
    """Follows one call of the manager; `path` has its hops, `met` all functions of ours that it entered.

    `before` is how many of them before the first large system call.
    """

    def __init__(self, *calls: str) -> None:
        self.calls = calls
        self.path: list[str] = []
        self.met: set[str] = set()
        self.before = 0
        self._started: dict[threading.Thread, list[str]] = {}

    def __enter__(self) -> Walk:
        start = threading.Thread.start

        def started(thread: threading.Thread) -> None:
            self._started[thread] = self._way()
            start(thread)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(threading.Thread, "start", started))
            for name in self.calls:
                stack.enter_context(mock.patch.object(os, name, self._noted(name, getattr(os, name))))
            stack.callback(sys.setprofile, None)
            stack.callback(threading.setprofile, None)
            self._stack = stack.pop_all()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            self.met.add(_name(frame))

    def _noted(self, name: str, original: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any, **kwargs: Any) -> int:
            moved = original(*args, **kwargs)
            if (moved if isinstance(moved, int) else len(moved)) >= _LARGE:
                self.before = self.before or len(self.met)
                self.path = max(self.path, [*self._way(), f"os.{name}"], key=len)
            return moved

        return call

    def _way(self) -> list[str]:
        """The frames of ours that lead to here, from the outermost."""
        found = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(_OURS):
                found.append(f"{threading.current_thread().name}: {_name(frame)}")
            frame = frame.f_back
        return [*self._started.get(threading.current_thread(), []), *found[::-1]]


def walks(root: Path) -> dict[str, Walk]:
    """A first save and a load of one tensor, followed."""
    import torch

    from ckpt_core import CheckpointManager

    with CheckpointManager(root) as manager, Walk("pwrite", "pwritev", "write") as save:
        manager.save(1, {"model": {"weight": torch.arange(1 << 22, dtype=torch.float32)}})
        manager.wait()
    with CheckpointManager(root) as manager, Walk("preadv", "pread", "readv", "read") as load:
        manager.load({"model": {"weight": torch.empty(1 << 22)}})
    return {"save": save, "load": load}


def show() -> None:
    with tempfile.TemporaryDirectory() as root:
        for name, walk in walks(Path(root) / "run").items():
            modules = {each.split(":")[0] for each in walk.met}
            print(
                f"hops of a {name}: {len(walk.path)}; functions entered: {walk.before} before the first "
                f"bytes, {len(walk.met)} in all, of {len(modules)} modules"
            )
            for each in walk.path:
                print(f"  {each}")


def _name(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename).relative_to(ROOT).with_suffix("")
    return f"{'/'.join(path.parts[-2:])}:{frame.f_code.co_qualname}"
