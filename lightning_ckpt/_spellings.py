"""What people write who come from `ModelCheckpoint`, and what to write here."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable

from fsspec.registry import known_implementations

from ckpt_core.validation import location

_NAMED_BY_STEP = "nothing: checkpoints are called step-000000500, and `ckpt ls` shows their metrics"
_HERE = {
    "monitor": 'keep=KeepBest("val_loss")',
    "mode": 'keep=KeepBest("accuracy", mode="max")',
    "save_top_k": 'keep=KeepBest("val_loss", n=3) or keep=KeepLatest(3); without keep= all stay',
    "every_n_train_steps": "save=EverySteps(500)",
    "every_n_epochs": "save=EverySteps(n), with the number of optimizer steps in so many epochs",
    "train_time_interval": "save=EverySeconds(900)",
    "save_on_train_epoch_end": 'keep=KeepBest("accuracy") for a metric of the epoch, else save=EverySteps(n)',
    "save_on_exception": "nothing: what an exception interrupts is resumed from the last save before it",
    "save_weights_only": "nothing: lightning_ckpt.load_from_checkpoint() reads the weights alone",
    "filename": _NAMED_BY_STEP,
    "auto_insert_metric_name": _NAMED_BY_STEP,
    "enable_version_counter": "nothing: a fit that starts afresh never overwrites an earlier run",
    "verbose": "nothing: the loggers `ckpt_core` and `lightning_ckpt` tell of each save",
}

_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):?/+(?P<rest>.*)")


def unknown_options(given: Iterable[str], known: Collection[str]) -> list[str]:
    """What to say of each option that there is not."""
    return [f"{name}= is no option here; {_advice(name, known)}" for name in given if name not in known]


def _advice(name: str, known: Collection[str]) -> str:
    if name in _HERE:
        return f"write {_HERE[name]}"
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}=?" if close else f"there are {', '.join(sorted(known))}"


def problem_of_root(root: str | os.PathLike[str]) -> str | None:
    """What is wrong with the way a directory or URL is written, or None."""
    if root != "" and (problem := location("dirpath", root)) is not None:
        return problem
    text = os.fspath(root)
    if not text.strip():
        return 'dirpath= is empty; write "." for the current directory'
    match = _SCHEME.fullmatch(text)
    scheme = match["scheme"] if match is not None else ""
    if match is None or "://" in text or scheme not in known_implementations:
        return None
    if text[len(scheme)] != ":" and not text[len(scheme) :].startswith("//"):
        return None  # a directory that is called like a service
    return f"dirpath={text!r} is neither a path nor a URL; did you mean {scheme}://{match['rest']}?"
