"""Random numbers that a data set draws in loader workers go on after a resume as if there had been none."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core.data import LoaderPosition
from ckpt_core.state import decode, encode
from tests.unit.data.loops import Loader, positions_of, resumed, seed, untracked

# Torchdata warns of torch.
pytestmark = pytest.mark.filterwarnings("ignore")


class Augmented(Dataset[list[float]]):
    """Draws from the generators with these names for each sample, from some as often as its index says."""

    def __init__(self, *names: str, samples: int = 14) -> None:
        self.names, self.samples = names, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> list[float]:
        made = {
            "torch": lambda: float(torch.rand(index % 3 + 1).sum()),
            "random": random.random,
            "numpy": np.random.rand,
            "worker": lambda: float(getattr(get_worker_info(), "id", -1)),
        }
        return [float(index), *(made[name]() for name in self.names)]


def seed_anew(worker: int) -> None:
    np.random.seed(worker + 7)


def stack(samples: list[list[float]]) -> Any:
    return torch.tensor(samples) + torch.rand(())


class Knowing(Augmented):
    """Has a state, so that torchdata's loader goes on by its own."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def made(
    *names: str, kind: Any = DataLoader, data: Any = Augmented, samples: int = 10, **options: Any
) -> Loader:
    options = {"batch_size": 2, "num_workers": 2, "collate_fn": torch.tensor} | options
    return lambda: kind(data(*names, samples=samples), **options)


CASES = {
    "torch, one worker": made("torch", num_workers=1),
    "random, shuffled": made("random", shuffle=True),
    "numpy, seeded by the user": made("numpy", worker_init_fn=seed_anew),
    "all, three workers": made("torch", "random", "numpy", "worker", num_workers=3, prefetch_factor=1),
    "persistent": made("torch", "worker", persistent_workers=True, shuffle=True),
    "persistent, three": made("numpy", num_workers=3, persistent_workers=True, prefetch_factor=4),
    "torchdata's": made("random", "worker", kind=StatefulDataLoader, shuffle=True, num_workers=3),
    "torchdata's, by its own state": made("torch", "worker", kind=StatefulDataLoader, data=Knowing),
    "drawn where batches are made": made(collate_fn=stack),
    "single samples": made("torch", batch_size=None, samples=5),
    "spawned, each imports torch": made("torch", num_workers=1, multiprocessing_context="spawn", samples=4),
    "of a fork server": made("torch", "worker", multiprocessing_context="forkserver", samples=6),
    "no draws, but a number of the worker": made("worker", num_workers=3),
}
QUICK = {"all, three workers", "persistent"}


@pytest.mark.parametrize(
    "case", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
def test_random_numbers_of_workers_go_on_after_any_batch_and_epoch(case):
    make = CASES[case]
    full, saved = positions_of(make)
    assert full == untracked(make), "tracking changes the data"
    each = len(full) // 3
    places = [(each - 1, False), (each, True), (each + 2, False)]
    wrong = [place for place in places if resumed(make, saved[place])[0] != full[place[0] :]]
    assert wrong == []


def test_random_numbers_of_workers_go_back_with_a_rollback_in_the_same_process():
    seed(1)
    live = made("torch", "worker", persistent_workers=True)()
    position = LoaderPosition(live)
    batches = iter(live)
    next(batches)
    saved = position.state(), torch.get_rng_state()
    rest = [each.tolist() for each in batches]
    position.restore(saved[0])
    torch.set_rng_state(saved[1])
    assert [each.tolist() for each in live] == rest


def after_a_cut(make: Loader, batches: int) -> tuple[dict[str, Any], list[Any]]:
    """A position after an epoch that was left after one batch, and some of the next; and what follows."""
    seed(1)
    live = make()
    position = LoaderPosition(live)
    next(iter(live))
    if not batches:
        return position.state(ended=True), []
    following = iter(live)
    for _ in range(batches):
        next(following)
    return position.state(), [each.tolist() for each in following]


@pytest.mark.parametrize("batches", [0, 1])
def test_what_workers_drew_ahead_of_a_cut_epoch_is_told(batches, caplog):
    after_a_cut(made("random", persistent_workers=True), batches)
    assert "draw random numbers, and have read ahead" in caplog.text


def test_each_worker_is_known_again_with_its_next_batch(caplog):
    make = made("random", persistent_workers=True)
    state, rest = after_a_cut(make, 2)
    assert caplog.text == ""
    seed(99)
    live = make()
    LoaderPosition(live).restore(decode(json.loads(json.dumps(encode(state)))))
    assert [each.tolist() for each in live] == rest


@pytest.mark.parametrize(
    "make", [made(persistent_workers=True), made("worker", persistent_workers=True), made("numpy")]
)
def test_workers_that_drew_nothing_or_end_with_their_epoch_are_not_told_of(make, caplog):
    state, _ = after_a_cut(make, 0)
    assert state["drawn"] == []
    assert caplog.text == ""


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_other_workers_go_on_with_no_random_numbers_and_that_is_told(workers):
    seed(1)
    before = made("torch")()
    position = LoaderPosition(before)
    batches = iter(before)
    next(batches)
    notes = LoaderPosition(made("torch", num_workers=workers)()).restore(position.state())
    assert "as many workers as at the save" in "; ".join(notes)
