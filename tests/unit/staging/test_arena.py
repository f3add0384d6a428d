from __future__ import annotations

import mmap

import pytest

from ckpt_core.errors import CheckpointError
from ckpt_core.staging import Arena


def test_memory_starts_on_a_page_and_is_as_long_as_asked():
    memory = Arena().reserve(10_000, pinned=False)
    assert memory.numel() == 10_000
    assert memory.data_ptr() % mmap.PAGESIZE == 0


def test_memory_is_used_again_from_save_to_save():
    arena = Arena()
    place = arena.reserve(1 << 20, pinned=False).data_ptr()
    arena.release()
    assert arena.reserve(1 << 20, pinned=False).data_ptr() == place


def test_memory_in_flight_is_never_given_out_again():
    arena = Arena()
    arena.reserve(100, pinned=False)
    with pytest.raises(CheckpointError, match="wait for the save in flight"):
        arena.reserve(100, pinned=False)


def test_it_grows_with_the_state_and_gives_back_what_is_no_longer_needed():
    arena = Arena()
    sizes = []
    for size in (1 << 20, 4 << 20, 1 << 20):
        arena.reserve(size, pinned=False)
        arena.release()
        sizes.append(arena.size_bytes)
    assert sizes == [1 << 20, 4 << 20, 1 << 20]


def test_nothing_at_all_can_be_reserved():
    assert Arena().reserve(0, pinned=False).numel() == 0


def test_a_closed_arena_holds_no_memory():
    arena = Arena()
    arena.reserve(1 << 20, pinned=False)
    arena.close()
    assert arena.size_bytes == 0
