"""A large tensor that several ranks hold is written by several, in blocks of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_core.dcp import Part, _decide, decide
from ckpt_core.storage import LocalStorage
from tests.unit.dcp.plans import Item, decided, names, plan, whole, written
from tests.unit.saving.test_reports import Job

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(_decide, "SPLIT_BYTES", 1 << 10)


def rows(ranks: int, item: Item) -> list[tuple[int, int]]:
    """First row and number of rows of what each rank writes of a tensor that all hold, in order."""
    tasks = decided([[item]] * ranks).tasks
    return sorted((first, number) for task in tasks for _, first, number in task.blocks)


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("length", [1025, 4000, 4097])
def test_blocks_follow_one_another_and_make_up_the_tensor(ranks, length):
    found = rows(ranks, whole("w", length))
    assert len(found) == min(ranks, -(-length // 1024))
    assert [first for first, _ in found] == [
        sum(number for _, number in found[:at]) for at in range(len(found))
    ]
    assert sum(number for _, number in found) == length
    assert max(number for _, number in found) - min(number for _, number in found) <= 1


def test_every_holder_of_one_large_tensor_writes_about_as_much():
    tasks = decided([[whole("w", 4000), whole("small", 8)]] * 4).tasks
    assert [sum(number for _, _, number in task.blocks) for task in tasks] == [1000] * 4
    assert sum(len(task.places(2)) for task in tasks) == 1


def test_a_tensor_of_few_rows_has_no_more_blocks_than_rows():
    item = Item("w", (0, 0), (2, 4000), (2, 4000))
    assert rows(8, item) == [(0, 1), (1, 1)]


def test_shards_are_cut_where_their_own_replicas_are():
    halves = [Item("w", (start,), (2048,), (4096,)) for start in (0, 2048)]
    decision = decided([[halves[0]], [halves[1]]] * 2)
    (entry,) = decision.planned.index.entries
    assert entry.boxes.starts.tolist() == [[0], [1024], [2048], [3072]]
    assert [len(task.blocks) for task in decision.tasks] == [1] * 4


@pytest.mark.parametrize(
    ("item", "keywords"),
    [
        (whole("w", 4000), {"rank_local": {"w"}}),
        (whole("w", 4000), {"replicas": "lowest"}),
        (whole("w", 4000), {"replicas": "kept"}),
        (whole("w", 4000)._replace(divisible=False), {}),
        (whole("w", 1000), {}),
        (Item("w", (), (), ()), {}),
    ],
    ids=["rank-local", "on_divergence=warn", "keep-each", "made of others", "small", "without rows"],
)
def test_what_one_rank_must_write_is_left_whole(item, keywords):
    tasks = decide([plan(item)] * 3, **keywords).tasks
    assert [task.blocks for task in tasks] == [()] * 3
    assert names([[item][:1] for task in tasks if task.places(1)]) == [["w"]]


def test_what_only_one_rank_holds_is_left_whole():
    assert names(written([[whole("w", 4000)], [whole("v", 4000)]])) == [["w"], ["v"]]


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {"large": torch.randn(40, 30), "turned": torch.randn(30, 40).t(), "small": torch.ones(3), "n": 4}


def test_stock_dcp_reads_what_was_written_in_blocks(tmp_path: Path):
    job = Job(LocalStorage(tmp_path), [state() for _ in range(3)])
    job.save()
    job.states = [{**each, "large": each["large"] + 1} for each in job.states]
    job.save()
    found = {key: torch.zeros_like(value) for key, value in state().items() if key != "n"}
    dcp.load(found, checkpoint_id=tmp_path / "step-000000002", no_dist=True)
    assert torch.equal(found["large"], state()["large"] + 1)
    assert torch.equal(found["turned"], state()["turned"])
    metadata = dcp.FileSystemReader(tmp_path / "step-000000002").read_metadata()
    assert [len(metadata.state_dict_metadata[name].chunks) for name in ("large", "small")] == [3, 1]


def test_replicas_are_compared_whole():
    parts = [Part() for _ in range(2)]
    for part in parts:
        part.update({"w": torch.zeros(40, 30)})
    tasks = decide([part.local_plan() for part in parts]).tasks
    for rank, (part, task) in enumerate(zip(parts, tasks, strict=True)):
        part.accept(task, rank)
        assert [tuple(shard.shape) for shard in part.shards()] == [(20, 30)]
        ((compared,),) = part.replicas(range, whole=True).values()
        assert tuple(compared.shape) == (40, 30)
