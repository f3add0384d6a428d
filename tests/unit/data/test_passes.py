"""A re-entry belongs to the epoch that was saved: no later one is emptied, whatever a loop does.

Every case trains three epochs in a style of its own, with a save after each step and epoch, and resumes from
each of them. The samples and random numbers of every step are those of the training that never stopped.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, cycle, islice, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core import CheckpointManager
from ckpt_core.state import TrainState, decode, encode
from ckpt_core.types import SavedState
from tests.kit.ranks import run_ranks
from tests.unit.data.loops import Numbers, StatefulStream, seed

# Torchdata warns of torch.
pytestmark = pytest.mark.filterwarnings("ignore")

Loaders = Mapping[str, DataLoader[Any]]
Style = Callable[[Loaders], Iterable[Any]]
Place = tuple[int, bool]
EPOCHS = 3


def loaders(kind: str) -> dict[str, DataLoader[Any]]:
    """Make one of six batches, its twin, one of four, and one for validations."""
    options: dict[str, Any] = {
        "workers": {"num_workers": 1},
        "persistent": {"num_workers": 1, "persistent_workers": True},
        "own generators": {"generator": torch.Generator().manual_seed(4)},
    }.get(kind, {})
    made_by = StatefulDataLoader if kind == "stateful" else DataLoader

    def made(samples: int, **more: Any) -> DataLoader[Any]:
        return made_by(Numbers(samples), batch_size=2, shuffle=True, **options, **more)

    return {"long": made(12), "twin": made(11), "short": made(8), "validation": made(6)}


def trained(
    live: Loaders,
    style: Style,
    *,
    first: int = 0,
    save: Callable[[int, Place], None] = lambda *_: None,
    before: Callable[[Loaders], object] = lambda _: None,
) -> list[Any]:
    """Train; what each step saw and drew."""
    before(live)
    steps: list[Any] = []
    for epoch in range(first, EPOCHS):
        for batch in style(live):
            drawn = torch.rand(()).item(), random.random(), np.random.rand()
            steps.append((str(batch), *drawn))
            save(epoch, (len(steps), False))
        save(epoch + 1, (len(steps), True))
    return steps


def state_of(live: Loaders) -> TrainState:
    whole = TrainState(model=nn.Module(), dataloader=live)
    return whole.select(whole.names - {"model"})


def load(live: Loaders, saved: str) -> None:
    per_rank, shared = decode(json.loads(saved))
    found = SavedState(sharded={"": {}}, per_rank=per_rank, shared=shared, world_size=1, step=1)
    state = state_of(live)
    state.apply(state.target(found), found)


def wrong_places(
    style: Style,
    kind: str = "plain",
    before: Callable[[Loaders], object] = lambda _: None,
    at: Collection[Place] | None = None,
) -> list[Place]:
    """Train, and resume at each of these places, or all; those where the rest was another."""
    seed(1)
    live = loaders(kind)
    state, saved = state_of(live), dict[Place, Any]()

    def save(epoch: int, place: Place) -> None:
        captured = state.capture()
        saved[place] = epoch, json.dumps(encode([dict(captured.per_rank), dict(captured.shared)]))

    full = trained(live, style, save=save, before=before)
    seed(1)
    assert full == trained(loaders(kind), style, before=before), "saving changes the training"
    wrong = []
    for place in saved if at is None else at:
        epoch, text = saved[place]
        seed(99)
        again = loaders(kind)
        load(again, text)
        if trained(again, style, first=epoch, before=before) != full[place[0] :]:
            wrong.append(place)
    return wrong


def by_turns(live: Loaders) -> Iterator[Any]:
    """Go on through the shorter one for all epochs of the longer."""
    kept = vars(live["long"]).setdefault("by_turns", [])
    for batch in live["long"]:
        if not kept:
            kept.append(iter(live["short"]))
        try:
            other = next(kept[0])
        except StopIteration:
            kept[0] = iter(live["short"])
            other = next(kept[0])
        yield batch, other


def by_hand(live: Loaders) -> Iterator[Any]:
    """Begin the longer one ahead of the loop over the shorter."""
    others = iter(live["long"])
    for batch in live["short"]:
        yield batch, next(others)


def by_hand_for_all_epochs(live: Loaders) -> Iterator[Any]:
    """Begin one ahead of all loops, again and again."""
    kept = vars(live["twin"]).setdefault("endless", [])
    if not kept:
        kept.extend([iter(live["twin"]), chain.from_iterable(live["twin"] for _ in range(EPOCHS))])
    endless = chain(*kept)
    for batch in live["short"]:
        yield batch, next(endless)


def ahead_of_two(live: Loaders) -> Iterator[Any]:
    first, second = iter(live["long"]), iter(live["twin"])
    for batch in live["short"]:
        yield batch, next(first), next(second)


def validating(live: Loaders) -> Iterator[Any]:
    yield from live["long"]
    with torch.no_grad():
        for _ in live["validation"]:
            torch.rand(())


STYLES: dict[str, Style] = {
    "one": lambda live: live["long"],
    "zip of equals": lambda live: zip(live["long"], live["twin"], strict=False),
    "zip, the longer first": lambda live: zip(live["long"], live["short"], strict=False),
    "zip, the shorter first": lambda live: zip(live["short"], live["long"], strict=False),
    "zip of three": lambda live: zip(live["short"], live["long"], live["twin"], strict=False),
    "numbered by a range": lambda live: (batch for _, batch in zip(range(6), live["long"], strict=False)),
    "one after the other": lambda live: chain(live["short"], live["long"]),
    "by turns": by_turns,
    "by hand, the longer first": by_hand,
    "by hand, an endless one": by_hand_for_all_epochs,
    "by hand, two ahead": ahead_of_two,
    "cycle of the longer": lambda live: zip(live["short"], cycle(live["long"]), strict=False),
    "validating": validating,
}


@pytest.mark.parametrize("style", STYLES)
def test_a_resume_goes_on_in_the_saved_epoch_and_leaves_later_ones_whole(style):
    assert wrong_places(STYLES[style]) == []


@pytest.mark.parametrize(
    ("kind", "style"),
    [
        ("own generators", "zip, the longer first"),
        ("own generators", "one after the other"),
        ("stateful", "zip of equals"),
        ("stateful", "zip, the shorter first"),
    ],
)
def test_it_does_so_with_any_loader(kind, style):
    assert wrong_places(STYLES[style], kind) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["workers", "persistent"])
@pytest.mark.parametrize("style", ["zip of equals", "zip, the longer first", "one after the other"])
def test_it_does_so_with_workers(kind, style):
    last = {"zip of equals": 6, "zip, the longer first": 4, "one after the other": 10}[style]
    assert wrong_places(STYLES[style], kind, at=[(last - 1, False), (last, False), (last, True)]) == []


def look(live: Loaders) -> None:
    """Draw a batch to look at, an iterator for nothing, and random numbers."""
    next(iter(live["long"]), None)
    iter(live["short"])
    torch.rand(()), random.random(), np.random.rand()
    with torch.no_grad():
        list(live["validation"])


@pytest.mark.parametrize("kind", ["plain", "own generators", "stateful"])
@pytest.mark.parametrize("style", ["one", "zip of equals", "validating"])
def test_what_is_drawn_between_the_load_and_the_first_step_counts_for_nothing(kind, style):
    wrong = wrong_places(STYLES[style], kind, before=look)
    almost_over = {(last - missing, False) for last in (6, 12, 18) for missing in (0, 1)}
    drawn_from = set() if kind == "plain" else {(6, True), (12, True)}
    assert set(wrong) <= almost_over | drawn_from, "only a look at an epoch's end may count"


def test_epochs_that_the_loop_leaves_are_told_once_and_known_from_then_on(caplog):
    wrong = wrong_places(lambda live: islice(live["long"], 4))
    assert [place for place in wrong if place[1]] == [(4, True)]
    assert [each.message for each in caplog.records if "had left a DataLoader at batch 4" in each.message]


def test_a_loop_that_was_left_to_stop_goes_on_behind_the_last_step():
    """The usual end of a training by a number of steps; a later one goes on."""
    seed(1)
    live = loaders("plain")
    state = state_of(live)
    full = trained(loaders("plain"), STYLES["one"])
    seed(1)
    for number, _ in enumerate(live["long"], 1):
        torch.rand(()), random.random(), np.random.rand()
        if number == 4:
            break
    captured = state.capture()
    again = loaders("plain")
    load(again, json.dumps(encode([dict(captured.per_rank), dict(captured.shared)])))
    assert trained(again, STYLES["one"]) == full[4:]


@pytest.mark.parametrize(
    "style",
    [
        lambda live: zip(live["long"], cycle(live["short"]), strict=False),
        lambda live: zip_longest(live["long"], live["short"]),
    ],
    ids=["cycle", "zip_longest"],
)
def test_a_shorter_loader_that_has_ended_beside_a_longer_one_is_told(caplog, style):
    """No position says what the loop makes of its end; later epochs are whole."""
    assert [place for place in wrong_places(style) if place[1]] == []
    assert "has ended while a longer loader beside it goes on" in caplog.text


def optimized(**loader: Any) -> TrainState:
    model = nn.Linear(1, 1)
    return TrainState(model=model, optimizer=torch.optim.SGD(model.parameters()), **loader)


@pytest.mark.parametrize("kind", ["plain", "stateful", pytest.param("persistent", marks=pytest.mark.slow)])
def test_a_loader_that_the_state_lacks_is_told_once_at_the_first_save(caplog, kind):
    live, state = loaders(kind), optimized()
    for _ in zip(live["long"], live["short"], strict=False):
        state.capture()
    assert caplog.text.count("If it trains, give it to TrainState(dataloader=...)") == 1


@pytest.mark.parametrize("saved_after", [1, 2, 3])
def test_it_is_told_whether_the_first_save_comes_after_one_batch_or_several(caplog, saved_after):
    live, state = loaders("plain"), optimized()
    for number, _ in enumerate(live["long"], 1):
        if number >= saved_after:
            state.capture()
    assert caplog.text.count("no loader is in the state") == 1


def told_where_no_loader_is_needed() -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt_core").addHandler(handler)
    optimized().capture()  # numbers made in the loop
    live = loaders("plain")
    for _ in live["validation"]:
        pass
    optimized().capture()
    with_loader = optimized(dataloader=live["long"])
    for _ in live["long"]:
        with_loader.capture()
        with_loader.select(with_loader.names - {"dataloader"}).capture()
        TrainState(model=nn.Linear(1, 1)).capture()  # weights to look at
        break
    with torch.no_grad():
        begun = iter(live["long"])  # known, and drawn from without gradients
        next(begun)
        optimized().capture()
    kept = [iter(each) for each in loaders("plain").values()]  # untracked, to look at a batch of each
    shown = iter(live["short"])  # tracked
    samples = [next(each) for each in (*kept, shown)]
    own = optimized()
    for _ in samples:
        own.capture()
    del kept, shown
    return told


@pytest.mark.slow
def test_no_loader_is_missed_where_none_is_needed():
    """In a process of its own, where no other test has left an iterator."""
    (told,) = run_ranks(told_where_no_loader_is_needed, 1, process_group=False, timeout_seconds=60)
    assert [each for each in told if "no loader is in the state" in each] == []


@pytest.mark.slow
def test_an_epoch_that_a_stream_in_workers_has_ended_takes_nothing_of_the_next(tmp_path):
    def made() -> tuple[Any, TrainState]:
        loader: Any = StatefulDataLoader(StatefulStream(), batch_size=2, num_workers=2)
        return loader, optimized(dataloader=loader)

    loader, state = made()
    with CheckpointManager(tmp_path) as manager:
        whole = [batch.tolist() for batch in loader]
        assert whole
        manager.save(1, state)
    loader, state = made()
    with CheckpointManager(tmp_path) as manager:
        assert manager.resume(state) == 1
        assert [batch.tolist() for batch in loader] == whole
