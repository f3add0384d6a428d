"""The small files of each rank of a Trainer, for as many ranks or others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_ckpt._host_calls import torch_bytes
from accelerate_ckpt._small_files import Pickles
from accelerate_ckpt.trainer._continuation import DataProgress, decoded
from ckpt_core.disclosure import logger_of
from ckpt_core.state import derive_rng, load_rng_state, rng_seed, rng_state

_logger = logger_of(__name__)


def progress_file(rank: int | str) -> str:
    """Return the name of the file with the progress of a rank, or a pattern."""
    return f"trainer_progress_{rank}.json"


def generators_file(rank: int | str, ranks: int) -> str:
    """Return the Trainer's name for the file with a rank's random states."""
    return f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"


def of_rank(rank: int) -> set[str]:
    """Return the files that a rank reads: its own, and the first rank's."""
    return {name for each in {0, rank} for name in (progress_file(each), generators_file(each, 2))}


def progress_in(
    small: Mapping[str, bytes], checkpoint: str, rank: int
) -> tuple[DataProgress, DataProgress | None] | None:
    """Return the first rank's progress and this rank's own, if there is any.

    Raises:
        CorruptCheckpointError: it is none.
    """
    own, first = progress_file(rank), progress_file(0)
    found = {path: decoded(small[path], f"{checkpoint}/{path}") for path in (own, first) if path in small}
    return (found[first], found.get(own)) if first in found else None


def with_own_generators(
    small: Mapping[str, bytes], saved_by: int, args: Any, pickles: Pickles
) -> dict[str, bytes]:
    """Return the files, with random states where the Trainer looks for this rank's.

    Args:
        small: by name.
        saved_by: how many ranks saved.
        args: the Trainer's arguments.
        pickles: reads the first rank's, from which those of a new rank are derived.
    """
    rank, left = args.process_index, dict(small)
    names = {each: generators_file(each, saved_by) for each in {0, rank} if each < saved_by}
    saved = {each: left.pop(name) for each, name in names.items() if name in left}
    own = saved.get(rank)
    if own is None and 0 in saved:
        own = _derived(pickles.load(saved[0], names[0]), rank)
    return left if own is None else {**left, generators_file(rank, args.world_size): own}


def _derived(first: Mapping[str, Any], rank: int) -> bytes:
    before = rng_state()
    derive_rng(rng_seed(first), rank)
    made = rng_state()
    load_rng_state(before)
    _logger.warning(
        "rank %d was not among those that saved: its random numbers are derived from rank 0's", rank
    )
    return torch_bytes({**made, "cpu": made.pop("torch")})
