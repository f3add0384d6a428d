"""A pickle that leaves a trace when it runs, in every form in which a checkpoint may hold one."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ckpt_core.checksums import Checksum
from ckpt_core.commit import Manifest, Marker
from ckpt_core.names import MANIFEST, MARKER

STRANGERS = (
    "custom_checkpoint_0.pkl", "random_states_0.pkl", "training_args.bin", "scheduler.pt", "optimizer.bin",
    "meta.pt", "__0.metadata", "__9_9.distcp", "rank-00009.json", "last.ckpt", "data.pkl",
)  # fmt: skip
"""Names under which a host, or stock DCP, would look for a pickle."""


class Canary:
    """Makes a directory `traces/<name>` when it is unpickled; the traces of all are counted at the end."""

    def __init__(self, traces: Path, name: str) -> None:
        self._trace = traces / name

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self._trace), 0o777, True)


def raw(canary: Any) -> bytes:
    """As `pickle.dump` writes it."""
    return pickle.dumps(canary)


def zipped(canary: Any) -> bytes:
    """As `torch.save` writes it."""
    stream = io.BytesIO()
    torch.save(canary, stream)
    return stream.getvalue()


def traces_in(folder: Path) -> list[str]:
    """The canaries that have run."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def forge(checkpoint: Path) -> None:
    """Make manifest and marker honest about the files as they are, as anybody can who may write there."""
    manifest = Manifest.from_bytes((checkpoint / MANIFEST).read_bytes())
    files = []
    for entry in manifest.files:
        content = (checkpoint / entry.path).read_bytes()
        checksum = Checksum.like(entry.checksum)
        checksum.update(content)
        files.append(replace(entry, size_bytes=len(content), checksum=str(checksum)))
    content = replace(manifest, files=tuple(files)).to_bytes()
    (checkpoint / MANIFEST).write_bytes(content)
    (checkpoint / MARKER).write_bytes(Marker.of(replace(manifest, files=tuple(files)), content).to_bytes())


def plantings(checkpoint: Path, traces: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Every way to put a canary into a copy of a committed checkpoint: a name, and what does it.

    Each file is replaced as `pickle` and as `torch.save` would write a canary, cut or padded to the size of
    what was there, with manifest and marker left honest and with both forged; and files that no manifest
    names are put beside.
    """
    paths = sorted(path.relative_to(checkpoint).as_posix() for path in files_below(checkpoint))
    for path, form, padded, forged in product(paths, (raw, zipped), (False, True), (False, True)):
        is_text = path.endswith(".json") or path == MARKER
        if (is_text and form is zipped) or (forged and path in {MANIFEST, MARKER}):
            continue
        name = "-".join([path.replace("/", "_"), form.__name__, *["padded"] * padded, *["forged"] * forged])
        yield (
            name,
            partial(_replace, path=path, content=form(Canary(traces, name)), padded=padded, forged=forged),
        )
    for form in (raw, zipped):
        yield f"strangers-{form.__name__}", partial(_put_strangers, form=form, traces=traces)


def _replace(copy: Path, *, path: str, content: bytes, padded: bool, forged: bool) -> None:
    size = (copy / path).stat().st_size
    # Behind the end of a pickle anything may follow, and a zip may end with a comment.
    (copy / path).write_bytes(content.ljust(size, b"\0") if padded else content)
    if forged:
        forge(copy)


def _put_strangers(copy: Path, *, form: Callable[[Any], bytes], traces: Path) -> None:
    for name in STRANGERS:
        (copy / name).write_bytes(form(Canary(traces, f"stranger-{name}")))


def files_below(folder: Path) -> list[Path]:
    """All files at and below a directory."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


class Recorder:
    """Notes every unpickler without a guard that meets a canary, and every `torch.load` that asks for one.

    An audit hook hears of each class that an ordinary unpickler looks up, also where the load fails for
    another reason before the canary could run. It cannot be taken away, so it is one for all.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []

    @contextmanager
    def watching(self, monkeypatch: Any) -> Iterator[None]:
        stock = torch.load

        def load(*arguments: Any, **options: Any) -> Any:
            if options.get("weights_only") is False:
                self.seen.append("torch.load(weights_only=False)")
            return stock(*arguments, **options)

        _listen()
        with monkeypatch.context() as patched:
            patched.setattr(torch, "load", load)
            _listeners.append(self.seen)
            try:
                yield
            finally:
                _listeners.remove(self.seen)


_listeners: list[list[str]] = []


@cache
def _listen() -> None:
    def hear(event: str, arguments: Any) -> None:
        if _listeners and event == "pickle.find_class" and arguments[1] == "makedirs":
            for seen in _listeners:
                seen.append("an ordinary unpickler")

    sys.addaudithook(hear)
