"""Pickles that leave a trace when they run, put into files of checkpoints; and watches on whoever reads."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_core.names import MANIFEST, MARKER
from tests.support.canary import Canary, forge


def pickled(trace: Path) -> bytes:
    return pickle.dumps(Canary(trace.parent, trace.name), protocol=2)


def saved(trace: Path, padding: int = 0) -> bytes:
    """What `torch.save` makes of a state with a canary in it."""
    stream = io.BytesIO()
    torch.save({"value": Canary(trace.parent, trace.name), "padding": b"." * padding}, stream)
    return stream.getvalue()


def of_size(size: int, trace: Path) -> bytes:
    """A canary of exactly that many bytes, or of more if none is so small: as torch saves it if possible."""
    whole = saved(trace)
    if len(whole) <= size and len(whole) % 64 == size % 64:
        for padding in range(size - len(whole), size):
            if len(padded := saved(trace, padding)) == size:
                return padded
    return pickled(trace).ljust(size, b"\0")


def files_of(folder: Path) -> list[str]:
    """Every file of a checkpoint, but those that say what it is."""
    paths = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in paths if path not in {MANIFEST, MARKER}]


@contextmanager
def planted(folder: Path, path: str, content: bytes, *, sealed: bool) -> Iterator[None]:
    """Another content for one file; with `sealed`, manifest and marker are made anew over it."""
    there = [each for each in (path, MANIFEST, MARKER) if (folder / each).exists()]
    kept = {each: (folder / each).read_bytes() for each in there}
    (folder / path).write_bytes(content)
    if sealed:
        forge(folder)
    try:
        yield
    finally:
        for each, before in kept.items():
            (folder / each).write_bytes(before)


def forgeries(folder: Path, path: str, trace: Path) -> Iterator[tuple[bytes, bool]]:
    """Contents for one file, and whether manifest and marker are made to fit."""
    padded = of_size((folder / path).stat().st_size, trace)
    yield padded, False  # of another size it would not even be read
    sealed = (folder / MARKER).exists()
    yield from ((content, sealed) for content in dict.fromkeys((padded, saved(trace), pickled(trace))))


@dataclass
class Readers:
    """Calls of readers that could run code, by whoever made them.

    Attributes:
        unsafe: those that would have, with what they were asked.
        calls: how often each was called.
    """

    unsafe: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)


@contextmanager
def watched_readers() -> Iterator[Readers]:
    """Record every call of a reader in this process while others load."""
    import accelerate.accelerator
    import accelerate.checkpointing
    import accelerate.utils.other

    readers = Readers()

    def watch(name: str, real: Callable[..., Any], is_safe: Callable[..., bool]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            readers.calls[name] = readers.calls.get(name, 0) + 1
            if not is_safe(*args, **kwargs):
                readers.unsafe.append(f"{name}{args[:1]!r:.200}{kwargs!r:.200}")
            return real(*args, **kwargs)

        return called

    def plain(*_: Any, **kwargs: Any) -> bool:
        return kwargs.get("weights_only") is True

    def of_host(*_: Any, **kwargs: Any) -> bool:
        return kwargs.get("weights_only", True) is True  # accelerate's own default

    def no_pickle(*args: Any, **kwargs: Any) -> bool:
        return not (kwargs.get("allow_pickle") or args[2:3] == (True,))

    def never(*_: Any, **__: Any) -> bool:
        return False

    with pytest.MonkeyPatch.context() as patches:
        for place, name, is_safe in (
            (torch, "load", plain),
            (torch.serialization, "load", plain),
            (pickle, "load", never),
            (pickle, "loads", never),
            (np, "load", no_pickle),
            (accelerate.checkpointing, "load", of_host),
            (accelerate.utils.other, "load", of_host),
            (accelerate.accelerator, "load_custom_state", never),
            (accelerate.checkpointing, "load_custom_state", never),
        ):
            patches.setattr(place, name, watch(f"{place.__name__}.{name}", getattr(place, name), is_safe))
        yield readers
