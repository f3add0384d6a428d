"""A resumed loader hands out what the uninterrupted one does, and draws nothing but what that draws."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core.data import LoaderPosition, track
from ckpt_core.errors import ConfigError
from ckpt_core.state import decode, encode
from tests.support.thorough import THOROUGH
from tests.unit.data.loops import (
    BATCH,
    SAMPLES,
    DrawsAsItGoes,
    Loader,
    Numbers,
    StatefulStream,
    Stream,
    loader,
    positions_of,
    resumed,
    seed,
    untracked,
)

# Torchdata warns of torch.
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = (
    *("sequential", "shuffled", "own generator", "sampler's generator", "replacement", "weighted"),
    *("distributed", "counts epochs", "numpy", "batches", "single"),
)


def assert_exact(make: Loader, at: tuple[str, ...] = ("all",)) -> None:
    full, saved = positions_of(make)
    assert full == untracked(make), "tracking changes the data"
    epoch = len(full) // 3
    chosen = {"last batch": (epoch, False), "edge": (epoch, True), "second epoch": (epoch + 2, False)}
    places = list(saved) if at == ("all",) else [chosen[each] for each in at]
    wrong = [place for place in places if resumed(make, saved[place])[0] != full[place[0] :]]
    assert wrong == []


@pytest.mark.parametrize("stateful", [False, True], ids=["DataLoader", "StatefulDataLoader"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_is_exact_after_every_batch_and_epoch_whatever_the_sampler(kind, stateful):
    assert_exact(lambda: loader(kind, stateful=stateful))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stateful", "persistent"),
    [("shuffled", False, True), ("replacement", True, True), ("own generator", False, False)],
)
def test_a_resume_is_exact_with_workers(kind, stateful, persistent):
    places = ("edge", "second epoch")
    assert_exact(lambda: loader(kind, stateful=stateful, workers=1, persistent=persistent), places)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stateful", "persistent"),
    [
        (kind, stateful, persistent)
        for number, kind in enumerate(KINDS)
        for stateful in (False, True)
        for persistent in (False, True)
        if THOROUGH or number % 4 == 2 * stateful + persistent
    ],
)
def test_a_resume_is_exact_with_any_workers_and_sampler(kind, stateful, persistent):
    places = ("last batch", "edge", "second epoch")
    assert_exact(lambda: loader(kind, stateful=stateful, workers=2, persistent=persistent), places)


def test_a_loader_may_draw_its_first_index_after_others_have_drawn():
    """As in `for one, other in zip(loader, another)`: the sampler waits until the first batch."""

    def both(position: bool, saved: Any = None) -> tuple[list[Any], Any]:
        generator = torch.Generator().manual_seed(5)
        pair = [loader(kind) for kind in ("shuffled", "replacement")]
        pair.append(DataLoader(Numbers(), batch_size=BATCH, shuffle=True, generator=generator))
        pair.append(DataLoader(Numbers(), batch_size=BATCH, shuffle=True, generator=generator))
        positions = [LoaderPosition(each) for each in pair] if position else []
        if saved is not None:
            for each, state in zip(positions, saved[0], strict=True):
                each.restore(state)
            torch.set_rng_state(saved[1])
        states, steps = None, []
        for number, batches in enumerate(zip(*pair, strict=False)):
            steps.append([each.tolist() for each in batches])
            if number == 2 and position and saved is None:
                states = [each.state() for each in positions], torch.get_rng_state()
        return steps, states

    seed(1)
    full, _ = both(position=False)
    seed(1)
    tracked, saved = both(position=True)
    seed(99)
    assert tracked == full
    assert both(position=True, saved=saved)[0] == full[3:]


@pytest.mark.parametrize("kind", ["shuffled", "counts epochs", "batches"])
def test_no_sample_is_fetched_to_find_a_position(kind):
    full, saved = positions_of(lambda: loader(kind))
    live = loader(kind)
    LoaderPosition(live).restore(decode(json.loads(saved[4, False][1])))
    iter(live)
    assert live.dataset.fetched == 0
    assert len(list(live)) == len(full) // 3  # the one begun before was the rest


@pytest.mark.parametrize("stateful", [False, True], ids=["DataLoader", "StatefulDataLoader"])
def test_the_position_in_a_stateful_stream_is_exact(stateful):
    kind = StatefulDataLoader if stateful else DataLoader
    assert_exact(lambda: kind(StatefulStream(), batch_size=BATCH))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_without_state_is_drawn_again_and_the_cost_is_named(workers):
    def make() -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=BATCH, num_workers=workers)

    assert_exact(make, ("last batch", "edge", "second epoch"))
    _, saved = positions_of(make)
    assert resumed(make, saved[6, True])[1] == []
    (note,) = resumed(make, saved[8, False])[1]
    assert "2 batches" in note
    assert "state_dict()" in note


def test_a_sampler_that_draws_as_it_goes_is_named(caplog):
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(), batch_size=BATCH, sampler=DrawsAsItGoes())

    full, saved = positions_of(make)
    with caplog.at_level(logging.WARNING):
        steps, _ = resumed(make, saved[3, False])
    assert len(steps) == len(full) - 3
    assert "draws random numbers while an epoch goes on" in caplog.text


@pytest.mark.parametrize("kind", ["shuffled", "replacement"])
def test_a_position_can_be_put_back_in_the_same_process(kind):
    live = loader(kind)
    position = LoaderPosition(live)
    begun = iter(live)
    next(begun)
    state = position.state()
    rest = [batch.tolist() for batch in begun]
    position.restore(state)
    assert [batch.tolist() for batch in live] == rest


@pytest.mark.slow
def test_a_position_can_be_put_back_with_the_same_workers():
    live = loader("replacement", workers=2, persistent=True)
    position = LoaderPosition(live)
    list(live)
    begun = iter(live)
    next(begun)
    state = position.state()
    rest = [batch.tolist() for batch in begun]
    position.restore(state)
    assert [batch.tolist() for batch in live] == rest


@pytest.mark.parametrize("place", [(2, False), (6, True)], ids=["mid-epoch", "edge"])
def test_a_position_that_was_put_back_and_not_used_yet_is_saved_again(place):
    full, saved = positions_of(lambda: loader("own generator"))
    epoch, state, numbers = saved[place]
    between = LoaderPosition(loader("own generator"))
    between.restore(decode(json.loads(state)))
    again = json.dumps(encode(between.state()))
    steps, _ = resumed(lambda: loader("own generator"), (epoch, again, numbers))
    assert steps == full[place[0] :]


def test_a_loader_that_is_being_iterated_is_refused():
    live = loader("shuffled")
    begun = iter(live)
    next(begun)
    with pytest.raises(ConfigError, match="before the loop"):
        LoaderPosition(live)
    list(begun)
    LoaderPosition(live)


def test_an_object_without_a_position_is_refused():
    with pytest.raises(ConfigError, match="cannot tell its position"):
        LoaderPosition([1, 2, 3])


def test_a_tracked_loader_is_copied_and_pickled_as_the_stock_one():
    live = loader("shuffled")
    track(live)
    assert isinstance(live, DataLoader)
    for other in (copy.copy(live), copy.deepcopy(live), pickle.loads(pickle.dumps(live))):
        assert type(other) is DataLoader
        assert sum(len(batch) for batch in other) == SAMPLES // BATCH * BATCH


def test_a_state_of_torchdata_of_an_earlier_version_still_loads():
    def make() -> DataLoader[Any]:
        return loader("own generator", stateful=True)

    seed(1)
    live = make()
    full = [batch.tolist() for batch in live]
    seed(1)
    live = make()
    begun = iter(live)
    next(begun)
    state = live.state_dict()
    again = make()
    assert LoaderPosition(again).restore(state) == []
    assert [batch.tolist() for batch in again] == full[1:]


def test_capture_draws_nothing():
    live = loader("own generator")
    position = LoaderPosition(live)
    next(iter(live))
    before = torch.get_rng_state()
    encode(position.state())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_torch_keeps_in_its_iterators_is_where_we_look_for_it():
    live = loader("shuffled", workers=1, persistent=True)
    stream = iter(DataLoader(Stream()))
    assert live._iterator is None
    for iterator in (iter(loader("shuffled")), iter(loader("shuffled", stateful=True))):
        assert {"_index_sampler", "_sampler_iter", "_num_yielded"} <= vars(iterator).keys()
    assert "_sampler_iter_yielded" in vars(iter(loader("shuffled", stateful=True)))
    assert stream._dataset_fetcher.ended is False


class _Own(BatchSampler):
    """A batch sampler of a user's."""

    def __iter__(self):
        yield from super().__iter__()


@pytest.mark.parametrize("automatic", [True, False])
def test_another_batch_size_of_a_sampler_that_makes_batches_itself_begins_the_epoch_again(automatic):
    def made(size):
        batches = _Own(SequentialSampler(range(32)), size, False)
        options = {"batch_sampler": batches} if automatic else {"sampler": batches, "batch_size": None}
        return DataLoader(TensorDataset(torch.arange(32)), **options)

    loader = made(4)
    position = LoaderPosition(loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    other = made(8)
    (note,) = LoaderPosition(other).restore(position.state())
    assert "begins again" in note
    assert sorted(torch.cat([ids for (ids,) in other]).tolist()) == list(range(32))
