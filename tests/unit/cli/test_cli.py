from __future__ import annotations

import json
import math
import os
import re
import secrets
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_core.cli.upkeep import _verify
from ckpt_core.commit import Catalog, Lease, begin, commit, replaced
from ckpt_core.names import OWN
from ckpt_core.storage import LocalStorage, object_storage
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.tiers import TierRecord, write_tiers
from ckpt_core.types import Lineage
from tests.unit.commit.checkpoints import manifest_of, save, write_files


@pytest.fixture
def root(tmp_path) -> Path:
    """Three checkpoints, one of them pinned, and a torn directory."""
    storage = LocalStorage(tmp_path / "run")
    for step in (100, 200, 300):
        save(storage, step, metrics={"val_loss": abs(step - 190) / 100})
    Catalog(storage).pin(100, "paper")
    write_files(storage, begin(storage, "step-000000400", "deadbeef"))
    return tmp_path / "run"


def steps(root: Path) -> list[int]:
    return [info.step for info in Catalog(LocalStorage(root)).committed()]


@pytest.fixture
def ckpt_json(ckpt):
    def run(*arguments):
        code, out, err = ckpt(*arguments, "--json")
        assert all(line.startswith("ckpt: ") for line in err.splitlines())
        return code, json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return run


def damage(root: Path, step: int) -> None:
    file = root / f"step-{step:09d}" / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:99] + b"?" + content[100:])


def test_ls_shows_the_committed_and_names_the_torn(ckpt, root):
    code, out, err = ckpt("ls", root)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == [
        "STEP",
        "NAME",
        "COMMITTED",
        "(UTC)",
        "SIZE",
        "HOLDS",
        "RANKS",
        "METRICS",
        "KEPT",
        "AS",
    ]
    assert re.fullmatch(
        r"100   step-000000100  2023-11-14 22:15:00  14\.9 KiB  resumable  2 "
        r"     val_loss=0\.9  pinned: paper",
        lines[1],
    )
    assert lines[4].startswith(f"3 committed in {root}")
    assert lines[5:] == ["torn or being written: .incomplete-deadbeef-step-000000400~"]


def test_ls_as_json(ckpt_json, root):
    code, listed = ckpt_json("ls", root)
    assert code == 0
    assert [(info["step"], info["pinned"]) for info in listed["checkpoints"]] == [
        (100, "paper"),
        (200, None),
        (300, None),
    ]
    assert listed["torn"] == [".incomplete-deadbeef-step-000000400~"]


def test_ls_names_what_was_not_ours_and_made_way(ckpt, ckpt_json, root):
    (root / "checkpoint-5").write_bytes(b"in one file")
    save(LocalStorage(root), 500, name="checkpoint-5")
    (moved,) = replaced(LocalStorage(root))
    assert f"moved aside: {moved}" in ckpt("ls", root)[1]
    assert ckpt_json("ls", root)[1]["replaced"] == [moved]


def test_a_root_with_nothing_committed_is_listed_as_empty(ckpt, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    code, out, _ = ckpt("ls", tmp_path)
    assert code == 0
    assert out.startswith("0 committed")


def test_metrics_that_json_does_not_know_are_text(ckpt_json, root):
    save(LocalStorage(root), 500, metrics={"val_loss": math.nan})
    assert ckpt_json("ls", root)[1]["checkpoints"][-1]["metrics"] == {"val_loss": "nan"}
    assert ckpt_json("show", root / "step-000000500")[1]["metrics"] == {"val_loss": "nan"}


def test_names_cannot_steer_the_terminal(ckpt, root):
    save(LocalStorage(root), 500)
    (root / "step-000000500").rename(root / "evil\x1b[2J")
    assert "\x1b" not in ckpt("ls", root)[1]


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune", "pin", "unpin"])
def test_nothing_there_is_exit_code_3_and_one_line(ckpt, tmp_path, command):
    rest = {"prune": ["--keep-latest", 1], "pin": ["--reason", "x"]}.get(command, [])
    step = "@1" if "pin" in command else ""
    code, out, err = ckpt(command, f"{tmp_path / 'nowhere'}{step}", *rest)
    assert (code, out) == (3, "")
    assert re.fullmatch(r"ckpt: [^\n]*nowhere[^\n]*\n", err)


def test_show_tells_what_a_checkpoint_promises(ckpt, ckpt_json, root):
    code, out, _ = ckpt("show", root / "step-000000100")
    assert code == 0
    for text in ("step:        100", "model (sharded), rng (per_rank)", "paper", "note='a test'", "crc32:"):
        assert text in out
    code, shown = ckpt_json("show", root / "step-000000100/")
    assert (code, shown["step"], shown["committed"], shown["pinned"]) == (0, 100, True, "paper")
    assert "__0_0.distcp" in [entry["path"] for entry in shown["files"]]


def test_show_accepts_the_current_directory(ckpt, root, monkeypatch):
    monkeypatch.chdir(root / "step-000000100")
    assert ckpt("show", ".")[0] == 0
    assert ckpt("verify", ".")[0] == 0
    assert ckpt("verify", "..")[0] == 0


def test_show_of_something_uncommitted_is_exit_code_1(ckpt, root):
    code, out, _ = ckpt("show", root / ".incomplete-deadbeef-step-000000400~")
    assert code == 1
    assert "not a committed checkpoint" in out


def test_verify_of_a_root_takes_the_newest(ckpt, root):
    damage(root, 200)
    assert ckpt("verify", root) == (0, f"ok      {root}/step-000000300\n", "")


@pytest.mark.parametrize("which", [["--all"], ["--step", 200]])
def test_a_damaged_checkpoint_is_exit_code_1(ckpt, ckpt_json, root, which):
    damage(root, 200)
    code, out, _ = ckpt("verify", root, *which)
    assert code == 1
    assert f"FAILED  {root}/step-000000200\n  __0_0.distcp: checksum is " in out
    code, verified = ckpt_json("verify", root, *which)
    assert code == 1
    (bad,) = [checkpoint for checkpoint in verified["checkpoints"] if not checkpoint["ok"]]
    assert [failure["path"] for failure in bad["failures"]] == ["__0_0.distcp"]


def test_verify_takes_a_checkpoint_too(ckpt, root):
    damage(root, 200)
    assert ckpt("verify", root / "step-000000100")[0] == 0
    assert ckpt("verify", root / "step-000000200")[0] == 1


def mark(root: Path, *steps: int) -> None:
    for step in steps:
        Catalog(LocalStorage(root)).mark_damaged(f"step-{step:09d}", "__0_0.distcp: missing")


def test_ls_and_show_tell_what_is_marked_as_damaged(ckpt, ckpt_json, root):
    mark(root, 200)
    told = "marked as damaged: step-000000200: __0_0.distcp: missing"
    assert told in ckpt("ls", root)[1].splitlines()
    assert [info["damaged"] for info in ckpt_json("ls", root)[1]["checkpoints"]] == [
        None,
        "__0_0.distcp: missing",
        None,
    ]
    code, out, _ = ckpt("show", root / "step-000000200")
    assert (code, "damaged:     __0_0.distcp: missing" in out.splitlines()) == (0, True)
    assert ckpt_json("show", root / "step-000000200")[1]["damaged"] == "__0_0.distcp: missing"
    assert ckpt_json("show", root / "step-000000100")[1]["damaged"] is None
    assert "damaged:" not in ckpt("show", root / "step-000000100")[1]


def test_verify_marks_what_is_damaged_once_and_says_so(ckpt, ckpt_json, root):
    damage(root, 200)
    code, out, _ = ckpt("verify", root, "--all")
    assert (code, "it is marked" in out) == (1, True)
    before = (root / ".ckpt-suite/damaged.json").read_bytes()
    assert "__0_0.distcp" in Catalog(LocalStorage(root)).known_damage("step-000000200")
    code, found = ckpt_json("verify", root, "--step", "200")
    assert (code, found["checkpoints"][0]["ok"]) == (1, False)
    assert (root / ".ckpt-suite/damaged.json").read_bytes() == before


def test_damage_in_a_root_that_cannot_be_written_is_told_all_the_same(root):
    damage(root, 200)
    refusal = PermissionError("read-only file system")
    storage = FaultyStorage(
        LocalStorage(root), [Fault(method="replace", key=".ckpt-suite/damaged.json", error=refusal)]
    )
    outcome = _verify.outcome(storage, "step-000000200")
    assert outcome.exit_code == 1
    assert "could not be marked: read-only file system" in str(outcome.parts)


def test_prune_never_deletes_sound_ones_in_favour_of_a_damaged_newest(ckpt, ckpt_json, root):
    ckpt("unpin", f"{root}@100")
    damage(root, 300)
    code, found = ckpt_json("prune", root, "--keep-latest", 1)
    assert (code, [info["step"] for info in found["drop"]]) == (0, [100])
    assert [info["step"] for info in found["damaged"]] == [300]
    assert steps(root) == [200, 300]


def test_prune_deletes_nothing_where_nothing_that_stays_is_whole(ckpt, root):
    ckpt("unpin", f"{root}@100")
    for step in (100, 200, 300):
        damage(root, step)
    assert ckpt("prune", root, "--keep-latest", 1)[0] == 0
    assert steps(root) == [100, 200, 300]


def test_a_step_and_all_later_ones_are_marked_as_bad_by_one_command_and_back(ckpt, ckpt_json, root):
    code, out, _ = ckpt("mark", f"{root}@200", "bad", "--reason", "loss spike", "--and-later")
    assert (code, "it is now step-000000100" in out) == (0, True)
    assert [info["bad"] for info in ckpt_json("ls", root)[1]["checkpoints"]] == [None, *["loss spike"] * 2]
    assert "marked as bad: step-000000300: loss spike" in ckpt("ls", root)[1]
    assert ckpt("prune", root, "--keep-latest", 1)[0] == 0
    assert steps(root) == [100, 200, 300]
    assert ckpt("mark", f"{root}@300", "good")[0] == 0
    assert [info["bad"] for info in ckpt_json("ls", root)[1]["checkpoints"]] == [None, "loss spike", None]
    assert ckpt("prune", root, "--bad")[0] == 0
    assert steps(root) == [100, 300]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("{root}@200", "bad"), 2, "--reason"),
        (("{root}", "bad", "--reason", "x"), 2, "ROOT@STEP"),
        (("{root}@x", "good"), 2, "ROOT@STEP"),
        (("{root}@7", "bad", "--reason", "x"), 3, "committed steps there: 100, 200, 300"),
    ],
)
def test_mark_says_what_it_needs(ckpt, root, arguments, code, told):
    found, _, err = ckpt("mark", *(argument.format(root=root) for argument in arguments))
    assert (found, told in err) == (code, True)


def test_abandoned_checkpoints_are_listed_and_go_if_asked_for(ckpt, ckpt_json, root):
    storage = LocalStorage(root)
    lineage = Lineage(id="abcdef01", number=1, ancestry=(("", 100),))
    name = "step-000000150"
    working = begin(storage, name, "abcdef01")
    write_files(storage, working)
    commit(storage, working, name, replace(manifest_of(150), lineage=lineage))
    assert steps(root) == [100, 150]
    listed = ckpt_json("ls", root)[1]["checkpoints"]
    assert [info["abandoned"] for info in listed] == [False, False, True, True]
    assert "abandoned: step-000000300" in ckpt("ls", root)[1]
    Catalog(storage).pin(300, "paper")
    code, out, _ = ckpt("prune", root, "--abandoned")
    assert (code, "dropped 1 checkpoints" in out) == (0, True)
    assert [info["step"] for info in ckpt_json("ls", root)[1]["checkpoints"]] == [100, 150, 300]


@pytest.mark.parametrize("how", ["root", "checkpoint"])
def test_a_marked_checkpoint_that_verifies_loses_its_mark(ckpt, root, how):
    mark(root, 200, 300)
    arguments = [root, "--step", 200] if how == "root" else [root / "step-000000200"]
    code, out, _ = ckpt("verify", *arguments)
    assert code == 0
    assert "was marked as damaged: __0_0.distcp: missing; the mark was taken away" in out
    marked = [info.step for info in Catalog(LocalStorage(root)).committed() if info.damaged is not None]
    assert marked == [300]
    assert "was marked" not in ckpt("verify", *arguments)[1]


def test_a_mark_that_cannot_be_taken_away_does_not_make_a_whole_checkpoint_fail(root):
    mark(root, 200, 300)
    refusal = PermissionError("read-only file system")
    storage = FaultyStorage(
        LocalStorage(root), [Fault(method="replace", key=".ckpt-suite/damaged.json", error=refusal)]
    )
    outcome = _verify.outcome(storage, "step-000000200")
    (row,) = outcome.fields["checkpoints"]
    assert (outcome.exit_code, row["ok"], row["was_marked"]) == (0, True, "__0_0.distcp: missing")
    assert row["mark"] == "stays, read-only file system"
    assert Catalog(storage).known_damage("step-000000200") == "__0_0.distcp: missing"


def test_prune_lists_the_damaged_as_left_for_a_person(ckpt, ckpt_json, root):
    mark(root, 300)
    code, planned = ckpt_json("prune", root, "--keep-latest", 1, "--dry-run")
    assert (code, [info["step"] for info in planned["damaged"]], planned["drop"]) == (0, [300], [])
    code, out, _ = ckpt("prune", root, "--keep-latest", 1)
    assert code == 0
    assert re.search(
        r"^left +300 +[0-9.]+ KiB +marked as damaged: __0_0\.distcp: missing$", out, flags=re.MULTILINE
    )
    assert out.endswith(f"see `ckpt verify` and `ckpt prune {root} --damaged`\n")
    assert steps(root) == [100, 200, 300]


def test_prune_damaged_deletes_the_marked_and_nothing_else(ckpt, ckpt_json, root):
    mark(root, 100, 300)  # 100 is pinned
    before = sorted(root.rglob("*"))
    code, planned = ckpt_json("prune", root, "--damaged", "--dry-run")
    assert code == 0
    assert [info["step"] for info in planned["drop"]] == [300]
    assert [info["step"] for info in planned["damaged"]] == [100]
    assert (planned["torn"], sorted(root.rglob("*"))) == ([], before)
    code, out, _ = ckpt("prune", root, "--damaged")
    assert (code, "dropped 1 checkpoints" in out) == (0, True)
    assert re.search(r"^left +100 .*pinned: paper$", out, flags=re.MULTILINE)
    assert steps(root) == [100, 200]
    assert (root / ".incomplete-deadbeef-step-000000400~").is_dir()
    marks = json.loads((root / ".ckpt-suite/damaged.json").read_bytes())["checkpoints"]
    assert list(marks) == ["step-000000100"]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["wet", "dry"])
def test_prune_damaged_never_empties_a_root(ckpt, root, dry):
    mark(root, 100, 200, 300)
    code, out, err = ckpt("prune", root, "--damaged", *dry)
    assert (code, out) == (1, "")
    assert "every committed checkpoint" in err
    assert "Nothing was deleted" in err
    assert steps(root) == [100, 200, 300]


def test_prune_damaged_works_on_an_object_store_and_where_nothing_is_damaged(ckpt):
    url = f"memory://{secrets.token_hex(8)}/run"
    storage = object_storage(url)
    for step in (1, 2, 3):
        save(storage, step)
    assert "dropped 0 checkpoints" in ckpt("prune", url, "--damaged")[1]
    Catalog(storage).mark_damaged("step-000000002", "gone")
    assert ckpt("prune", url, "--damaged")[0] == 0
    assert [info.step for info in Catalog(storage).committed()] == [1, 3]


def test_prune_damaged_refuses_to_run_beside_a_live_job(ckpt, root):
    mark(root, 200)
    with Lease.acquire(LocalStorage(root), "job 42") as lease:
        code, _, err = ckpt("prune", root, "--damaged")
        assert (code, "job 42" in err) == (1, True)
        lease.check()
    assert steps(root) == [100, 200, 300]


def test_a_torn_directory_does_not_verify(ckpt, root):
    code, out, _ = ckpt("verify", root / ".incomplete-deadbeef-step-000000400~")
    assert code == 1
    assert "COMMITTED: missing" in out


@pytest.mark.parametrize("left", [[200, 300], []])
def test_verify_of_all_fails_where_a_marker_cannot_be_read(ckpt, ckpt_json, root, left):
    for step in {100, 200, 300} - set(left):
        (root / f"step-000000{step}" / "COMMITTED").write_text("not a marker")
    code, out, _ = ckpt("verify", root, "--all")
    assert code == 1
    assert f"FAILED  {root / 'step-000000100'} (its marker cannot be read)" in out
    assert "the commit marker: is malformed" in out
    found = ckpt_json("verify", root, "--all")[1]["checkpoints"]
    assert {each["name"]: each["ok"] for each in found} == {
        f"step-000000{step}": step in left for step in (100, 200, 300)
    }


def test_verify_of_one_step_and_of_all_is_wrong_usage(ckpt, root):
    code, out, err = ckpt("verify", root, "--step", 100, "--all")
    assert (code, out) == (2, "")
    assert "--step is of one checkpoint" in err


def test_verify_of_a_step_that_is_not_there_is_exit_code_3(ckpt, root):
    code, _, err = ckpt("verify", root, "--step", 7)
    assert code == 3
    assert "committed steps there: 100, 200, 300" in err


def test_verify_takes_what_stock_dcp_wrote(ckpt, ckpt_json, tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    code, out, _ = ckpt("verify", tmp_path / "stock")
    assert code == 0
    assert "stock DCP" in out
    file = tmp_path / "stock" / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:2000] + bytes([content[2000] ^ 4]) + content[2001:])
    code, verified = ckpt_json("verify", tmp_path / "stock")
    assert code == 1
    assert verified["checkpoints"][0]["failures"][0]["path"] == "__0_0.distcp"


def test_verify_lists_what_no_manifest_names_and_reads_none_of_it(ckpt, ckpt_json, root, tmp_path):
    newest = root / "step-000000300"
    assert ckpt("verify", newest, "--strict") == (0, f"ok      {newest}\n", "")
    os.mkfifo(newest / "custom_checkpoint_0.pkl")  # whoever opened it would wait for ever
    (newest / "model" / "logs").mkdir()
    (newest / "model" / "logs" / "events").write_bytes(b"")
    (newest / "elsewhere").symlink_to(tmp_path)
    (newest / "nowhere").symlink_to(tmp_path / "missing")
    strangers = ["custom_checkpoint_0.pkl", "elsewhere", "model/logs", "nowhere"]

    code, out, _ = ckpt("verify", newest)

    assert (code, out.splitlines()[0]) == (0, f"ok      {newest}")
    assert sorted(out.splitlines()[1:]) == [f"  {path}: in no manifest, so never read" for path in strangers]
    code, found = ckpt_json("verify", root, "--all", "--strict")
    assert code == 1
    assert [sorted(each["strangers"]) for each in found["checkpoints"]] == [[], [], strangers]
    assert all(each["ok"] for each in found["checkpoints"])


def test_verify_follows_no_link_to_look_for_strangers(ckpt, root):
    newest, aside = root / "step-000000300", root / "aside"
    (newest / "model").rename(aside)
    (aside / "of somebody else").write_bytes(b"")
    (newest / "model").symlink_to(aside)

    out = ckpt("verify", newest, "--strict")[1]

    assert "  model: in no manifest" in out
    assert "somebody else" not in out


def test_verify_lists_strangers_in_a_bucket_and_none_where_the_manifest_is_damaged(ckpt_json, root):
    url = f"memory://{secrets.token_hex(8)}/run"
    storage = object_storage(url)
    save(storage, 1)
    storage.write_bytes("step-000000001/model/extra.pkl", b"")
    code, found = ckpt_json("verify", url)
    assert (code, found["checkpoints"][0]["strangers"]) == (0, ["model/extra.pkl"])
    (root / "step-000000300" / "extra").write_bytes(b"")
    (root / "step-000000300" / "manifest.json").write_bytes(b"{}")
    code, found = ckpt_json("verify", root / "step-000000300")
    assert (code, found["checkpoints"][0]["strangers"]) == (1, [])


def test_a_dry_run_says_what_would_go_and_touches_nothing(ckpt, ckpt_json, root):
    before = sorted(root.rglob("*"))
    code, planned = ckpt_json("prune", root, "--keep-latest", 1, "--dry-run")
    assert code == 0
    assert [info["step"] for info in planned["drop"]] == [200]
    assert {kept["step"] for kept in planned["keep"]} == {100, 300}
    assert planned["torn"] == [".incomplete-deadbeef-step-000000400~"]
    code, out, _ = ckpt("prune", root, "--keep-latest", 1, "--dry-run")
    assert "would drop 1 checkpoints" in out
    assert sorted(root.rglob("*")) == before


def test_prune_removes_what_no_policy_keeps_and_what_is_torn(ckpt, root):
    code, out, _ = ckpt("prune", root, "--keep-latest", 1)
    assert code == 0
    assert "dropped 1 checkpoints" in out
    assert steps(root) == [100, 300]
    assert sorted(path.name for path in root.iterdir() if path.is_dir() and path.name != OWN) == [
        "step-000000100",
        "step-000000300",
    ]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--keep-best", "val_loss"], [100, 200, 300]),
        (["--keep-best", "val_loss:1:max"], [100, 300]),
        (["--keep-every", 200], [100, 200, 300]),
        (["--keep-every", 250], [100, 300]),
        (["--keep-for", 60], [100, 300]),
        (["--keep-latest", 1, "--keep-best", "val_loss:min:1"], [100, 200, 300]),
    ],
)
def test_every_policy_of_the_command_line_is_applied(ckpt, root, options, kept):
    assert ckpt("prune", root, *options)[0] == 0
    assert steps(root) == kept


def test_a_policy_can_come_from_the_file_of_options(ckpt, root, tmp_path):
    policy = tmp_path / "options.yaml"
    policy.write_text("checkpoint: {keep: {best: {metric: val_loss}}}")
    assert ckpt("prune", root, "--policy", policy)[0] == 0
    assert steps(root) == [100, 200, 300]
    policy = tmp_path / "options.toml"
    policy.write_text("keep = {latest = 1}")
    assert ckpt("prune", root, "--policy", policy)[0] == 0
    assert steps(root) == [100, 300]


def test_prune_refuses_to_run_beside_a_live_job(ckpt, root):
    with Lease.acquire(LocalStorage(root), "job 42") as lease:
        code, _, err = ckpt("prune", root, "--keep-latest", 1)
        assert code == 1
        assert "job 42" in err
        assert ckpt("prune", root, "--keep-latest", 1, "--dry-run")[0] == 0
        lease.check()
    assert steps(root) == [100, 200, 300]


def test_on_an_object_store_prune_takes_over_only_when_told_to(ckpt):
    url = f"memory://{secrets.token_hex(8)}/run"
    storage = object_storage(url)
    for step in (1, 2):
        save(storage, step)
    lease = Lease.acquire(storage, "job 42")
    code, _, err = ckpt("prune", url, "--keep-latest", 1)
    assert code == 1
    assert "--take-over" in err
    assert lease.is_held()
    assert ckpt("prune", url, "--keep-latest", 1, "--take-over")[0] == 0
    assert [info.step for info in Catalog(storage).committed()] == [2]


def test_commands_take_urls(ckpt):
    url = f"memory://{secrets.token_hex(8)}/run"
    save(object_storage(url), 1)
    assert ckpt("ls", url)[0] == 0
    assert ckpt("show", f"{url}/step-000000001")[0] == 0
    assert ckpt("verify", f"{url}/step-000000001/")[0] == 0
    assert ckpt("verify", url)[0] == 0


def test_pin_and_unpin(ckpt, ckpt_json, root):
    assert ckpt("pin", f"{root}@200", "--reason", "demo") == (0, "step 200 is pinned: demo\n", "")
    assert steps(root) == [100, 200, 300]
    assert ckpt_json("unpin", root / "step-000000100") == (
        0,
        {"root": str(root), "step": 100, "pinned": None},
    )
    assert Catalog(LocalStorage(root)).pins() == {200: "demo"}
    assert ckpt("pin", f"{root}@7", "--reason", "demo")[0] == 3
    assert ckpt("pin", f"{root}@200", "--reason", " ")[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["delete", "x"],
        ["ls"],
        ["verify", "x", "--step", "one"],
        ["verify", "x", "--step", "1", "--all"],
        ["pin", "x@1"],
        ["prune", "x"],
        ["prune", "x", "--keep-latest", "0"],
        ["prune", "x", "--damaged", "--keep-latest", "1"],
        ["prune", "x", "--keep-best", "loss:up"],
        ["prune", "x", "--keep-best", "loss:1:2"],
        ["prune", "x", "--policy", "missing.yaml"],
        ["ls", "x", "--storage-option", "no value"],
        ["ls", "no-such-protocol://x"],
        ["ls", "s3://"],
        ["show", "gs:///run"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2_without_a_traceback(ckpt, arguments):
    code, out, err = ckpt(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert err


def test_storage_options_reach_the_storage(ckpt):
    url = f"memory://{secrets.token_hex(8)}/run"
    save(object_storage(url), 1)
    assert ckpt("ls", url, "--storage-option", "use_listings_cache=false")[0] == 0


@pytest.mark.parametrize(
    "command", ["ls", "show", "verify", "du", "report", "prune --keep-latest 1 --dry-run"]
)
def test_one_spelling_of_options_serves_paths_and_urls(ckpt, tmp_path, monkeypatch, command):
    save(LocalStorage(tmp_path / "run"), 1)
    monkeypatch.setenv("CKPT_SUITE_STORAGE_OPTIONS", "{anon: true}")
    words = command.split()
    assert ckpt(words[0], tmp_path / "run", *words[1:], "--storage-option", "secret=@HOME")[0] == 0
    write_tiers(LocalStorage(tmp_path / "run"), [TierRecord(url="s3://bucket/run")])
    assert ckpt(words[0], tmp_path / "run", *words[1:], "--storage-option", "secret=@HOME")[0] == 0


def test_a_storage_failure_is_one_line(ckpt, tmp_path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    code, _, err = ckpt("ls", tmp_path / "circle")
    assert code == 1
    assert err.startswith("ckpt: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_looking_and_verifying_need_neither_torch_nor_the_extras(root, command):
    """Neither imported, nor needed: they are made unavailable, and to look also numpy."""
    place = root / "step-000000100" if command == "show" else root
    without = ["torch", "rich", "typer", "yaml", *([] if command == "verify" else ["numpy"])]
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({without!r}, None))\n"
        "from ckpt_core.cli import main\n"
        f"code = main([{command!r}, {str(place)!r}])\n"
        "assert not [name for name in sys.modules if name.startswith('torch.')]\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "step-000000100" in done.stdout or command == "verify"


def test_the_module_can_be_run_and_a_closed_pipe_is_no_error(root):
    command = f"{sys.executable} -m ckpt_core.cli show {root}/step-000000100 | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"checkpoint:  {root}/step-000000100\n"


@pytest.mark.parametrize(
    ("command", "closed", "code", "said"),
    [
        ("ls {root}", ">&-", 0, ""),
        ("verify {root} --json", ">&-", 0, ""),
        ("ls {root}/no", "2>&-", 3, ""),
        ("ls {root}/no", "2>/dev/full", 3, ""),
        ("cp {root}@200 {root}.copy", ">&- 2>&-", 0, ""),
        ("ls {root}", ">/dev/full", 1, "could not be written to standard output"),
        ("cp {root}@200 {root}.copy", ">/dev/full", 1, "the command is done"),
    ],
)
def test_no_work_ends_because_its_words_cannot_be_written(root, command, closed, code, said):
    line = f"{sys.executable} -m ckpt_core.cli {command.format(root=root)} {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    if command.startswith("cp"):
        assert steps(Path(f"{root}.copy")) == [200]


def test_progress_that_nobody_reads_ends_no_copy(root, tmp_path):
    program = (
        "import sys; from ckpt_core.cli import _outcome, main; _outcome._PLAIN_EVERY_SECONDS = 0;"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = f"{sys.executable} -c '{program}' cp {root} {tmp_path}/copy 2>/dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "3 copied" in done.stdout


@pytest.mark.parametrize("broken", [100, 300])
def test_a_reader_that_has_gone_changes_no_exit_code(root, broken):
    damage(root, broken)
    command = f"{sys.executable} -m ckpt_core.cli verify {root} --all | head -n 0"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], check=False, timeout=60)
    assert done.returncode == 1


def test_verify_of_a_root_of_unreadable_markers_names_one(ckpt, root):
    for marker in root.glob("step-*/COMMITTED"):
        marker.write_bytes(b"{")
    code, out, err = ckpt("verify", root)
    assert (code, out) == (1, "")
    assert "the commit marker is malformed" in err


def test_a_terminal_gets_a_table_from_rich(ckpt, root, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = ckpt("ls", root)
    assert code == 0
    assert "step-000000100" in out


# --- what lies there besides committed checkpoints ----------------------------------------------------------


def test_show_of_a_root_is_of_its_newest_or_of_one_step(ckpt, ckpt_json, root):
    assert ckpt_json("show", root)[1]["step"] == 300
    assert ckpt_json("show", root, "--step", 200)[1]["step"] == 200
    assert ckpt("show", root, "--step", 7)[0] == 3
    Catalog(LocalStorage(root)).mark_damaged("step-000000300", "a test")
    assert ckpt_json("show", root)[1]["step"] == 200


def test_show_of_a_root_says_how_one_checkpoint_alone_is_shown(ckpt, root):
    one = ckpt("show", f"{root}@300")[1].splitlines()
    for place in (f"{root}", f"{root}/"):
        *shown, last = ckpt("show", place)[1].splitlines()
        assert f"`ckpt show {root}@STEP`" in last
        assert shown == one
    assert "@STEP" in ckpt("show", root, "--tensors")[1]
    for arguments in ((f"{root}@200",), (root, "--step", "200"), (root / "step-000000200",)):
        assert "@STEP" not in ckpt("show", *arguments)[1]


def test_show_of_what_is_no_checkpoint_says_what_it_is(ckpt, tmp_path, root):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_text("x")
    for place, text in ((tmp_path / "hf", "safetensors"), (tmp_path, "run there hold checkpoints")):
        code, out, told = ckpt("show", place)
        assert code == 1
        assert text in out + told


def test_tensors_are_listed_with_shapes_dtypes_and_counts(ckpt, ckpt_json, tmp_path):
    import torch

    from ckpt_core import CheckpointManager

    values = {"model": {"w": torch.zeros(3, 4, dtype=torch.bfloat16), "n": torch.tensor(5)}}
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, values)
    code, out, _ = ckpt("show", tmp_path / "run", "--tensors")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.startswith("model.")]
    assert rows == [
        ["model.w", "3x4", "bfloat16", "12", "24", "B"],
        ["model.n", "scalar", "int64", "1", "8", "B"],
    ]
    assert "model: 2 tensors, 13 elements, 32 B" in out
    listed = ckpt_json("show", tmp_path / "run", "--tensors")[1]["tensors"]
    assert [(each["name"], each["shape"], each["num_elements"]) for each in listed] == [
        ("model.w", [3, 4], 12),
        ("model.n", [], 1),
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_of_a_stock_checkpoint_are_listed_too(ckpt, tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.zeros(2, 2)}, checkpoint_id=tmp_path / "run" / "stock")
    code, out, _ = ckpt("show", tmp_path / "run" / "stock", "--tensors")
    assert code == 0
    assert "w: 1 tensors, 4 elements" in out
    assert "stock" in ckpt("ls", tmp_path / "run")[1]
    code, _, err = ckpt("ls", tmp_path / "run" / "stock")
    assert code == 2
    assert f"give {tmp_path / 'run'} as the root" in err


def test_ls_of_a_checkpoint_is_refused_with_the_command_that_helps(ckpt, root):
    code, out, err = ckpt("ls", root / "step-000000100")
    assert (code, out) == (2, "")
    assert f"give {root} as the root" in err
    assert "ckpt show" in err


def test_ls_tells_programs_what_has_no_marker_or_one_that_cannot_be_read(ckpt, ckpt_json, root):
    (root / "step-000000100" / "COMMITTED").write_text("not a marker")
    (root / "step-000000200" / "COMMITTED").unlink()
    code, listed = ckpt_json("ls", root)
    assert code == 0
    assert [info["step"] for info in listed["checkpoints"]] == [300]
    assert [each["name"] for each in listed["unreadable"]] == ["step-000000100"]
    assert "step-000000200" in listed["torn"]
    out = ckpt("ls", root)[1]
    assert "torn, or lost its marker: step-000000200" in out
    assert "marker cannot be read: step-000000100" in out


def test_ls_of_the_parent_of_runs_names_them(ckpt, ckpt_json, root):
    assert ckpt_json("ls", root.parent)[1]["runs"] == ["run"]
    assert "1 runs in " in ckpt("ls", root.parent)[1]


def test_times_are_told_in_iso_8601_too(ckpt_json, root):
    (first, *_) = ckpt_json("ls", root)[1]["checkpoints"]
    assert first["created_utc"] == "2023-11-14T22:15:00.000+00:00"
    assert ckpt_json("show", root, "--step", 100)[1]["created_utc"] == first["created_utc"]


def test_exit_codes_are_in_the_help(ckpt):
    code, out, _ = ckpt("--help")
    assert code == 0
    for word in ("0 all is well", "2 wrong usage", "3 nothing there"):
        assert word in " ".join(out.split())


def test_progress_is_shown_on_a_terminal_only(ckpt, root, monkeypatch):
    assert ckpt("verify", root)[2] == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert re.search(r"verifying step-000000300: [0-9.]+ KiB, [0-9.]+ GB/s\n", ckpt("verify", root)[2])


def test_what_takes_long_shows_how_far_it_is_and_how_long_it_will_take(ckpt, root, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("ckpt_core.cli._outcome._EVERY_SECONDS", 0.0)
    amount = r"[0-9.]+ KiB of [0-9.]+ KiB, [0-9.]+ GB/s"

    err = ckpt("prune", root, "--keep-latest", "1")[2]
    assert re.search(rf"verifying step-000000300, which stays: {amount}", err)
    assert re.search(rf"deleting: {amount}", err)


def test_what_libraries_log_is_not_shown(root):
    """In a process of its own: pytest's handlers would take what nobody else does."""
    program = textwrap.dedent(
        f"""
        import logging, sys
        from ckpt_core import cli
        from ckpt_core.cli.inspection import _ls as ls

        def noisy(*_):
            logging.getLogger("gcsfs").error("forty lines")
            logging.getLogger("ckpt_core.commit").warning("a warning\\nin two lines")
            raise OSError("no network")

        ls.open_root = noisy
        sys.exit(cli.main(["ls", {str(root)!r}]))
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "ckpt: a warning in two lines\nckpt: no network\n")
