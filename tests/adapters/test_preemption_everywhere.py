"""Real signals, at exact moments, to real ranks under every host: one last checkpoint at one agreed step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.outcome import Choice, Outcome
from tests.reliability.preemption.cases import cases
from tests.reliability.sampling import attempt, sample

pytestmark = [pytest.mark.reliability, pytest.mark.distributed, pytest.mark.slow]

_LOOP, _LOOP_FSDP2 = "preemption, loop, ddp, 2 ranks: ", "preemption, loop, fsdp2, 2 ranks: "
_LIGHTNING, _MODEL_PARALLEL = "preemption, lightning, ddp, 2 ranks", "preemption, lightning, fsdp2, 2 ranks"
_ACCELERATE, _FSDP2 = "preemption, accelerate, ddp, 2 ranks: ", "preemption, accelerate, fsdp2, 2 ranks: "
_TRAINER = "preemption, trainer, ddp, 2 ranks: "
SAMPLE = {
    "loop": [
        _LOOP + "again during the last save",
        _LOOP_FSDP2 + "in evaluation 1, rank 1",
    ],
    "lightning": [
        _LIGHTNING + ": all ranks, each twice at once",
        _LIGHTNING + ": before the first step",
        _LIGHTNING + ": during an earlier save",
        _LIGHTNING + ": in evaluation 1, rank 1",
        _LIGHTNING + ": save and go on, rank 1 two steps later",
        _MODEL_PARALLEL + ": rank 1, then rank 0",
    ],
    "lightning's own launcher": [_LIGHTNING + ", its own launcher: SIGTERM to rank 1"],
    "accelerate": [
        _ACCELERATE + "within an accumulation window",
        _ACCELERATE + "in evaluation 1, rank 0",
        _FSDP2 + "SIGTERM to rank 1",
    ],
    "trainer": [
        _TRAINER + "rank 0, then rank 1",
        _TRAINER + "in evaluation 1, rank 1",
    ],
}


@pytest.mark.parametrize("host", SAMPLE)
def test_a_preemption_leaves_one_last_checkpoint_at_one_agreed_step(tmp_path: Path, host: str) -> None:
    """…whole, from which a fresh run goes on bit for bit; and every rank ends by itself, saying so."""
    outcomes = sample(tmp_path, "preemption", cases=SAMPLE[host])
    assert len(outcomes) == len(SAMPLE[host])
    assert all(each.resumed == each.acknowledged for each in outcomes)


def test_stock_lightning_waits_until_its_collectives_time_out(tmp_path: Path) -> None:
    """What ours is compared with: no rank returns from `fit`, and nothing is there to resume from."""
    title = "preemption, stock lightning, ddp, 2 ranks: SIGTERM to rank 1"
    (outcome,) = [
        Outcome(**fields) for fields in attempt(tmp_path, "preemption", cases=[title])[0]["outcomes"]
    ]
    assert outcome.problem
    assert outcome.resumed is None
    assert "ended with" in outcome.problem or "hung" in outcome.problem


def test_the_matrix_knows_every_host_and_moment() -> None:
    titles = [str(case) for case in cases()]
    assert len(set(titles)) == len(titles)
    assert {title for sample in SAMPLE.values() for title in sample} <= set(titles)
    chosen = Choice(seed=1, count=5).of(cases())
    assert len(chosen) == 5
    assert chosen == Choice(seed=1, count=5).of(cases())
    assert len(Choice().of(cases())) == len(titles)
