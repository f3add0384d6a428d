"""Positions of an accelerator's data loaders, for any number of ranks."""

from accelerate_ckpt.data._layout import (
    Cut,
    LoaderLayout,
    base_of,
    is_persistent,
    lend_generator,
    length,
    order_of,
    place_rest,
    put_seeds_back,
    rewind,
    set_generator,
    start_here,
)
from accelerate_ckpt.data._tracked import Loaders, change_of_order, goes_on, positions_in_samples

__all__ = [
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
