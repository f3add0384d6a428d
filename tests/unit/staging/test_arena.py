from __future__ import annotations

import gc
import mmap
import multiprocessing
import threading

import pytest
import torch

from ckpt_core.errors import CheckpointError, StagingMemoryError
from ckpt_core.staging import Arenas
from ckpt_core.staging._arena import FreeMemory

MIB = 1 << 20


def free(mebibytes: int) -> FreeMemory:
    return FreeMemory(available_bytes=mebibytes * MIB, total_bytes=mebibytes * MIB)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_memory_starts_on_a_page_and_is_as_long_as_asked():
    arena = Arenas().reserve(10_000, pinned=False)
    assert arena.memory.numel() == 10_000
    assert arena.memory.data_ptr() % mmap.PAGESIZE == 0


def test_memory_is_used_again_from_save_to_save():
    arenas = Arenas()
    arena = arenas.reserve(MIB, pinned=False)
    place = arena.memory.data_ptr()
    arena.attach("views")
    arena.release()
    again = arenas.reserve(MIB, pinned=False)
    assert again.memory.data_ptr() == place
    assert again.attached == "views"


@pytest.mark.parametrize("count", [1, 2])
def test_memory_in_flight_is_never_given_out_again(count):
    arenas = Arenas(count)
    taken = [arenas.reserve(100, pinned=False) for _ in range(count)]
    assert len({arena.memory.data_ptr() for arena in taken}) == count
    assert arenas.free == 0
    with pytest.raises(CheckpointError, match="wait for the save in flight"):
        arenas.reserve(100, pinned=False)
    taken[0].release()
    assert arenas.free == 1


def test_giving_an_arena_back_twice_does_not_take_it_from_the_next_save():
    arenas = Arenas()
    first = arenas.reserve(100, pinned=False)
    first.release()
    arenas.reserve(100, pinned=False)
    first.release()
    assert arenas.free == 0


def test_an_arena_may_be_released_by_another_thread():
    arenas = Arenas()
    for size in range(100, 200):
        arena = arenas.reserve(size, pinned=False)
        thread = threading.Thread(target=arena.release)
        thread.start()
        thread.join()
    assert arenas.free == 1


def test_an_arena_is_at_most_two_percent_larger_than_the_state():
    arenas = Arenas()
    for size in (64 * MIB, 65 * MIB, 64 * MIB, 10 * MIB, 9 * MIB, 64 * MIB, 5000):
        arena = arenas.reserve(size, pinned=False)
        arena.memory.fill_(1)
        arena.release()
        assert size <= arenas.size_bytes <= 1.02 * size + mmap.PAGESIZE


def test_memory_that_a_smaller_state_does_not_need_goes_back_to_the_system():
    arenas = Arenas()
    arenas.prewarm(256 * MIB, pinned=False)
    before = resident()
    arenas.prewarm(16 * MIB, pinned=False)
    assert before - resident() > 200 * MIB


def test_what_was_attached_is_dropped_when_the_content_is_lost():
    arenas = Arenas()
    for size in (10 * MIB, 5 * MIB, 10 * MIB, 20 * MIB):
        arena = arenas.reserve(size, pinned=False)
        assert arena.attached is None
        arena.attach(arena.memory[:10])
        arena.release()


def test_a_second_arena_costs_nothing_until_two_saves_are_in_flight():
    arenas = Arenas(2)
    for _ in range(3):
        arenas.reserve(MIB, pinned=False).release()
    assert arenas.size_bytes == MIB
    first = arenas.reserve(MIB, pinned=False)
    arenas.reserve(MIB, pinned=False)
    first.release()
    assert arenas.size_bytes == 2 * MIB


def test_after_prewarm_no_page_of_the_arena_is_new():
    arenas = Arenas(2)
    assert arenas.prewarm(64 * MIB, pinned=False) == 128 * MIB
    before = resident()
    for arena in [arenas.reserve(64 * MIB, pinned=False) for _ in range(2)]:
        arena.memory.fill_(1)
    assert resident() - before < 8 * MIB


def test_nothing_at_all_can_be_reserved():
    arenas = Arenas()
    assert arenas.reserve(0, pinned=False).memory.numel() == 0
    assert arenas.size_bytes == 0


def test_a_closed_arena_holds_no_memory():
    arenas = Arenas()
    arenas.reserve(MIB, pinned=False).release()
    arenas.close()
    assert arenas.size_bytes == 0


def test_closing_leaves_memory_in_flight_alone_until_it_is_released():
    arenas = Arenas()
    arena = arenas.reserve(MIB, pinned=False)
    arenas.close()
    arena.memory.fill_(1)
    assert arenas.size_bytes == MIB
    arena.release()
    assert arenas.size_bytes == 0


def test_memory_goes_back_when_nothing_views_it():
    arenas = Arenas()
    arena = arenas.reserve(256 * MIB, pinned=False)
    before = resident()
    arena.release()
    arenas.close()
    del arena
    gc.collect()
    assert before - resident() > 200 * MIB


def test_an_arena_over_budget_is_refused_before_anything_is_allocated():
    arenas = Arenas(2, budget_bytes=3 * MIB)
    held = arenas.reserve(2 * MIB, pinned=False)
    with pytest.raises(StagingMemoryError, match=r"needs 2\.0 MiB more.*only 1\.0 MiB.*arenas=1") as refused:
        arenas.reserve(2 * MIB, pinned=False)
    assert (refused.value.needed_bytes, refused.value.available_bytes) == (2 * MIB, MIB)
    assert (arenas.size_bytes, arenas.free) == (2 * MIB, 1)
    held.release()
    assert arenas.reserve(3 * MIB, pinned=False).memory.numel() == 3 * MIB


def test_without_a_budget_a_headroom_is_left_to_everything_else():
    arenas = Arenas(probe=lambda: free(1000))
    with pytest.raises(StagingMemoryError, match=r"of 1,000 MiB free, less a headroom"):
        arenas.reserve(751 * MIB, pinned=False)
    assert arenas.size_bytes == 0
    assert arenas.reserve(4 * MIB, pinned=False).memory.numel() == 4 * MIB


def test_memory_that_is_there_already_is_not_asked_for_again():
    left = [free(1000)]
    arenas = Arenas(probe=lambda: left[0])
    arenas.prewarm(8 * MIB, pinned=False)
    left[0] = free(0)
    arenas.reserve(8 * MIB, pinned=False).release()
    arenas.reserve(4 * MIB, pinned=False).release()
    with pytest.raises(StagingMemoryError):
        arenas.reserve(9 * MIB, pinned=False)


def test_where_the_free_memory_cannot_be_told_nothing_is_refused():
    assert Arenas(probe=lambda: None).prewarm(MIB, pinned=False) == MIB


def test_a_forked_worker_neither_shares_nor_copies_an_arena():
    arenas = Arenas()
    arena = arenas.reserve(MIB, pinned=False)
    arena.memory.fill_(7)
    seen = multiprocessing.get_context("fork").SimpleQueue()
    array = arena.memory.numpy()
    child = multiprocessing.get_context("fork").Process(target=lambda: seen.put(int(array[0])))
    child.start()
    assert seen.get() == 0
    child.join()
    assert torch.all(arena.memory == 7)
