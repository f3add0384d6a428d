"""Changes since a save: to ranks, data or sampler; what they come to, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_core.coordination import place_in_job
from ckpt_core.data._samplers import load_starting_state, recipe, samples_of, starting_state, style_of


def order_again(loader: Any, begin: Mapping[str, Any]) -> Sequence[Any] | None:
    """Make the order of a saved epoch again; None if that is not possible."""
    here = starting_state(loader)
    # None of torch's own samplers, it may be one that makes another order each time.
    times = 2 if begin["order"]["kind"] == "other" else 1
    try:
        made = [samples_of(loader, begin) for _ in range(times)]
    finally:
        load_starting_state(loader, here)
    return made[0] if made[0] == made[-1] else None


def without_lost(
    loader: Any, begin: Mapping[str, Any], samples: Sequence[Any], seen: int
) -> tuple[Mapping[str, Any], Sequence[Any], int]:
    """Leave out what the data set has lost; return begin, samples and seen."""
    order, length = begin["order"], len(loader.dataset)
    before = order.get("kept", order["length"])
    kept = min(before, length)
    if kept == order["length"]:
        return begin, samples, seen
    had = [each for each in samples if each < before]
    here = [each for each in had if each < kept]
    seen = sum(each < kept for each in had[:seen])
    return {**begin, "order": {**order, "kept": kept}}, here, seen


def notes_of_order(loader: Any, order: Mapping[str, Any], samples: int) -> list[str]:
    """Tell of a data set or a sampler that was changed within the epoch."""
    now, notes = recipe(loader), list[str]()
    length = len(loader.dataset)
    if length != order["length"]:
        new, lost = max(0, length - order["length"]), samples - order.get("kept", samples)
        notes = [
            f"the data set has {length} samples, and had {order['length']} when the epoch began: "
            f"{new} new ones are seen from the next epoch on, {lost} are gone"
        ]
    if now is None or style_of(now) != style_of(order):
        present = "as the present sampler deals them" if now is None else style_of(now)
        notes.append(f"samples came {style_of(order)}, and do so until the epoch ends; then {present}")
    return notes


def notes_of_length(loader: Any, begin: Mapping[str, Any]) -> list[str]:
    """Tell of a data set of another length, where no order can be made again."""
    order = begin["order"]
    if order is None or order["length"] == len(loader.dataset):
        return []
    return [
        f"the data set has {len(loader.dataset)} samples, and had {order['length']} when this was "
        "saved: the rest of the epoch is not the one that it would have been"
    ]


def note_of_ranks(loader: Any, state: Mapping[str, Any]) -> str:
    """Tell what comes of ranks that deal samples by no means of ours."""
    note = (
        f"no sampler deals samples to ranks, so each rank goes on after its own {state['batches']} "
        "batches, and an added one after those of rank 0"
    )
    order, size, before = state["begin"]["order"], state["batch_size"], state.get("world_size")
    if order is None or size is None or before is None:
        return note
    whole, parts = order["length"], order if before > 1 else recipe(loader)
    if parts is not None and parts.get("samples") == whole:
        return f"{note}: each takes every sample, none twice"
    here = state["batches"] * size
    change = here * (before - place_in_job()[1])
    return (
        f"{note}. If ranks share the {whole} samples of the epoch, {before} had seen {here * before}: at "
        f"least {abs(change)} are seen {'twice' if change > 0 else 'never'}. Use a DistributedSampler"
    )
