"""`ckpt cp`, `ckpt upload`, and the columns of `ckpt ls` for tiers."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ckpt_core.commit import Catalog, Lease, Owner, begin, commit, verify
from ckpt_core.names import OWN
from ckpt_core.storage import LocalStorage, Space, open_storage
from ckpt_core.tiers import CheckpointCopy, CopyTerms, TierRecord, Uploading, copy_checkpoint, write_tiers
from ckpt_core.types import Lineage
from tests.kit.own_files import beside_own
from tests.unit.commit.checkpoints import manifest_of, write_files

pytestmark = pytest.mark.reliability

ONE = Lineage(id="aaaaaaaa", number=1)
TWO = Lineage(id="bbbbbbbb", number=2, ancestry=(("aaaaaaaa", 100),))
ALIEN = Lineage(id="cccccccc", number=7)


def save_on(
    storage, step: int, lineage: Lineage, save_id: str | None = None, name: str | None = None
) -> None:
    name, save_id = name or f"step-{step:09d}", save_id or f"{step:08x}"
    working = begin(storage, name, save_id)
    write_files(storage, working)
    commit(storage, working, name, replace(manifest_of(step), lineage=lineage, save_id=save_id))


@pytest.fixture
def root(tmp_path) -> Path:
    """A run that went back from step 200 to step 100, and on to step 300."""
    storage = LocalStorage(tmp_path / "run")
    for step, lineage in ((100, ONE), (200, ONE), (300, TWO)):
        save_on(storage, step, lineage)
    return tmp_path / "run"


@pytest.fixture
def bucket() -> str:
    return f"memory://{secrets.token_hex(6)}/run"


def steps(place) -> list[int]:
    storage = open_storage(str(place))
    assert all(verify(storage, info.name) == [] for info in Catalog(storage).committed(abandoned=True))
    return [info.step for info in Catalog(storage).committed(abandoned=True)]


def damage(root: Path, step: int) -> None:
    file = root / f"step-{step:09d}" / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:99] + b"?" + content[100:])


def test_cp_copies_a_run_there_and_back_and_says_what_it_did(ckpt, root, bucket, tmp_path):
    code, out, err = ckpt("cp", root, bucket)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"copied  {bucket}/step-000000300",
        f"copied  {bucket}/step-000000100",
        f"2 copied to {bucket}, 29.9 KiB",
    ]
    assert steps(bucket) == [100, 300]
    code, out, _ = ckpt("cp", bucket, tmp_path / "back", "--json", "--bandwidth", "1 GB/s")
    fields = json.loads(out)
    assert (code, fields["target"], fields["unreadable"]) == (0, str(tmp_path / "back"), [])
    assert fields["checkpoints"][0] == {
        "source": bucket,
        "name": "step-000000300",
        "step": 300,
        "size_bytes": 15305,
        "state": "copied",
        "problem": None,
        "failures": [],
    }
    assert steps(tmp_path / "back") == [100, 300]
    assert beside_own(tmp_path / "back") == {"step-000000100", "step-000000300"}
    assert Catalog(LocalStorage(tmp_path / "back")).latest() == Catalog(LocalStorage(root)).latest()


def test_cp_of_all_copies_what_a_run_has_abandoned_which_stays_so(ckpt, root, bucket):
    assert ckpt("cp", root, bucket)[0] == 0
    code, out, _ = ckpt("cp", "--all", root, bucket)
    assert (code, out.splitlines()[:3]) == (
        0,
        [
            f"there   {bucket}/step-000000300",
            f"there   {bucket}/step-000000100",
            f"copied  {bucket}/step-000000200",
        ],
    )
    catalog = Catalog(open_storage(bucket))
    assert [info.step for info in catalog.committed()] == [100, 300]
    assert steps(bucket) == [100, 200, 300]


@pytest.mark.parametrize("form", ["{root}@100", "{root}/step-000000100", "{root}/newest"])
def test_cp_takes_a_step_a_checkpoint_or_a_link_to_one(ckpt, root, bucket, form):
    (root / "newest").symlink_to("step-000000100")
    assert ckpt("cp", form.format(root=root), bucket)[0] == 0
    assert steps(bucket) == [100]


def test_cp_of_several_copies_each_of_them(ckpt, root, bucket):
    assert ckpt("cp", f"{root}@100", root / "step-000000300", bucket)[0] == 0
    assert steps(bucket) == [100, 300]


def test_what_is_bad_or_pinned_in_a_run_is_so_in_its_copy_and_damage_is_not(ckpt, root, bucket):
    source = Catalog(LocalStorage(root))
    source.mark_bad("step-000000300", "diverged")
    source.mark_damaged("step-000000100", "a mark that is wrong")
    source.pin(100, "paper")
    assert ckpt("cp", root, bucket)[0] == 0
    found = {info.step: info for info in Catalog(open_storage(bucket)).committed()}
    assert (found[300].bad, found[100].damaged, found[100].pinned) == ("diverged", None, "paper")
    source.mark_bad("step-000000100", "diverged, too")
    assert ckpt("cp", f"{root}@100", bucket)[0] == 0
    assert Catalog(open_storage(bucket)).find(step=100).bad == "diverged, too"


def test_a_damaged_source_is_exit_code_1_and_does_not_stop_the_others(ckpt, root, bucket):
    damage(root, 300)
    code, out, _ = ckpt("cp", root, bucket)
    assert (code, steps(bucket)) == (1, [100])
    assert out.splitlines()[:3] == [
        f"FAILED  {bucket}/step-000000300",
        f"copied  {bucket}/step-000000100",
        "  step-000000300: the source is damaged, so that nothing was committed: "
        f"{root}/step-000000300/__0_0.distcp: checksum is crc32:0e3f84d0, crc32:bbce3b9d was committed",
    ]


def test_a_copy_that_is_marked_as_damaged_is_not_taken_for_one(ckpt, root, bucket):
    assert ckpt("cp", root, bucket)[0] == 0
    Catalog(open_storage(bucket)).mark_damaged("step-000000100", "__0_0.distcp: missing")
    code, out, _ = ckpt("cp", root, bucket)
    assert code == 1
    assert "step-000000100: it is there, and marked as damaged (__0_0.distcp: missing)" in out


def test_cp_never_replaces_another_checkpoint_and_copies_nothing_then(ckpt, root, tmp_path):
    target = LocalStorage(tmp_path / "other")
    save_on(target, 300, TWO, save_id="0badcafe")
    code, _, err = ckpt("cp", root, tmp_path / "other")
    assert (code, steps(tmp_path / "other")) == (1, [300])
    assert f"{target.url} has another checkpoint named step-000000300" in err


def test_cp_does_not_mix_runs_because_one_would_count_as_abandoned(ckpt, root, tmp_path):
    target = LocalStorage(tmp_path / "other")
    save_on(target, 5, ALIEN)
    code, _, err = ckpt("cp", root, tmp_path / "other")
    assert (code, steps(tmp_path / "other")) == (2, [5])
    assert "holds another run" in err
    assert ckpt("cp", "--mixed", root, tmp_path / "other")[0] == 0
    assert steps(tmp_path / "other") == [5, 100, 300]
    # A run that began afresh shares its root with what it abandoned, so its copies may, too.
    save_on(LocalStorage(root), 400, Lineage(id="dddddddd", number=3))
    assert ckpt("cp", f"{root}@100", tmp_path / "first")[0] == 0
    assert ckpt("cp", root, tmp_path / "first")[0] == 0
    assert [info.step for info in Catalog(LocalStorage(tmp_path / "first")).committed()] == [400]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{root}", "{root}"], 2, "is source and target"),
        (["{root}@7", "{bucket}"], 3, "no committed step 7"),
        (["{root}/nothing", "{bucket}"], 3, "there is nothing"),
        (["{root}", "{root}/step-000000100"], 2, "is itself a committed checkpoint"),
        (["{root}", "{bucket}", "--bandwidth", "fast"], 2, "--bandwidth"),
        (["{root}", "{bucket}", "--bandwidth", "0"], 2, "--bandwidth"),
        (["{root}", "{bucket}", "--storage-option", "anon"], 2, "has no ="),
        (["{root}"], 2, "DST"),
    ],
)
def test_wrong_use_of_cp_says_so_in_a_line(ckpt, root, bucket, arguments, code, message):
    found, out, err = ckpt("cp", *(text.format(root=root, bucket=bucket) for text in arguments))
    assert (found, out) == (code, "")
    assert message in err


def test_options_are_for_urls_and_those_of_the_target_for_it_alone(ckpt, root, bucket):
    code, _, err = ckpt("cp", root, bucket, "--storage-option", "no_such_option=1", "--json")
    assert (code, err) == (0, "")  # that of fsspec's memory takes anything
    code, _, err = ckpt("cp", root, f"{bucket}2", "--to-storage-option", "request_seconds=-1")
    assert code != 0 or err == ""


def test_a_root_of_a_live_job_is_not_copied_to(ckpt, root, bucket, tmp_path):
    with Lease.acquire(LocalStorage(tmp_path / "busy"), "train.py"):
        code, _, err = ckpt("cp", root, tmp_path / "busy")
    assert (code, steps(tmp_path / "busy")) == (1, [])
    assert "is held by train.py" in err
    copy_checkpoint(LocalStorage(root), open_storage(bucket), "step-000000100", CopyTerms())
    with Lease.acquire(open_storage(bucket), "train.py") as lease:
        code, _, err = ckpt("cp", root, bucket)
        assert (code, steps(bucket), lease.is_held()) == (1, [100], True)
        assert "add --take-over" in err
        # What is there already needs no right to write.
        assert ckpt("cp", f"{root}@100", bucket)[0] == 0
        assert ckpt("cp", root, bucket, "--take-over")[0] == 0
    assert steps(bucket) == [100, 300]


def test_a_killed_cp_is_continued_by_the_same_command(ckpt, root, bucket):
    target = open_storage(bucket)
    copy = CheckpointCopy.of(LocalStorage(root), target, "step-000000300")
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    owner = replace(Owner.here("ckpt cp"), pid=int(dead.stdout))
    target.replace(
        ".ckpt-suite/writer.json",
        json.dumps({name: getattr(owner, name) for name in owner.__slots__}).encode(),
    )
    copy.begin()
    copy.copy_files(copy.manifest.files[:2], CopyTerms())
    assert ckpt("cp", root, bucket)[0] == 0
    assert steps(bucket) == [100, 300]
    assert [entry.name for entry in target.list("")] == ["step-000000100", "step-000000300"]


def test_ctrl_c_ends_a_copy_with_130_and_leaves_nothing_that_counts(
    root, bucket, tmp_path, ckpt, monkeypatch
):
    from ckpt_core.cli import _cp

    def interrupted(*_arguments, **_keywords):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(_cp, "copy_checkpoint", interrupted)
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background of a shell
    assert ckpt("cp", root, bucket)[0] == 130
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    assert steps(bucket) == []
    assert ckpt("cp", root, bucket)[0] == 0


def tiers_of(root: Path, *records: TierRecord) -> None:
    write_tiers(LocalStorage(root), records)


def test_upload_sends_what_was_due_and_the_newest(ckpt, root, bucket, tmp_path):
    storage = LocalStorage(root)
    for step in (400, 500, 600):
        save_on(storage, step, TWO)
    running = Uploading(name="step-000000400", done_bytes=1, size_bytes=9)
    tiers_of(
        root,
        TierRecord(url=bucket, every=2, due=("step-000000300", "step-000000004"), uploading=running),
        TierRecord(url=str(tmp_path / "share"), every=5),
    )
    for place, sent in ((bucket, 3), (tmp_path / "share", 1)):
        code, out, err = ckpt("upload", root, "--to", place, "--json")
        assert (code, err) == (0, "")
        assert [len(tier["checkpoints"]) for tier in json.loads(out)["tiers"]] == [sent]
        assert ckpt("upload", root, "--to", place)[1].splitlines() == [f"0 copied to {place}, 0 B"]
    assert (steps(bucket), steps(tmp_path / "share")) == ([300, 400, 600], [600])
    assert ckpt("upload", root, "--all", "--to", bucket)[0] == 0
    assert (steps(bucket), steps(tmp_path / "share")) == ([100, 300, 400, 500, 600], [600])


def test_upload_needs_a_place_that_the_user_names(ckpt, root, bucket):
    code, _, err = ckpt("upload", root)
    assert (code, "--to URL" in err, "names no place" in err) == (2, True, True)
    tiers_of(root, TierRecord(url=bucket))
    code, _, err = ckpt("upload", root)
    assert (code, f"names {bucket}" in err, steps(bucket)) == (2, True, [])
    assert ckpt("upload", root, "--to", bucket)[0] == 0
    assert steps(bucket) == [300]


@pytest.mark.parametrize("verdict", ["mark_damaged", "mark_bad"])
def test_upload_sends_the_newest_that_can_be_resumed(ckpt, root, bucket, verdict):
    getattr(Catalog(LocalStorage(root)), verdict)("step-000000300", "a test")
    assert ckpt("upload", root, "--to", bucket)[0] == 0
    assert steps(bucket) == [100]
    save_on(LocalStorage(root), 400, TWO)
    getattr(Catalog(LocalStorage(root)), verdict)("step-000000400", "a test")
    assert "0 copied" in ckpt("upload", root, "--to", bucket)[1]


def test_upload_refuses_the_root_itself(ckpt, root):
    for place in (root, f"file://{root}/", f"{root}/../{root.name}"):
        code, _, err = ckpt("upload", root, "--to", place)
        assert (code, "is the root itself" in err) == (2, True)


def test_upload_leaves_its_tiers_to_a_live_job_and_other_places_are_free(ckpt, root, bucket, tmp_path):
    tiers_of(root, TierRecord(url=bucket))
    with Lease.acquire(LocalStorage(root), "train.py"):
        code, _, err = ckpt("upload", root, "--to", bucket)
        assert (code, steps(bucket)) == (1, [])
        assert "belongs to a live job (train.py" in err
        assert ckpt("upload", root, "--to", tmp_path / "share")[0] == 0
    assert steps(tmp_path / "share") == [300]


def test_upload_takes_a_bucket_over_from_the_job_that_died_with_the_root(ckpt, root, bucket):
    tiers_of(root, TierRecord(url=bucket))
    dead = {"job": "train.py", "host": "node-7", "pid": 4711, "started": 1.0}
    LocalStorage(root).replace(".ckpt-suite/writer.json", json.dumps({"id": "one", **dead}).encode())
    target = open_storage(bucket)
    target.replace(".ckpt-suite/writer.json", json.dumps({"id": "two", **dead, "pid": 4712}).encode())
    assert ckpt("upload", root, "--to", bucket)[0] == 1  # another process
    target.replace(".ckpt-suite/writer.json", json.dumps({"id": "two", **dead}).encode())
    assert ckpt("upload", root, "--to", bucket)[0] == 0
    assert steps(bucket) == [300]


def test_ls_shows_a_column_for_each_tier(ckpt, root, bucket):
    storage, target = LocalStorage(root), open_storage(bucket)
    copy_checkpoint(storage, target, "step-000000100", CopyTerms())
    copy_checkpoint(storage, target, "step-000000200", CopyTerms())
    Catalog(target).mark_damaged("step-000000200", "torn")
    save_on(target, 50, ONE)
    uploading = Uploading(name="step-000000300", done_bytes=4, size_bytes=10)
    tiers_of(root, TierRecord(url=bucket, uploading=uploading), TierRecord(url="nosuch://place"))
    with Lease.acquire(storage, "train.py"):
        code, out, _ = ckpt("ls", root, "--tiers")
        json_code, json_out, _ = ckpt("ls", root, "--json", "--tiers")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[-3:] == [str(root), bucket, "nosuch://place"]
    assert [line.split("  ")[0] for line in lines[1:5]] == ["50", "100", "200", "300"]
    assert [line.split()[-3:] for line in lines[1:4]] == [
        ["missing", "committed", "?"],
        ["committed", "committed", "?"],
        ["committed", "damaged", "?"],
    ]
    assert lines[4].split()[-5:] == ["committed", "uploading", "40", "%", "?"]
    assert lines[5].startswith(f"3 committed in {root}")
    assert lines[6].startswith("cannot be reached: nosuch://place: ")
    fields = json.loads(json_out)
    assert json_code == 0
    assert [info["step"] for info in fields["checkpoints"]] == [100, 200, 300]
    assert [each["state"] for each in fields["tiers"][0]["checkpoints"]] == [
        *("committed", "committed", "damaged", "uploading 40 %"),
    ]
    assert (fields["tiers"][0]["problem"], fields["tiers"][1]["checkpoints"][0]["state"]) == (None, None)
    assert ckpt("ls", bucket)[1].splitlines()[0].endswith("KEPT AS")


def test_ls_lists_a_root_whose_file_of_tiers_is_damaged(ckpt, root):
    (root / OWN).mkdir(exist_ok=True)
    (root / ".ckpt-suite/tiers.json").write_text("{}")
    code, out, _ = ckpt("ls", root)
    assert code == 0
    assert "3 committed" in out
    assert "further tiers are not known: " in out


def test_commands_need_no_torch(root, tmp_path):
    script = (
        "import sys; from ckpt_core.cli import main; root, to, runs = sys.argv[1:]; "
        "codes = [main(a) for a in (['cp', root, to], ['ls', runs], ['report', root], ['du', root])]; "
        "assert 'torch' not in sys.modules; sys.exit(max(codes))"
    )
    places = [str(root), str(tmp_path / "to"), str(root.parent)]
    done = subprocess.run([sys.executable, "-c", script, *places], check=False)
    assert (done.returncode, steps(tmp_path / "to")) == (0, [100, 300])


@pytest.mark.parametrize("died", ["released", "killed", "killed elsewhere"])
def test_ls_shows_what_a_job_that_has_ended_left_as_waiting(ckpt, root, bucket, died):
    storage = LocalStorage(root)
    uploading = Uploading(name="step-000000300", done_bytes=4, size_bytes=10)
    tiers_of(root, TierRecord(url=bucket, due=("step-000000300", "step-000000200"), uploading=uploading))
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    owner = Owner.here("train.py")
    if died == "killed":
        owner = replace(owner, pid=process.pid)
    if died == "killed elsewhere":
        owner = replace(owner, host="node-7")
    if died != "released":
        storage.replace(".ckpt-suite/writer.json", json.dumps(asdict(owner)).encode())
    out = ckpt("ls", root)[1]
    known = died != "killed elsewhere"  # there it may be alive
    assert ("waiting 40 %" in out, "uploading 40 %" in out) == (known, not known)
    assert out.splitlines()[2].endswith("waiting")
    hint = f"waiting, and no job uploads: {bucket}: the next run does, or `ckpt upload {root} --to {bucket}`"
    assert (hint in out) is known


def test_upload_gives_a_copy_whose_name_is_taken_the_name_that_a_job_would(ckpt, root, bucket):
    target = open_storage(bucket)
    save_on(target, 300, ALIEN, save_id="99999999")
    write_files(target, "step-000000100")  # torn, of another save
    target.write_bytes("step-000000100/manifest.json", manifest_of(100).to_bytes())
    tiers_of(root, TierRecord(url=bucket, due=("step-000000300",)))
    before = target.read_bytes("step-000000300/COMMITTED")
    upload = ("upload", root, "--to", bucket)
    assert ckpt(*upload)[0] == 0
    assert f"copied  {bucket}/step-000000300.run-bbbbbbbb" not in ckpt(*upload)[1]  # it is there
    assert ckpt(*upload, "--all")[0] == 0
    assert target.read_bytes("step-000000300/COMMITTED") == before
    names = {info.name: info.save_id for info in Catalog(target).committed(abandoned=True)}
    assert names["step-000000300.run-bbbbbbbb"] == f"{300:08x}"
    assert names["step-000000100.run-aaaaaaaa"] == f"{100:08x}"
    assert ckpt("cp", root, bucket, "--mixed")[0] == 1  # a copy by hand never takes another name


def test_a_copy_that_does_not_fit_is_refused_before_it_begins_and_one_that_is_continued_may_fit(
    ckpt, root, tmp_path, monkeypatch
):
    source, target = LocalStorage(root), LocalStorage(tmp_path / "copy")
    needed = sum(info.size_bytes for info in Catalog(source).committed())
    monkeypatch.setattr(LocalStorage, "space", lambda self: Space(needed - 1))
    code, _, err = ckpt("cp", root, tmp_path / "copy")
    assert (code, "nothing was copied: free space" in err) == (1, True)
    assert not [path for path in (tmp_path / "copy").rglob("*") if "step-" in path.name]
    copy = CheckpointCopy.of(source, target, "step-000000300")
    copy.begin()
    copy.copy_files(copy.manifest.files[:1], CopyTerms())
    assert ckpt("cp", root, tmp_path / "copy")[0] == 0
    assert steps(tmp_path / "copy") == [100, 300]


@pytest.mark.parametrize("last", ["run@100", "run@7", "run@0"])
@pytest.mark.parametrize("form", ["{root}", "{root}@300", "{root}/step-000000300"])
def test_cp_takes_a_directory_whose_own_name_ends_in_a_number_for_itself(ckpt, root, bucket, last, form):
    place = root.with_name(last)
    shutil.copytree(root, place)
    assert ckpt("cp", form.format(root=place), bucket)[0] == 0
    assert steps(bucket)[-1:] == [300]
