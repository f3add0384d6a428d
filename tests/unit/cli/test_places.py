"""What commands take for a step, a root or a file to write."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import CheckpointManager, ConfigError, KeepBest, KeepEvery, KeepLatest, Upload
from ckpt_core.cli import main
from ckpt_core.cli.inspection._show import _shown
from ckpt_core.commit import Catalog
from ckpt_core.journal import read_events
from ckpt_core.names import (
    DAMAGED,
    OWN,
    PINS,
    TIERS,
    WRITER,
    data_name,
    data_rank,
    is_own_json,
    parse_step_name,
)
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import FaultyStorage
from tests.support.payloads import first_payload


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
    assert data_rank(data_name(3, 0)) == 3
    assert data_rank(data_name(3, 0).replace("3", "\u0663")) is None
    assert not is_own_json("rank-0000\u0663.json")


@pytest.mark.parametrize("name", ["COMMITTED", "manifest.json", ".metadata", "__0_0.distcp", "report.html"])
def test_no_page_is_written_into_a_checkpoint(root, name, capsys):
    path = root / "step-000000001" / name
    before = path.read_bytes() if path.exists() else None
    assert main(["report", str(root), "--html", str(path)]) == 2
    assert "write it elsewhere" in capsys.readouterr().err
    assert (path.read_bytes() if path.exists() else None) == before


@pytest.mark.parametrize("name", [WRITER, PINS, DAMAGED, TIERS, f"{OWN}/page.html"])
def test_no_page_is_written_over_a_file_of_a_root(root, name, tmp_path):
    for place in (root, tmp_path):
        there = (place / name).exists()
        assert main(["report", str(root), "--html", str(place / name)]) == 2
        assert (place / name).exists() == there


def test_a_page_beside_the_checkpoints_is_the_users_choice(root):
    assert main(["report", str(root), "--html", str(root / "report.html")]) == 0
    (root / "report.html").unlink()


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
    assert main(["prune", str(root), "--keep-latest", "1"]) == 0
    assert not list((root / OWN).glob("*.jsonl"))


def pruned(root: Path) -> list[dict[str, Any]]:
    return [each for each in read_events(LocalStorage(root)) if each["kind"] == "prune"]


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any], str]:
    """Run a command; return its exit code, its JSON and its words on standard error."""
    code = main([*map(str, words), "--json"])
    written = capsys.readouterr()
    return code, json.loads(written.out or "{}"), written.err


def run_at(place: object, *steps: int) -> None:
    with CheckpointManager(str(place)) as manager:
        for step in steps:
            manager.save(step, {"w": torch.full((3,), float(step))})


def two_lineages(place: Path) -> None:
    """Steps 1 to 3, and after a return to 1 another 2, which is the one on the present line."""
    run_at(place, 1, 2, 3)
    with CheckpointManager(place) as manager:
        live = {"w": torch.zeros(3)}
        manager.load(live, step=1)
        manager.save(2, live, name="again")


@pytest.mark.parametrize(
    "kind", ["path", "@ in its name", "file://", "bucket", "custom name", "two lineages"]
)
def test_every_command_takes_a_checkpoint_by_step_and_by_path(kind, tmp_path, capsys):
    root: object = tmp_path / ("exp@2" if kind == "@ in its name" else "run")
    own = "step-000000002"
    if kind == "bucket":
        root = f"memory://{secrets.token_hex(6)}/run"
    if kind == "two lineages":
        two_lineages(tmp_path / "run")
        own = "again"
    elif kind == "custom name":
        own = "half"
        with CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, {"w": torch.ones(3)})
            manager.save(2, {"w": torch.ones(3)}, name=own)
    else:
        run_at(root, 1, 2, 3)
    place = f"file://{root}" if kind == "file://" else str(root)
    for number, words in enumerate((f"{place}@2", f"{place}/{own}", f"{place}/{own}/")):
        assert told(capsys, "show", words)[1]["checkpoint"] == f"{root}/{own}"
        code, found, _ = told(capsys, "verify", words)
        assert (code, [each["name"] for each in found["checkpoints"]]) == (0, [own])
        code, found, _ = told(capsys, "diff", words, f"{place}@1")
        assert (code in {0, 1}, found["a"], found["b"][-1]) == (True, f"{root}/{own}", "1")
        code, found, _ = told(capsys, "du", words)
        assert (code, [each["checkpoints"] for each in found["lineages"]]) == (0, [1])
        # A name of the user's is copied where he writes it, not because a root calls a step so.
        named = words if own.startswith("step-") else f"{place}/{own}"
        code, found, _ = told(capsys, "cp", named, tmp_path / f"copy-{number}")
        assert (code, [each["name"] for each in found["checkpoints"]]) == (0, [own])
        code, found, _ = told(capsys, "mark", words, "bad", "--reason", "r")
        assert (code, found["names"]) == (0, [own])
        assert told(capsys, "mark", words, "good")[0] == 0
        assert told(capsys, "pin", words, "--reason", "r")[1]["step"] == 2
        assert told(capsys, "unpin", words)[0] == 0
    for words in (f"{place}@9", f"{place}/step-000000009"):
        for command in ("show", "verify", "du"):
            assert told(capsys, command, words)[0] == 3
    assert told(capsys, "mark", place, "good")[0] == told(capsys, "unpin", place)[0] == 2


def snapshot(place: Path) -> dict[str, bytes]:
    """Every path with its content; a job has proved that it can write there, and taken that back."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in place.rglob("*")}


@pytest.fixture
def checkpoint(request, tmp_path) -> str:
    """A checkpoint of each kind, alone in its root."""
    run_at(tmp_path / "run", 1)
    place = tmp_path / "run" / "step-000000001"
    if request.param == "torn":
        (place / "COMMITTED").unlink()
    if request.param == "stock":
        shutil.rmtree(place)
        dcp.save({"w": torch.ones(3)}, checkpoint_id=place, no_dist=True)
    if request.param == "linked":
        (tmp_path / "latest").symlink_to(place)
        place = tmp_path / "latest"
    return f"{tmp_path / 'run'}@1" if request.param == "step" else str(place)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("checkpoint", ["path", "step", "linked", "stock", "torn"], indirect=True)
def test_what_takes_a_root_refuses_a_checkpoint_before_it_touches_anything(checkpoint, tmp_path, capsys):
    before = snapshot(tmp_path)
    for words in (
        ["ls"], ["report"], ["prune", "--keep-latest", "1"], ["prune", "--bad"],
        ["upload", "--to", str(tmp_path / "x")], ["verify", "--all"],
    ):  # fmt: skip
        code, _, problem = told(capsys, words[0], checkpoint, *words[1:])
        assert code == 2
        assert str(tmp_path / "run") in problem  # what to give instead
    assert snapshot(tmp_path) == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("checkpoint", ["path", "linked", "stock", "torn"], indirect=True)
@pytest.mark.parametrize("act", ["resume", "save", "prune"])
def test_a_job_refuses_a_checkpoint_as_its_root_and_touches_nothing(checkpoint, tmp_path, act):
    before = snapshot(tmp_path)
    with CheckpointManager(checkpoint) as manager:
        acts = {
            "resume": lambda: manager.resume({"w": torch.ones(3)}),
            "save": lambda: manager.save(2, {"w": torch.ones(3)}),
            "prune": manager.prune,
        }
        with pytest.raises(ConfigError, match="is itself a"):
            acts[act]()
    assert snapshot(tmp_path) == before


def flip(path: Path, at: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


@pytest.fixture
def parent(tmp_path) -> Path:
    """Runs at two depths, one run with nothing, and what stock DCP wrote beside them."""
    for name in ("a", "b", "group/c"):
        run_at(tmp_path / name, 1, 2)
    run_at(tmp_path / "empty", 1)
    (tmp_path / "empty" / "step-000000001" / "COMMITTED").unlink()
    for name in ("stock", "hf/optimizer_0"):
        dcp.save({"w": torch.ones(300)}, checkpoint_id=tmp_path / name, no_dist=True)
    return tmp_path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_verify_of_a_directory_names_each_run_and_each_stock_checkpoint_that_it_compared(parent, capsys):
    assert main(["verify", str(parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    newest = [f"ok      {parent}/{run}/step-000000002" for run in ("a", "b", "group/c")]
    stock = [f"ok      {parent}/{name} (stock DCP, by its CRC32s)" for name in ("hf/optimizer_0", "stock")]
    assert lines == [*newest, *stock, f"nothing is committed in {parent}/empty"]

    code, found, _ = told(capsys, "verify", parent, "--all")
    steps = [f"{run}/step-00000000{step}" for run in ("a", "b", "group/c") for step in (1, 2)]
    assert (code, [each["name"] for each in found["checkpoints"]]) == (0, [*steps, "hf/optimizer_0", "stock"])
    assert told(capsys, "verify", parent, "--manifest-sha256", "0" * 64)[0] == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("damaged", "whole"),
    [
        ("a/step-000000002/shared.json", "b/step-000000002"),  # a file that no CRC of a zip covers
        ("group/c/step-000000002/manifest.json", "a/step-000000002"),
        ("hf/optimizer_0/__0_0.distcp", "stock"),
        ("b/step-000000001/__0_0.distcp", "b/step-000000002"),
    ],
)
def test_damage_below_a_directory_is_found_and_the_others_are_still_compared(parent, capsys, damaged, whole):
    content = (parent / damaged).read_bytes()
    flip(parent / damaged, first_payload(content) if damaged.endswith("distcp") else 20)
    code, found, _ = told(capsys, "verify", parent, "--all")
    verdicts = {each["name"]: each["ok"] for each in found["checkpoints"]}
    assert (code, verdicts[whole]) == (1, True)
    assert [name for name, ok in verdicts.items() if not ok] == [damaged.rpartition("/")[0]]


def test_showing_one_checkpoint_does_not_read_the_others(tmp_path):
    run_at(tmp_path, *range(1, 5))
    for step in range(10, 210):
        shutil.copytree(tmp_path / "step-000000001", tmp_path / f"step-{step:09d}")
    storage = FaultyStorage(LocalStorage(tmp_path))
    assert Catalog(storage).name_of(4) == "step-000000004"
    found = _shown(storage, "step-000000004")
    assert found.fields["provenance"]["parent"]["name"] == "step-000000003"
    touched = {each.key.partition("/")[0] for each in storage.operations}
    assert not {name for name in touched if name.startswith("step-") and int(name[-3:]) != 4}
    assert len(storage.operations) < 100


def test_ls_says_why_each_checkpoint_stays(tmp_path, capsys):
    root = tmp_path / "run"
    keep = KeepLatest(1) | KeepEvery(4) | KeepBest("loss")
    with CheckpointManager(root, keep=keep) as manager:
        for step in range(1, 8):
            manager.save(step, {"w": torch.ones(3)}, metrics={"loss": abs(step - 2)})
            manager.wait()
            if step == 1:
                manager.mark(1, "spike")
            if step == 3:
                manager.pin(3, "paper")
    assert told(capsys, "mark", f"{root}@4", "bad", "--reason", "spike")[0] == 0
    best = "KeepBest(metric='loss', n=1, mode='min')"
    listed = told(capsys, "ls", root)[1]["checkpoints"]
    assert {each["step"]: each["kept_as"] for each in listed} == {
        1: ["marked as bad"], 2: [best], 3: ["pinned: paper"], 4: ["marked as bad"],
        7: ["newest", "KeepLatest(n=1)"],
    }  # fmt: skip
    assert told(capsys, "unpin", f"{root}@3")[0] == 0
    assert told(capsys, "ls", root)[1]["checkpoints"][2]["kept_as"] == []
    assert main(["ls", str(root)]) == 0
    assert re.search(r"^2 .*loss=0 +KeepBest", capsys.readouterr().out, flags=re.MULTILINE)
    for path in (root / OWN).glob("*.jsonl"):
        path.unlink()
    assert told(capsys, "ls", root)[1]["checkpoints"][0]["kept_as"] == ["marked as bad"]


def test_ls_of_a_tier_says_why_each_checkpoint_stays_there_and_not_in_the_root(tmp_path, capsys, monkeypatch):
    kept, all_of_them = tmp_path / "kept", tmp_path / "all"
    upload = [Upload(kept, keep=KeepEvery(2), when_busy="queue"), Upload(all_of_them, when_busy="queue")]
    with CheckpointManager(tmp_path / "run", keep=KeepLatest(1), upload=upload) as manager:
        for step in (2, 4, 5):
            manager.save(step, {"w": torch.ones(3)}).uploaded.result(60)
    found = {
        place: {each["step"]: each["kept_as"] for each in told(capsys, "ls", place)[1]["checkpoints"]}
        for place in (kept, all_of_them)
    }
    rule = "KeepEvery(steps=2)"
    assert found == {kept: {2: [rule], 4: [rule], 5: ["newest"]}, all_of_them: {2: [], 4: [], 5: []}}
    monkeypatch.chdir(tmp_path)  # a tier is named as it was given to the run
    tiers = told(capsys, "ls", "run", "--tier", "kept")[1]["tiers"]
    states = {each["url"]: {info["state"] for info in each["checkpoints"]} for each in tiers}
    assert states == {str(kept): {"committed"}, str(all_of_them): {None}}


@pytest.mark.parametrize("width", [40, 100, 400])
@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("command", ["ls", "report", "show"])
def test_no_row_of_a_table_is_longer_than_the_terminal(tmp_path, capsys, monkeypatch, width, rich, command):
    metrics = {f"eval_metric_of_long_name_{number}": 1 / (number + 3) for number in range(30)}
    with CheckpointManager(tmp_path, keep=KeepLatest(2) | KeepBest("eval_metric_of_long_name_7")) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(3)}, metrics=metrics)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main([command, str(tmp_path)]) == 0
    written = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    tables = [
        line for line in written.splitlines() if "  " in line.strip() and not re.match(r"[a-z ]+: ", line)
    ]
    assert tables
    assert all(len(line) <= width for line in tables if not line.startswith("  "))
    if command == "ls":  # the metric that a rule names comes first, of dozens only a few are shown
        assert "eval_metric_of_long_name_7=0.1" in written or width < 400
        assert "27 more" in written or width < 400
        assert len(written.splitlines()) < 40 or width < 100


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_prune_of_a_folder_of_roots_names_them_and_touches_nothing(root, dry, capsys):
    before = sorted(root.parent.rglob("*"))
    assert main(["prune", str(root.parent), "--keep-latest", "1", *dry]) == 3
    assert f"{root.name} there hold checkpoints: give one of them as the root" in capsys.readouterr().err
    assert sorted(root.parent.rglob("*")) == before
