"""On other ranks, or with another batch size, every sample of an epoch is seen once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ckpt_core.data import EpochOrder, LoaderPosition
from ckpt_core.state import decode, encode
from tests.unit.data.loops import CountsEpochs, Numbers, Stream, seed

# Torchdata warns of torch.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = 153


@given(total=st.integers(1, 40), seen=st.integers(0, 40), shards=st.integers(1, 7), drop_last=st.booleans())
def test_shares_of_the_rest_have_every_sample_once_and_the_counted_padding(total, seen, shards, drop_last):
    order = EpochOrder(samples=range(total), seen=min(seen, total), drop_last=drop_last)
    shares = [order.share(shard, shards) for shard in range(shards)]
    counted = Counter(sample for share in shares for sample in share)
    assert len({len(share) for share in shares}) == 1
    assert counted.total() == len(order.rest) + order.padding(shards)
    assert abs(order.padding(shards)) < shards
    if not drop_last:
        assert set(order.rest) <= set(counted)


def test_the_first_shares_are_those_of_a_distributed_sampler():
    data = Numbers(SAMPLES)
    for drop_last in (False, True):
        sampler = DistributedSampler(data, 4, 1, shuffle=False, drop_last=drop_last)
        order = EpochOrder(samples=range(SAMPLES), seen=0, drop_last=drop_last)
        assert order.share(1, 4) == list(sampler)


def loader(kind: str, rank: int, ranks: int, batch_size: int) -> DataLoader[Any]:
    data, made_by, sampler = Numbers(SAMPLES), DataLoader[Any], None
    if kind == "wrapped by Lightning":
        sampler = CountsEpochs(SAMPLES)
        if ranks > 1:
            sampler = DistributedSamplerWrapper(sampler, num_replicas=ranks, rank=rank)
    elif kind == "of torchdata":
        made_by = StatefulDataLoader
        sampler = StatefulDistributedSampler(data, ranks, rank, seed=3)
    elif ranks > 1:
        sampler = DistributedSampler(data, ranks, rank, seed=3)
    if kind == "of torchdata, shuffled" and ranks == 1:
        made_by = StatefulDataLoader
    return made_by(data, batch_size=batch_size, sampler=sampler, shuffle=sampler is None)


def run(
    kind: str, rank: int, ranks: int, batch_size: int, states: Sequence[str], batches: int | None
) -> tuple[list[int], str, list[str]]:
    """One rank's part of an epoch: the samples, its position, the notes of its resume."""
    seed(50 + ranks)
    live = loader(kind, rank, ranks, batch_size)
    position = LoaderPosition(live)
    notes: list[str] = []
    if states:
        state = decode(json.loads(states[rank] if rank < len(states) else states[0]))
        notes = position.restore(state, same_ranks=len(states) == ranks)
    elif hasattr(live.sampler, "set_epoch"):
        live.sampler.set_epoch(1)
    begun = iter(live)
    drawn = [next(begun) for _ in range(batches)] if batches else list(begun)
    return [int(each) for batch in drawn for each in batch], json.dumps(encode(position.state())), notes


@pytest.mark.parametrize("chain", [(2, 1), (1, 2), (4, 2, 3, 1), (2, 3), (3, 3, 2)], ids=str)
@pytest.mark.parametrize(
    "kind", ["distributed", "of torchdata", "of torchdata, shuffled", "wrapped by Lightning"]
)
def test_every_sample_is_seen_once_however_often_the_ranks_change(kind, chain):
    seen: Counter[int] = Counter()
    states: list[str] = []
    notes: list[str] = []
    for number, ranks in enumerate(chain):
        batches = None if number == len(chain) - 1 else 2
        batch_size = 5 if number % 2 else 4
        parts = [run(kind, rank, ranks, batch_size, states, batches) for rank in range(ranks)]
        seen.update(sample for samples, _, _ in parts for sample in samples)
        states, notes = [state for _, state, _ in parts], parts[0][2]
    repeated = seen.total() - SAMPLES
    assert len(seen) == SAMPLES
    assert 0 <= repeated < chain[-1]
    assert (f"and {repeated} more a second time" in notes[0]) == (repeated > 0)
    assert f"{chain[-1]} rank(s) share the other" in notes[0]


def test_another_batch_size_alone_goes_on_after_the_same_sample():
    first, state, _ = run("distributed", 0, 1, 4, [], 5)
    rest, _, notes = run("distributed", 0, 1, 7, [state], None)
    assert sorted(first + rest) == list(range(SAMPLES))
    assert "after 20 of 153 samples" in notes[0]


class Unpredictable(Sampler[int]):
    """Another order whenever it is asked."""

    times = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        Unpredictable.times += 1
        return iter(range(Unpredictable.times, SAMPLES + Unpredictable.times))


def test_what_cannot_be_dealt_out_begins_again_and_is_told_in_numbers():
    numbers = Numbers(SAMPLES)
    loaders = {
        "cannot be made again": lambda size: DataLoader(numbers, batch_size=size, sampler=Unpredictable()),
        "has no number": lambda size: DataLoader(Stream(), batch_size=size),
    }
    for told, make in loaders.items():
        live = make(4)
        position = LoaderPosition(live)
        begun = iter(live)
        next(begun)
        next(begun)
        state = position.state()
        other = make(5)
        (note,) = LoaderPosition(other).restore(state, same_ranks=False)
        assert "2 batches of 4, is seen twice" in note
        assert told.split()[-1] in note
        assert next(iter(other)).tolist()


def test_a_batch_sampler_of_ones_own_keeps_its_batches():
    class Own(BatchSampler):
        pass

    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(12), batch_sampler=Own(range(12), 5, drop_last=False))

    live = make()
    position = LoaderPosition(live)
    begun = iter(live)
    next(begun)
    again = make()
    (note,) = LoaderPosition(again).restore(position.state(), same_ranks=False)
    assert "each rank goes on after its own 1 batches" in note
    assert [batch.tolist() for batch in again] == [[5, 6, 7, 8, 9], [10, 11]]
