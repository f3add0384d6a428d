"""Accelerate: a resumed run sees the data that it would have seen, on any number of ranks."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import accelerate_ckpt
from ckpt_core.data import LoaderPosition
from ckpt_core.state import decode, encode
from tests.adapters.accelerate_data_jobs import (
    SAMPLES,
    STREAMED,
    Run,
    collated,
    loops,
    of_all,
    of_torch,
    prepared,
)
from tests.kit.ranks import run_ranks
from tests.unit.data.test_hidden import in_background

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

PER_EPOCH = 7  # batches of 4 of 26 samples; 4 on two ranks

ONE_PROCESS = {
    "the function": Run(by_function=True),
    "a generator": Run(kind="generator"),
    "a sampler of numpy": Run(kind="numpy"),
    "with replacement": Run(kind="replacement"),
    "a dispatcher": Run(dispatch=True),
    "stateful": Run(stateful=True),
    "stateful, drawn early": Run(stateful=True, kind="drawn_early"),
    "evaluation at the end": Run(evaluate=True),
    "evaluation at both ends": Run(evaluate=True, evaluate_first=True),
    "samples that draw": Run(draws=of_all),
    "samples that draw, a sampler of numpy, the function": Run(draws=of_all, kind="numpy", by_function=True),
    "samples that draw, batches of the user's, evaluation": Run(draws=of_torch, kind="blocks", evaluate=True),
    "drawn where batches are made": Run(collate=collated, seedable=True),
    "samples that draw, stateful": Run(draws=of_all, stateful=True),
    "samples that draw, a dispatcher": Run(draws=of_all, dispatch=True),
}
ONE_PROCESS_SLOWLY = {
    "persistent workers": Run(workers=1, persistent=True, evaluate=True),
    "persistent workers, a generator": Run(workers=2, persistent=True, kind="generator"),
    "stateful, workers": Run(stateful=True, workers=2),
    "stateful, drawn early, workers": Run(stateful=True, kind="drawn_early", workers=2),
    "stateful, persistent workers": Run(stateful=True, workers=2, persistent=True),
    "stateful, workers, seedable": Run(stateful=True, workers=2, seedable=True),
    "numpy, workers": Run(kind="numpy", workers=2),
    "samples that draw, a worker": Run(draws=of_torch, workers=1),
    "samples that draw, persistent workers": Run(draws=of_all, workers=2, persistent=True),
    "drawn where workers make batches": Run(collate=collated, workers=1),
    "samples that draw, stateful, workers": Run(draws=of_torch, stateful=True, workers=2),
}
TWO_RANKS = {
    "default": Run(evaluate_first=True),
    "the function, seedable": Run(seedable=True, by_function=True),
    "a dispatcher": Run(dispatch=True),
    "a dispatcher, the function": Run(dispatch=True, by_function=True),
    "a sampler with epochs": Run(kind="by_epoch"),
    "samples that draw": Run(draws=of_torch),
    "samples that draw, a dispatcher": Run(draws=of_all, dispatch=True),
    "stateful, persistent workers": Run(stateful=True, workers=1, persistent=True),
}
ELASTIC = {
    "default": Run(batch=2),
    "the function, seedable": Run(batch=2, seedable=True, by_function=True),
    "a dispatcher": Run(batch=2, dispatch=True),
    "a sampler of numpy": Run(batch=2, kind="numpy"),
    "batches of the user's": Run(kind="blocks"),
    "a stream with a generator": Run(batch=2, kind="shuffled_stream", dispatch=False),
    "a dispatched stream": Run(batch=2, kind="stream"),
    "stateful": Run(batch=2, stateful=True),
    "stateful, drawn early": Run(batch=2, stateful=True, kind="drawn_early"),
}
ELASTIC_SLOWLY = {
    "stateful, drawn early, workers": Run(batch=2, stateful=True, kind="drawn_early", workers=2),
    "stateful, workers": Run(batch=2, stateful=True, workers=2),
    "stateful, workers, seedable": Run(batch=2, stateful=True, workers=2, seedable=True),
    "stateful, persistent workers": Run(batch=2, stateful=True, workers=2, persistent=True),
    "a stateful stream": Run(batch=2, stateful=True, kind="stream", dispatch=False),
    "split batches": Run(split=True),
}


def with_resumes(run: Run, root: Path, at: Sequence[int]) -> list[Run]:
    """Stock, a run that saves, and one from each checkpoint."""
    saves = run.but(root=str(root), save_at=tuple(at))
    return [
        run.but(enabled=False),
        saves,
        *(run.but(root=str(root), load=f"{root}/checkpoint_{step}") for step in at),
    ]


def assert_exact(results: Sequence[dict[str, Any]], at: Sequence[int]) -> None:
    stock, saved, *resumed = results
    assert saved == stock, "a run that never resumes"
    for step, result in zip(at, resumed, strict=True):
        assert result["trace"] == saved["trace"][step:], f"from step {step}"
        assert result["weights"] == saved["weights"]


@pytest.mark.parametrize("case", ONE_PROCESS)
def test_a_resume_sees_the_same_data_and_random_numbers(case: str, tmp_path: Path) -> None:
    at = (3, PER_EPOCH, PER_EPOCH + 2)
    assert_exact(loops(with_resumes(ONE_PROCESS[case], tmp_path, at)), at)


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE_PROCESS_SLOWLY)
def test_a_resume_sees_the_same_data_and_random_numbers_with_workers(case: str, tmp_path: Path) -> None:
    at = (3, PER_EPOCH, PER_EPOCH + 2)
    assert_exact(loops(with_resumes(ONE_PROCESS_SLOWLY[case], tmp_path, at)), at)


@pytest.mark.parametrize("skip", [True, False])
def test_a_loop_that_was_left_early_goes_on_or_begins_again_as_the_script_says(
    skip: bool, tmp_path: Path
) -> None:
    run = Run(leave_after=5, save_behind=True, skip=skip)
    assert_exact(loops(with_resumes(run, tmp_path, (5,))), (5,))


def test_a_stream_without_a_length_goes_on_from_any_batch_and_from_its_end(tmp_path: Path) -> None:
    run = Run(kind="unsized_stream", leave_after=STREAMED // 4)
    assert_exact(loops(with_resumes(run, tmp_path, (3, 6, 8))), (3, 6, 8))


def test_a_stateful_loader_of_which_a_script_skips_batches_is_whole_in_the_next_epoch(
    tmp_path: Path,
) -> None:
    run = Run(stateful=True, root=str(tmp_path), steps=12)
    saved, resumed = loops([run.but(save_at=(3,)), run.but(load=f"{tmp_path}/checkpoint_3", skips=3)])
    assert resumed["trace"] == saved["trace"][3:]


def test_a_checkpoint_saved_right_after_a_load_has_the_same_position(tmp_path: Path) -> None:
    run = Run(root=str(tmp_path), steps=9)
    (saved,) = loops([run.but(save_at=(2,))])
    made, *_ = prepared(run)
    made.load_state(f"{tmp_path}/checkpoint_2")
    (tmp_path / "again").mkdir()
    made.save_state(f"{tmp_path}/again/checkpoint_2")
    accelerate_ckpt.checkpoints(made).wait()
    accelerate_ckpt.disable(made)
    (resumed,) = loops([run.but(load=f"{tmp_path}/again/checkpoint_2")])
    assert resumed["trace"] == saved["trace"][2:]


def test_a_loop_that_goes_on_behind_a_load_keeps_its_data(tmp_path: Path) -> None:
    made, _net, _optimizer, _schedule, train, _ = prepared(Run(root=str(tmp_path)))
    seen: list[int] = []
    for epoch in range(2):
        for index, batch in enumerate(train):
            seen += map(int, batch.flatten())
            if (epoch, index) == (0, 2):
                made.save_state(f"{tmp_path}/checkpoint_0")
            if (epoch, index) == (0, 4):
                made.load_state(f"{tmp_path}/checkpoint_0")
        assert Counter(seen) == Counter(dict.fromkeys(range(SAMPLES), epoch + 1))
    made.end_training()


@pytest.mark.parametrize("seed", range(30))
def test_any_chain_of_resumes_gives_every_sample_of_an_epoch_once(seed: int) -> None:
    """Of ranks and batches in any order; of shuffled data and of a stream."""
    chance = random.Random(seed)
    samples, is_stream = chance.randint(20, 200), seed % 2 == 0
    state, seen, ended = None, Counter[int](), False
    while not ended:
        ranks, size, batches = chance.randint(1, 4), chance.randint(1, 6), chance.randint(1, 5)
        for rank in range(ranks):
            loader = dealt(samples, size, rank, ranks, is_stream=is_stream)
            position = LoaderPosition(loader, ahead=1)
            if state is not None:
                position.restore(state, same_ranks=False)
            found = list(itertools.islice(loader, batches + 1))  # one is fetched ahead
            if rank == 0:
                saved, ended = position.state(ended=False), len(found) <= batches
            seen.update(index for batch in found[:batches] for index in batch.tolist())
        state = decode(json.loads(json.dumps(encode(saved))))
        assert ended or set(seen.values()) == {1}
    assert set(seen) == set(range(samples))
    assert seen.total() - samples < ranks * size, "what fills up the last batches"


@pytest.mark.parametrize("replacement", [False, True], ids=["order", "replacement"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_save_after_any_batch_leaves_every_later_epoch_its_order(workers: int, replacement: bool) -> None:
    """Workers are ahead of the loop, and the host ahead of both: a sampler draws once more at its end."""

    def made(seed: int) -> DataLoader[int]:
        drawn = torch.Generator().manual_seed(seed)
        order = RandomSampler(range(70), replacement=replacement, generator=drawn)
        return DataLoader(range(70), batch_size=9, sampler=order, num_workers=workers)  # type: ignore[arg-type]

    def epoch(loader: DataLoader[int]) -> Iterator[list[int]]:
        drawn = iter(loader)
        following = next(drawn)
        while following is not None:  # the next one is fetched before this one is trained on
            batch, following = following, next(drawn, None)
            yield batch.tolist()

    loader = made(1)
    position, states, seen = LoaderPosition(loader, ahead=1), [], []
    for batch in epoch(loader):
        seen.append(batch)
        states.append(decode(json.loads(json.dumps(encode(position.state(ended=False))))))
    last = list(epoch(loader))
    for done, state in enumerate(states[:-1], start=1):
        resumed = made(done + 1)
        LoaderPosition(resumed, ahead=1).restore(state, same_ranks=True)
        assert [*epoch(resumed)] == seen[done:], f"after {done} batches"
        assert [*epoch(resumed)] == last, f"the epoch after a save after {done} batches"


class Numbers(torch.utils.data.IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


def dealt(samples: int, size: int, rank: int, ranks: int, *, is_stream: bool) -> DataLoader[Any]:
    """The inner loader of one that Accelerate has prepared."""
    if is_stream:
        shard = IterableDatasetShard(
            Numbers(samples), batch_size=size, num_processes=ranks, process_index=rank
        )
        return DataLoader(shard, batch_size=size)
    order = RandomSampler(range(samples), generator=torch.Generator().manual_seed(5))
    batches = BatchSamplerShard(BatchSampler(order, size, drop_last=False), ranks, rank)
    return DataLoader(range(samples), batch_sampler=batches)  # type: ignore[arg-type]


@pytest.mark.parametrize("dispatch", [None, True])
def test_random_numbers_of_a_stream_that_will_be_others_are_told_once_at_the_first_save_within_an_epoch(
    dispatch: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(kind="drawing_stream", draws=of_all, dispatch=dispatch)
    whole = STREAMED // run.batch
    loops([run.but(root=str(tmp_path), save_at=(whole,), steps=whole)])
    assert "draw random numbers" not in caplog.text, "at the end of an epoch all is exact"
    loops([run.but(root=str(tmp_path / "within"), save_at=(2, 3), steps=3)])
    assert caplog.text.count("draw random numbers where it fetches ahead of the loop") == 1


@pytest.mark.parametrize(("skips", "told"), [(5, "skips 5 batches"), (None, "begins this epoch again")])
def test_another_position_than_the_saved_one_is_told_with_numbers(
    skips: int | None, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(root=str(tmp_path), steps=4)
    loops([run.but(save_at=(3,))])
    with caplog.at_level(logging.WARNING):
        loops([run.but(load=f"{tmp_path}/checkpoint_3", skip=skips is not None, skips=skips)])
    assert f"data loader 0 was saved after 3 batches of epoch 0, and {told}" in caplog.text


def seen_by_epoch(results: Sequence[Sequence[dict[str, Any]]]) -> dict[int, Counter[int]]:
    """How often each sample was seen, by all ranks of several lives."""
    seen: dict[int, Counter[int]] = {}
    for result in (result for of_life in results for result in of_life):
        for _, epoch, batch, *_ in result["trace"]:
            seen.setdefault(epoch, Counter()).update(map(int, batch))
    return seen


def assert_every_sample_once(run: Run, seen: Counter[int], *, added: int = 0) -> None:
    whole = STREAMED if "stream" in run.kind else SAMPLES
    assert sorted(seen) == list(range(whole)), "never seen"
    assert sum(seen.values()) == whole + added, "seen twice"


def lives(run: Run, root: Path, number: int, *, last: bool) -> Run:
    """One of several lives, each of which makes one step of the same epoch; the last ends the run."""
    return run.but(
        root=str(root),
        same_seed=True,
        load=f"{root}/checkpoint_{number}" if number else None,
        save_at=() if last else (number + 1,),
        steps=100 if last else number + 1,
    )


@pytest.mark.parametrize(
    "case", [*ELASTIC, *(pytest.param(name, marks=pytest.mark.slow) for name in ELASTIC_SLOWLY)]
)
def test_with_another_batch_size_every_sample_of_the_epoch_is_seen_once(case: str, tmp_path: Path) -> None:
    run = (ELASTIC | ELASTIC_SLOWLY)[case]
    sizes = [2, 5, 3] if run.kind != "blocks" else [2, 2, 2]
    results = [
        loops([lives(run.but(batch=size), tmp_path, number, last=number == 2)])
        for number, size in enumerate(sizes)
    ]
    for seen in seen_by_epoch(results).values():
        assert_every_sample_once(run, seen)


@pytest.mark.distributed
class TestOnTwoRanks:
    """All in one pair of ranks, before and after which one process saves and loads."""

    @pytest.fixture(scope="class")
    @classmethod
    def results(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        root = tmp_path_factory.mktemp("ranks")
        at = (4, 6)
        exact = [with_resumes(run, root / name, at) for name, run in TWO_RANKS.items()]
        first = {name: loops([lives(run, root / name, 0, last=False)]) for name, run in ELASTIC.items()}
        grown = [lives(run, root / name, 1, last=False) for name, run in ELASTIC.items()]
        per_rank = run_ranks(loops, 2, [run for case in exact for run in case] + grown, timeout_seconds=200)
        each, behind = 2 + len(at), sum(map(len, exact))
        found: dict[str, Any] = {"at": at}
        for number, name in enumerate(TWO_RANKS):
            found["exact", name] = [of_rank[number * each : (number + 1) * each] for of_rank in per_rank]
        for number, (name, run) in enumerate(ELASTIC.items()):
            second = [of_rank[behind + number] for of_rank in per_rank]
            third = loops([lives(run, root / name, 2, last=True)])
            found["elastic", name] = [first[name], second, third]
        return found

    @pytest.mark.parametrize("case", TWO_RANKS)
    def test_a_resume_sees_the_same_data_and_random_numbers(self, results: dict[Any, Any], case: str) -> None:
        for of_rank in results["exact", case]:
            assert_exact(of_rank, results["at"])

    @pytest.mark.parametrize("case", ELASTIC)
    def test_from_one_rank_to_two_and_back_every_sample_of_the_epoch_is_seen_once(
        self, results: dict[Any, Any], case: str
    ) -> None:
        for seen in seen_by_epoch(results["elastic", case]).values():
            assert_every_sample_once(ELASTIC[case], seen)

    def test_the_learning_rate_follows_the_samples_on_any_number_of_ranks(
        self, results: dict[Any, Any]
    ) -> None:
        for name in ("default", "a dispatcher", "stateful"):
            batches = 0
            for of_life in results["elastic", name]:
                for *_, rate in of_life[0]["trace"]:
                    batches += len(of_life)
                    assert rate == pytest.approx(1e-4 / (1 + batches)), name


@pytest.mark.slow
@pytest.mark.distributed
def test_over_four_two_three_ranks_and_one_every_sample_of_the_epoch_is_seen_once(tmp_path: Path) -> None:
    cases = {name: ELASTIC[name] for name in ("default", "a dispatcher", "stateful")}
    results: dict[str, list[Any]] = {name: [] for name in cases}
    for number, world in enumerate((4, 2, 3, 1)):
        runs = [lives(run, tmp_path / name, number, last=number == 3) for name, run in cases.items()]
        per_rank = run_ranks(loops, world, runs, timeout_seconds=300) if world > 1 else [loops(runs)]
        for index, name in enumerate(cases):
            results[name].append([of_rank[index] for of_rank in per_rank])
    for name, run in cases.items():
        for seen in seen_by_epoch(results[name]).values():
            assert_every_sample_once(run, seen)


def test_what_becomes_of_the_epoch_is_told_at_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(root=str(tmp_path), steps=2)
    loops([run.but(save_at=(2,))])
    made, *_ = prepared(run.but(batch=5, drop_last=True))
    with caplog.at_level(logging.WARNING):
        made.load_state(f"{tmp_path}/checkpoint_2")
    assert (
        "data loader 0, epoch 0: the epoch goes on in its first order, after 8 of 26 samples: 1 rank(s) "
        "share the other 18, each once; drop_last leaves 3 out" in caplog.text
    )
    assert "batches of 5 now, and made batches of 4: learning rate schedules count batches" in caplog.text
    made.end_training()


@pytest.mark.parametrize(
    ("saved", "now", "told"),
    [
        (
            Run(),
            Run(kind="in_order"),
            "samples came shuffled, and do so until the epoch ends; then in the order of the data set",
        ),
        (
            Run(),
            Run(samples=29),
            "the data set has 29 samples, and had 26 when the epoch began: 3 new ones are seen from the next "
            "epoch on, 0 are gone",
        ),
        (
            Run(kind="in_order"),
            Run(kind="in_order", samples=29),
            "3 new ones are seen from the next epoch on, 0 are gone",
        ),
        (Run(kind="numpy"), Run(kind="by_epoch"), "the order of NumpyOrder cannot be made again"),
    ],
    ids=["no longer shuffled", "grown", "grown, in order", "another sampler"],
)
def test_data_that_has_changed_within_the_epoch_is_told_with_numbers(
    saved: Run, now: Run, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loops([saved.but(root=str(tmp_path), save_at=(2, PER_EPOCH), steps=PER_EPOCH)])
    for step in (2, PER_EPOCH):
        caplog.clear()
        made, *_ = prepared(now.but(root=str(tmp_path)))
        with caplog.at_level(logging.WARNING):
            made.load_state(f"{tmp_path}/checkpoint_{step}")
        assert (told in caplog.text) == (step == 2), "between epochs it may change"
        made.end_training()


@pytest.mark.slow
@pytest.mark.distributed
def test_an_order_that_each_rank_has_drawn_by_itself_is_told_on_other_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By stock Accelerate, in `prepare`; also where later orders come from a seed that all share."""
    runs = {
        seedable: Run(
            root=str(tmp_path / str(seedable)), stateful=True, workers=1, batch=2, seedable=seedable
        )
        for seedable in (False, True)
    }
    run_ranks(loops, 2, [run.but(save_at=(2,), steps=2) for run in runs.values()], timeout_seconds=120)
    for run in runs.values():
        caplog.clear()
        made, *_ = prepared(run)
        with caplog.at_level(logging.WARNING):
            made.load_state(f"{run.root}/checkpoint_2")
        assert "after 8 of 26 samples" in caplog.text
        assert "each of the ranks has drawn the order of this epoch by itself" in caplog.text
        made.end_training()


def test_a_loader_that_another_thread_reads_is_told_by_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, *_, train, _ = prepared(Run(root=str(tmp_path)))
    next(in_background(train))
    for _ in range(2):
        made.save_state(f"{tmp_path}/checkpoint_0")
    made.end_training()
    assert caplog.text.count("another thread draws the batches") == 1


def test_a_stateful_loader_saved_at_its_last_batch_goes_on_with_the_next_epoch_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever epoch the script believes it to be; the stock one hands out an order of its own."""
    run = Run(root=str(tmp_path), stateful=True)
    (saved,) = loops([run.but(save_at=(PER_EPOCH,))])
    made, *_, train, _ = prepared(run)
    made.load_state(f"{tmp_path}/checkpoint_{PER_EPOCH}")
    assert "was saved at the last batch of epoch 0: it goes on with epoch 1" in caplog.text
    assert [batch.flatten().tolist() for batch in train] == [each[2] for each in saved["trace"][PER_EPOCH:]]
    made.end_training()
