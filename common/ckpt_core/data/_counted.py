"""A position in a loader, counted in samples of all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core.types import DataPosition


def in_samples(
    state: Mapping[str, Any] | None, *, of: int | None = None, epoch: int | None = None
) -> DataPosition | None:
    """Return what `LoaderPosition.state` says in samples; None if it cannot tell.

    Args:
        state: a position as plain values.
        of: samples in an epoch now; one that goes on knows those that it began with.
        epoch: its number, if the host knows it better than the samplers.
    """
    if not state or "begin" not in state:
        return None  # a state of the loader's own
    begin, trained = state["begin"] or {}, max(0, state["batches"] - state["ahead"])
    if epoch is None:
        epoch = _epoch_of(begin["start"]["samplers"] if begin else state["samplers"])
    of = (begin.get("order") or {}).get("samples", of)
    if state["ended"]:
        return DataPosition(epoch=epoch, samples=of if trained else 0, of=of)
    if state["batch_size"] is None or not begin:
        return DataPosition(epoch=epoch, of=of)
    seen = begin["seen"] + trained * state["batch_size"] * state["shards"]
    return DataPosition(epoch=epoch, samples=seen if of is None else min(seen, of), of=of)


def _epoch_of(samplers: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Return the epoch that a sampler was set to, if one has a number for it."""
    found = (each.get("epoch") for each in samplers.values())
    return next((epoch for epoch in found if isinstance(epoch, int)), None)
