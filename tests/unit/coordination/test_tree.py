from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.coordination import Solo
from ckpt_core.coordination._store import neighbours
from ckpt_core.errors import CoordinationError
from tests.unit.lifecycle.test_plans import Counting

groups = st.lists(st.integers(0, 5000), min_size=1, max_size=70, unique=True)


@given(groups)
def test_everybody_is_reached_once_and_both_ends_agree(ranks):
    reached, front = {ranks[0]: 0}, deque([ranks[0]])
    assert neighbours(ranks, ranks[0])[0] is None
    while front:
        giver = front.popleft()
        for child in neighbours(ranks, giver)[1]:
            assert child not in reached
            assert neighbours(ranks, child)[0] == giver
            reached[child] = reached[giver] + 1
            front.append(child)
    assert set(reached) == set(ranks)
    assert max(reached.values()) <= (len(ranks) - 1).bit_length()


def test_a_rank_that_is_not_among_them_is_refused():
    with pytest.raises(ValueError, match="not in"):
        neighbours([1, 2], 0)
    with pytest.raises(ValueError, match="not all different"):
        neighbours([1, 2, 1], 2)


def test_a_process_alone_has_no_rank_to_broadcast_to():
    buffer = torch.tensor([1, 2, 3], dtype=torch.uint8)
    Solo().broadcast_tensor(buffer, [0])
    assert buffer.tolist() == [1, 2, 3]
    assert not Solo().can_broadcast_tensors


def test_a_users_coordinator_broadcasts_no_tensors_unless_it_says_so():
    theirs, buffer = Counting(), torch.zeros(3, dtype=torch.uint8)
    assert not theirs.can_broadcast_tensors
    theirs.broadcast_tensor(buffer, [0])
    with pytest.raises(CoordinationError, match=r"rank 0: Counting cannot broadcast 3 bytes to ranks \[1\]"):
        theirs.broadcast_tensor(buffer, [0, 1])
