"""What is changed between a save and a resume within an epoch is told with numbers, never passed over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core.data import LoaderPosition
from ckpt_core.state import decode, encode
from tests.unit.data.loops import SAMPLES, CountsEpochs, Numbers, Numpys, Stream, seed

# Torchdata warns of torch.
pytestmark = pytest.mark.filterwarnings("ignore")


def made(samples: int = SAMPLES, size: int = 4, workers: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(samples), batch_size=size, num_workers=workers, **options)


def sampled(sampler: Any, **options: Any) -> DataLoader[Any]:
    return made(sampler=sampler, **options)


def replacing(number: int) -> RandomSampler:
    return RandomSampler(Numbers(), replacement=True, num_samples=number)


def go_on(
    before: DataLoader[Any], after: DataLoader[Any], batches: int = 2
) -> tuple[Counter[int], list[str], Any]:
    """Two batches with one loader, the rest of the epoch with another; what was seen, and the notes."""
    seed(1)
    position = LoaderPosition(before)
    begun = iter(before)
    seen = [next(begun) for _ in range(batches)]
    state = decode(json.loads(json.dumps(encode(position.state()))))
    seed(2)
    resumed = LoaderPosition(after)
    notes = resumed.restore(state)
    begun = iter(after)
    seen.append(next(begun))
    saved_again = decode(json.loads(json.dumps(encode(resumed.state()))))
    seen += list(begun)
    return Counter(int(each) for batch in seen for each in batch), notes, saved_again


ONCE = {
    "no longer in order": (
        made,
        lambda: made(shuffle=True),
        SAMPLES,
        "samples came in the order of the data set",
    ),
    "no longer shuffled": (lambda: made(shuffle=True), made, SAMPLES, "samples came shuffled"),
    "another loader": (
        lambda: made(shuffle=True),
        lambda: StatefulDataLoader(Numbers(), batch_size=4, shuffle=True),
        SAMPLES,
        "after 8 of 23 samples",
    ),
    "workers, an order of NumPy": (
        lambda: sampled(Numpys()),
        lambda: sampled(Numpys(), workers=1),
        SAMPLES,
        "after 8",
    ),
    "grown": (
        lambda: made(shuffle=True),
        lambda: made(SAMPLES + 3, shuffle=True),
        SAMPLES,
        "has 26 samples, and had 23 when the epoch began: 3 new ones are seen from the next epoch on, 0 are",
    ),
    "another size, and drop_last": (made, lambda: made(size=6, drop_last=True), 20, "drop_last leaves 3 out"),
}


@pytest.mark.parametrize("case", ONCE)
def test_the_saved_order_goes_on_where_it_can_be_made_again(case):
    before, after, whole, told = ONCE[case]
    seen, notes, saved_again = go_on(before(), after())
    assert set(seen.values()) == {1}
    assert len(seen) == whole
    assert told in "; ".join(notes)
    last = after()
    LoaderPosition(last).restore(saved_again)
    again = Counter(int(each) for batch in last for each in batch)
    assert set(again) < set(seen), "and once more"
    size = 6 if "size" in case else 4
    assert len(again) == whole - 8 - size


def test_samples_that_are_gone_are_counted_and_the_others_seen_once():
    seen, notes, saved_again = go_on(made(shuffle=True), made(10, shuffle=True), batches=1)
    lost = Counter(each for each in seen if each >= 10)
    assert seen - lost == Counter(range(10))
    assert "has 10 samples, and had 23 when the epoch began: 0 new ones" in "; ".join(notes)
    assert "13 are gone" in "; ".join(notes)
    last = made(10, shuffle=True)
    LoaderPosition(last).restore(saved_again)
    rest = Counter(int(each) for batch in last for each in batch)
    assert rest < seen, "a second resume counts alike"
    assert rest.total() == seen.total() - 8


AGAIN = {
    "another sampler of the user's": (lambda: sampled(Numpys()), lambda: sampled(CountsEpochs())),
    "no more replacement": (lambda: sampled(replacing(23)), lambda: made(shuffle=True)),
    "more of them": (lambda: sampled(replacing(23)), lambda: sampled(replacing(30))),
    "a sampler of the user's, grown": (
        lambda: sampled(CountsEpochs()),
        lambda: made(25, sampler=CountsEpochs(25)),
    ),
    "a stream with workers": (
        lambda: DataLoader(Stream(), batch_size=4),
        lambda: DataLoader(Stream(), batch_size=4, num_workers=1),
    ),
}


@pytest.mark.parametrize("case", AGAIN)
def test_what_cannot_be_made_again_begins_again_with_the_number_seen_twice(case):
    before, after = (make() for make in AGAIN[case])
    _, notes, _ = go_on(before, after)
    assert "2 batches of 4, is seen twice" in notes[0]


def test_a_stream_in_other_batches_repeats_less_than_one_of_them_and_says_how_much():
    before, after = (DataLoader(Stream(), batch_size=size) for size in (4, 5))
    seen, notes, _ = go_on(before, after)
    assert "3 samples are seen twice: batches are of 5 now, and were of 4" in notes[0]
    assert seen.total() == SAMPLES + 3
    assert len(seen) == SAMPLES


def test_another_seed_is_told_and_the_saved_one_counts():
    def seeded(number: int) -> DataLoader[Any]:
        return made(shuffle=True, generator=torch.Generator().manual_seed(number))

    seen, notes, _ = go_on(seeded(3), seeded(4))
    assert seen == Counter(range(SAMPLES))
    assert any("stays 3, as it was saved, and is not 4" in note for note in notes)
    _, notes, _ = go_on(*(sampled(DistributedSampler(Numbers(), 1, 0, seed=number)) for number in (3, 4)))
    assert "the seed of its DistributedSampler stays 3, as it was saved, and is not 4" in notes[0]


class Dealing(CountsEpochs):
    """Deals to ranks without saying so."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(SAMPLES)
        self._part = slice(rank, None, ranks)

    def __len__(self) -> int:
        return len(range(SAMPLES)[self._part])

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[self._part])


@contextmanager
def among(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "comes"), [((2, 1), "twice"), ((1, 2), "never")], ids=str)
def test_ranks_that_deal_by_themselves_are_told_how_many_samples_come_twice_or_never(ranks, comes):
    before, after = ranks
    states, seen = [], Counter[int]()
    for rank in range(before):
        live = made(sampler=Dealing(rank, before), size=2)
        position = LoaderPosition(live)
        begun = iter(live)
        seen.update(int(each) for _ in range(3) for each in next(begun))
        with among(before):
            states.append(position.state())
    for rank in range(after):
        live = made(sampler=Dealing(rank, after), size=2)
        with among(after):
            (note,) = LoaderPosition(live).restore(states[min(rank, before - 1)], same_ranks=False)
        seen.update(int(each) for batch in live for each in batch)
    found = seen.total() - len(seen) if comes == "twice" else SAMPLES - len(seen)
    assert f"at least {found} are seen {comes}" in note
    assert found == 6
