"""Positions of an accelerator's data loaders, for any number of ranks."""

from accelerate_ckpt.data._layout import BATCHES, Cut, LoaderLayout, base_of, length, order_of, place_rest
from accelerate_ckpt.data._loaders import Loaders
from accelerate_ckpt.data._saved import change_of_order, goes_on, positions_in_samples
from accelerate_ckpt.data._starts import (
    is_persistent,
    lend_generator,
    put_seeds_back,
    rewind,
    set_generator,
    start_here,
)

__all__ = [
    "BATCHES",
    "Cut",
    "LoaderLayout",
    "Loaders",
    "base_of",
    "change_of_order",
    "goes_on",
    "is_persistent",
    "lend_generator",
    "length",
    "order_of",
    "place_rest",
    "positions_in_samples",
    "put_seeds_back",
    "rewind",
    "set_generator",
    "start_here",
]
