"""Where a checkpoint comes from, in words."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_core.types import DataPosition, Provenance


def code_text(known: Provenance) -> str:
    """Format a code version: a commit, and whether files were changed."""
    version = known.code_version
    return f"{version}, changed" if version and known.code_dirty else version


def data_text(data: Mapping[str, DataPosition]) -> str:
    """Format positions in data: `epoch 3, 1,200 of 5,000 samples`."""
    return "; ".join(
        f"{name}: {_position_text(each)}" if len(data) > 1 else _position_text(each)
        for name, each in sorted(data.items())
    )


def _position_text(position: DataPosition) -> str:
    epoch = "" if position.epoch is None else f"epoch {position.epoch}"
    of = "" if position.of is None else f" of {position.of:,}"
    samples = "" if position.samples is None else f"{position.samples:,}{of} samples"
    return ", ".join(filter(None, (epoch, samples)))
