"""What commands take for a step, a root or a file to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import CheckpointManager
from ckpt_core.cli import main
from ckpt_core.journal import read_events
from ckpt_core.names import data_name, parse_step_name, writer_rank
from ckpt_core.storage import LocalStorage


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("places") / "run"
    with CheckpointManager(place) as manager:
        manager.save(1, {"w": torch.ones(3)})
    return place


@pytest.mark.parametrize("step", ["\u0661", "\uff11", "1_0", " 1", "+1", "1" * 5000, "-1", "", "one"])
def test_a_step_is_written_in_the_digits_0_to_9(root, step, tmp_path, capsys):
    for command in (["cp", f"{root}@{step}", str(tmp_path / "copy")], ["mark", f"{root}@{step}", "bad"]):
        assert main(command) in {1, 2, 3}
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_names_in_other_digits_are_none_of_ours():
    assert parse_step_name("step-00000000\u0661") is None
    assert writer_rank(data_name(3, 0)) == 3
    assert writer_rank(data_name(3, 0).replace("3", "\u0663")) is None
    assert writer_rank("rank-0000\u0663.json") is None


@pytest.mark.parametrize("name", ["COMMITTED", "manifest.json", ".metadata", "__0_0.distcp", "report.html"])
def test_no_page_is_written_into_a_checkpoint(root, name, capsys):
    path = root / "step-000000001" / name
    before = path.read_bytes() if path.exists() else None
    assert main(["report", str(root), "--html", str(path)]) == 2
    assert "write it elsewhere" in capsys.readouterr().err
    assert (path.read_bytes() if path.exists() else None) == before


@pytest.mark.parametrize("name", ["writer.json", "pins.json", "damaged.json", "tiers.json", "events.jsonl"])
def test_no_page_is_written_over_a_file_of_a_root(root, name, tmp_path):
    for place in (root, tmp_path):
        there = (place / name).exists()
        assert main(["report", str(root), "--html", str(place / name)]) == 2
        assert (place / name).exists() == there


def test_a_page_beside_the_checkpoints_is_the_users_choice(root):
    assert main(["report", str(root), "--html", str(root / "report.html")]) == 0
    (root / "report.html").unlink()


def test_no_picture_is_written_over_a_file_of_a_root(root, capsys):
    plan = ["plan", "7e9", "--picture", str(root / "step-000000001" / "plan.png")]
    assert main(plan) == 2
    assert "write it elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "verify", "ls", "du"])
@pytest.mark.parametrize("name", ["manifest.json", "COMMITTED", "__0_0.distcp"])
def test_a_file_in_place_of_a_checkpoint_or_root_is_a_wrong_argument(root, command, name, capsys):
    assert main([command, str(root / "step-000000001" / name)]) == 2
    assert "is no directory" in capsys.readouterr().err


def test_a_prune_by_hand_is_in_the_journal_and_the_report(tmp_path, capsys):
    root = tmp_path / "run"
    with CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            manager.due(step)
            manager.save(step, {"w": torch.ones(3)})
    assert main(["mark", f"{root}@3", "bad", "--reason", "a typing error"]) == 0
    assert main(["prune", str(root), "--keep-latest", "1", "--dry-run"]) == 0
    assert pruned(root) == []
    assert main(["prune", str(root), "--keep-latest", "1"]) == 0
    assert main(["prune", str(root), "--keep-latest", "1"]) == 0  # nothing is left to delete
    assert main(["prune", str(root), "--bad"]) == 0
    assert [(each["names"], each["why"]) for each in pruned(root)] == [
        (["step-000000001"], "ckpt prune, keep=KeepLatest(n=1)"),
        (["step-000000003"], "ckpt prune, what is bad"),
    ]
    capsys.readouterr()
    assert main(["report", str(root)]) == 0
    assert "ckpt prune, what is bad" in capsys.readouterr().out
    with CheckpointManager(root) as manager:  # the next run goes on with the same log
        assert manager.resume({"w": torch.zeros(3)}) == 2
        manager.due(3)
        manager.save(3, {"w": torch.ones(3)})
    assert len(pruned(root)) == 2


def test_a_prune_by_hand_begins_no_journal_and_does_not_need_one(tmp_path):
    root = tmp_path / "run"
    with CheckpointManager(root, journal=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.ones(3)})
    assert main(["prune", str(root), "--keep-latest", "2"]) == 0
    assert not (root / "events.jsonl").exists()
    (root / "events.jsonl").write_text("the user's own\n")
    assert main(["prune", str(root), "--keep-latest", "1"]) == 0
    assert (root / "events.jsonl").read_text() == "the user's own\n"


def pruned(root: Path) -> list[dict[str, Any]]:
    return [each for each in read_events(LocalStorage(root)) if each["kind"] == "prune"]
