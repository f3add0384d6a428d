"""The user's directory is the user's: no file of theirs is lost, and none is why a checkpoint or a run is."""

from __future__ import annotations

import contextlib
import errno
import re
import zlib

import pytest
import torch

from ckpt_core import CheckpointExistsError, CheckpointManager, ConfigError, KeepLatest, TrainState
from ckpt_core.commit import (
    Catalog,
    _prune,
    abandon,
    begin,
    collect_orphans,
    commit,
    remove,
    replaced,
    verify,
)
from ckpt_core.names import incomplete_name
from ckpt_core.storage import LocalStorage
from ckpt_core.storage.local import _paths
from ckpt_core.testing import Fault, FaultyStorage
from tests.support.emulators import forget_memory
from tests.support.power import PowerLog, power_cut
from tests.support.system_calls import SystemCalls
from tests.unit.commit.checkpoints import FILES, bucket_like, manifest_of, posix_like, save, save_over

pytestmark = pytest.mark.reliability

NAME = "checkpoint-5"
MINE = {
    "tokenizer.json": b"mine",
    "logs/events.out": b"a tree of mine",
    "model/readme.md": b"beside a part",
    "\u6a21\u578b \u00fc.txt": b"unicode",
}


class CrashError(BaseException):
    """The process ends here."""


def crash(_operation):
    raise CrashError


@pytest.fixture(params=["posix", "local"])
def new_storage(request, tmp_path):
    folders = iter(range(10_000))
    if request.param == "posix":
        return posix_like
    return lambda: LocalStorage(tmp_path / str(next(folders)))


def put(storage, name=NAME, files=MINE):
    for path, content in files.items():
        storage.write_bytes(f"{name}/{path}", content)
    return storage


def tree(storage, directory):
    """Path -> content of all files at and below a directory."""
    found = {}
    for child in storage.list(directory):
        key = f"{directory}/{child.name}" if directory else child.name
        found |= tree(storage, key) if child.is_directory else {key: storage.read_bytes(key)}
    return found


def assert_mine(storage, name=NAME, files=MINE):
    found = tree(storage, name)
    assert {path: found.get(f"{name}/{path}") for path in files} == files


def assert_whole(storage, name=NAME, step=5):
    assert Catalog(storage).find(name=name).step == step
    assert verify(storage, name) == []


def crashes(new_storage, prepare, act, *, every=1):
    """Storages on which `act` crashed before and after each of its operations in turn."""
    rehearsal = FaultyStorage(prepare(new_storage()))
    act(rehearsal)
    for nth in range(0, len(rehearsal.operations), every):
        for fault in (Fault(nth=nth, error=CrashError()), Fault(nth=nth, after=crash)):
            storage = prepare(new_storage())
            with contextlib.suppress(CrashError):
                act(FaultyStorage(storage, [fault]))
            yield storage
            forget_memory()


# --- put there before the save, or while it is in flight


def test_a_save_into_a_directory_of_the_users_keeps_what_is_there(new_storage):
    storage = put(new_storage())
    save(storage, 5, name=NAME)
    assert_mine(storage)
    assert_whole(storage)
    assert [entry.name for entry in storage.list("")] == [NAME]


def test_a_directory_made_during_the_save_keeps_what_is_there(new_storage):
    storage = new_storage()
    made = Fault(method="rename", before=lambda _done: put(storage), nth=0)
    save(FaultyStorage(storage, [made]), 5, name=NAME)
    assert_mine(storage)
    assert_whole(storage)


def test_a_file_made_between_the_look_and_the_rename_keeps_its_place(new_storage):
    """The directory is empty when the commit looks, and has a file of the same name when it moves."""
    storage = new_storage()
    storage.make_directory(NAME)
    mine = {"rank-00000.json": b"mine, by chance"}
    made = Fault(method="exchange", before=lambda _done: put(storage, files=mine), nth=0)
    save(FaultyStorage(storage, [made]), 5, name=NAME)
    assert_whole(storage)
    assert b"mine, by chance" in tree(storage, NAME).values()


def test_an_empty_directory_made_beforehand_gives_the_checkpoint_its_name(tmp_path):
    storage = LocalStorage(tmp_path)
    (tmp_path / NAME).mkdir()
    save(storage, 5, name=NAME)
    assert_whole(storage)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("way", ["itself", "a link to the root", "a directory of the user's"])
def test_the_directory_that_a_job_works_in_is_refused_and_stays_what_it_is(
    tmp_path, monkeypatch, way, replace
):
    root = tmp_path / "run"
    (root / NAME).mkdir(parents=True)
    (tmp_path / "link").symlink_to(root)
    if way.endswith("user's"):
        put(LocalStorage(root))
    monkeypatch.chdir(root / NAME)
    storage = LocalStorage(tmp_path / "link" if "link" in way else root)
    with pytest.raises(ConfigError, match=r"is the working directory of this job.*another name"):
        begin(storage, NAME, "0123abcd", replace=replace)
    assert [path.name for path in root.iterdir()] == [NAME]


@pytest.mark.parametrize(
    "path", ["rank-00000.json", "__0_0.distcp", "model", "manifest.json", "model/__0_0.distcp"]
)
def test_of_two_files_of_one_name_both_are_kept(new_storage, path, caplog):
    storage = put(new_storage(), files={path: b"mine"})
    if path == "__0_0.distcp":
        storage.write_bytes(f"{NAME}/notes.txt", b"so that it is no checkpoint of DCP's")
    save(storage, 5, name=NAME)
    assert_whole(storage)
    assert b"mine" in tree(storage, "").values()
    assert NAME in caplog.text


@pytest.mark.slow
def test_a_crash_at_any_point_of_a_save_among_the_users_files_loses_neither():
    seen = set()

    def prepare(storage):
        return put(save_first(storage))

    for storage in crashes(posix_like, prepare, lambda storage: save(storage, 5, name=NAME)):
        collect_orphans(storage, keep=())
        assert_mine(storage)
        steps = [info.step for info in Catalog(storage).committed()]
        seen.add(tuple(steps))
        assert all(verify(storage, info.name) == [] for info in Catalog(storage).committed())
        if steps == [1]:
            save(storage, 5, name=NAME)
        assert_mine(storage)
        assert_whole(storage)
        assert Catalog(storage).torn() == []
    assert seen == {(1,), (1, 5)}


def save_first(storage):
    save(storage, 1)
    return storage


def test_a_commit_that_fails_half_way_among_the_users_files_takes_its_own_back(new_storage):
    storage = put(new_storage())
    broken = Fault(method="exchange", error=OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input/output"):
        save(FaultyStorage(storage, [broken]), 5, name=NAME)
    assert set(tree(storage, NAME)) == {f"{NAME}/{path}" for path in MINE}
    assert Catalog(storage).committed() == []


@pytest.mark.parametrize(("done", "exchanges"), [(False, True), (True, True), (False, False), (True, False)])
def test_an_exchange_of_places_that_reports_an_error_loses_no_file_of_the_users(
    tmp_path, monkeypatch, done, exchanges
):
    """Also one that was made all the same, as over a network, and where it takes three renames."""
    if not exchanges:
        monkeypatch.setattr(_paths, "_renameat2", None)
    storage = put(save_first(LocalStorage(tmp_path)))

    def fail(_operation):
        raise OSError(errno.EIO, "Input/output error")

    fault = Fault(method="exchange", **{"after" if done else "before": fail})
    with pytest.raises(OSError, match="Input/output"):
        save(FaultyStorage(storage, [fault]), 5, name=NAME)
    abandon(storage, incomplete_name(NAME, "00000005"))
    collect(storage)
    assert_mine(storage)
    assert [info.step for info in Catalog(storage).committed()] == ([1, 5] if done else [1])
    assert {path.name for path in tmp_path.iterdir()} == {NAME, "step-000000001"}


def test_a_directory_that_may_not_be_written_to_is_set_aside(tmp_path, caplog):
    storage = put(LocalStorage(tmp_path))
    denied = Fault(
        method="rename", key=f"*/* -> {NAME}/*", error=PermissionError(errno.EACCES, "Permission denied")
    )
    save(FaultyStorage(storage, [denied]), 5, name=NAME)
    assert_whole(storage)
    (moved,) = replaced(storage)
    assert_mine(storage, moved)
    assert moved in caplog.text


def test_links_and_read_only_files_of_the_users_are_moved_as_they_are(tmp_path):
    storage = put(LocalStorage(tmp_path / "root"))
    precious = tmp_path / "elsewhere"
    precious.mkdir()
    (precious / "data").write_bytes(b"precious")
    place = tmp_path / "root" / NAME
    (place / "data").symlink_to(precious)
    (place / "nowhere").symlink_to("nothing")
    (place / "circle").symlink_to("circle")
    (place / "tokenizer.json").chmod(0o400)
    save(storage, 5, name=NAME)
    save_over(storage, 6, NAME)
    for name in ("data", "nowhere", "circle"):
        assert (place / name).is_symlink()
    remove(storage, Catalog(storage).find(name=NAME))
    assert (precious / "data").read_bytes() == b"precious"
    mine = {path.partition("/")[0] for path in MINE} | {"data", "nowhere", "circle"}
    assert {path.name for path in place.iterdir()} == mine
    assert (place / "tokenizer.json").stat().st_mode & 0o777 == 0o400


# --- a checkpoint that is replaced, or pruned


def test_what_was_put_into_a_checkpoint_is_in_the_one_that_replaces_it(new_storage):
    storage = new_storage()
    save_over(storage, 1, NAME)
    put(storage)
    save_over(storage, 2, NAME)
    assert_mine(storage)
    assert_whole(storage, step=2)
    assert [entry.name for entry in storage.list("")] == [NAME]


@pytest.mark.slow
def test_a_crash_at_any_point_of_a_replacement_loses_no_file_of_the_users():
    def prepare(storage):
        save_over(storage, 1, NAME)
        return put(storage)

    seen = set()
    for storage in crashes(posix_like, prepare, lambda storage: save_over(storage, 2, NAME)):
        collect_orphans(storage, keep=())
        assert_mine(storage)
        (info,) = Catalog(storage).committed()
        seen.add(info.step)
        assert verify(storage, NAME) == []
        assert Catalog(storage).torn() == []
    assert seen == {1, 2}


def test_a_file_that_a_later_version_of_the_checkpoint_has_too_is_kept_beside(new_storage, caplog):
    storage = new_storage()
    save_over(storage, 1, NAME)
    put(storage, files={"adapter.bin": b"mine"})
    working = begin(storage, NAME, "00000002", replace=True)
    files = {**FILES, "adapter.bin": b"ours"}
    for path, content in files.items():
        storage.write_bytes(f"{working}/{path}", content)
    commit(storage, working, NAME, manifest_of(2, files), replace=True)
    assert_whole(storage, step=2)
    found = {key: content for key, content in tree(storage, NAME).items() if "adapter" in key}
    assert found.pop(f"{NAME}/adapter.bin") == b"ours"
    ((beside, content),) = found.items()
    assert content == b"mine"
    assert beside.partition("/")[2] in caplog.text


def test_pruning_leaves_what_is_the_users(new_storage):
    storage = save_first(new_storage())
    save(storage, 5, name=NAME)
    put(storage)
    remove(storage, Catalog(storage).find(name=NAME))
    assert {key.partition("/")[2] for key in tree(storage, NAME)} == set(MINE)
    assert_mine(storage)
    save(storage, 6, name=NAME)
    assert_mine(storage)
    assert_whole(storage, step=6)


@pytest.mark.slow
def test_a_crash_at_any_point_of_a_prune_and_of_the_tidying_after_it_loses_no_file_of_the_users():
    def prepare(storage):
        save(save_first(storage), 5, name=NAME)
        return put(storage)

    def prune(storage):
        remove(storage, Catalog(storage).find(name=NAME))

    for storage in crashes(posix_like, prepare, prune):
        for nested in crashes(lambda there=storage: copy_of(there), lambda there: there, collect, every=7):
            collect(nested)
            assert_mine(nested)
            assert_whole(nested, "step-000000001", 1)
            names = {entry.name for entry in nested.list("")}
            assert names == {NAME, "step-000000001"}


def collect(storage):
    collect_orphans(storage, keep=())


def copy_of(storage):
    copied = posix_like()
    for key, content in tree(storage, "").items():
        copied.write_bytes(key, content)
    return copied


def test_of_a_checkpoint_that_lost_its_manifest_only_what_is_surely_ours_is_pruned(new_storage):
    storage = save_first(new_storage())
    save(storage, 5, name=NAME)
    put(storage)
    storage.delete(f"{NAME}/manifest.json")
    for storage_after in crashes_of_prune(storage):
        assert_mine(storage_after)
    assert {key.partition("/")[2] for key in tree(storage_after, NAME)} == set(MINE)


def crashes_of_prune(storage):
    for done in crashes(lambda: copy_of(storage), lambda there: there, prune_by_name):
        collect(done)
        yield done


def prune_by_name(storage):
    remove(storage, Catalog(storage).find(name=NAME))


def test_that_files_stay_behind_is_said_once_for_a_root(caplog):
    storage = posix_like()
    _prune._warned.discard((storage.url, ""))
    for step in (1, 2, 3):
        save(storage, step)
        put(storage, f"step-{step:09d}")
        remove(storage, Catalog(storage).find(step=step))
    assert caplog.text.count("were kept") == 1


def test_what_is_the_users_changes_nothing_for_a_load(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(5, state_of(5.0), name=NAME).result()
        put(LocalStorage(tmp_path))
        loaded = state_of(0.0)
        assert checkpoints.resume(loaded) == 5
        assert loaded.model.weight.item() == 5.0
        assert verify(checkpoints.storage, NAME) == []


def state_of(value):
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(value)
    return TrainState(model=model)


def test_a_run_that_puts_files_into_every_checkpoint_loses_none(tmp_path):
    """As PEFT's callback does: adapters into `checkpoint-N` while the save is in flight, with rotation."""
    with CheckpointManager(tmp_path, keep=KeepLatest(1)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(float(step)), name=f"checkpoint-{step}")
            put(LocalStorage(tmp_path), f"checkpoint-{step}", {"adapter_model.bin": b"%d" % step})
        checkpoints.save(4, state_of(4.0), name="last").result()
        put(LocalStorage(tmp_path), "last")
        checkpoints.save(5, state_of(5.0), name="last").result()
        checkpoints.wait()
        assert [info.name for info in checkpoints.checkpoints()] == ["last"]
    for step in (1, 2, 3):
        assert (tmp_path / f"checkpoint-{step}" / "adapter_model.bin").read_bytes() == b"%d" % step
    assert_mine(LocalStorage(tmp_path), "last")


@pytest.mark.slow
def test_power_cuts_lose_neither_the_checkpoint_nor_the_users_files(tmp_path):
    for number in range(0, 1000, 11):
        root, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        storage = LocalStorage(root)
        save_over(storage, 1, "last")
        put(storage, "last")
        put(storage)
        PowerLog.begin(root, log)
        try:
            with SystemCalls(root, [Fault(nth=number, before=crash), PowerLog(root, log).fault]):
                save(storage, 5, name=NAME)
                save_over(storage, 6, "last")
                remove(storage, Catalog(storage).find(name=NAME))
            done = True
        except CrashError:
            done = False
        for fate, seed in (("strict", 0), ("journal", number), ("random", number), ("random", number + 1)):
            left = LocalStorage(tmp_path / f"{number}.{fate}.{seed}")
            power_cut(log, root, left.local_path(""), fate=fate, seed=seed)
            collect(left)
            assert_mine(left)
            assert_mine(left, "last")
            assert all(verify(left, info.name) == [] for info in Catalog(left).committed())
            assert "last" in {info.name for info in Catalog(left).committed()}
        if done:
            return
    raise AssertionError("the job never came to its end")


# --- other programs' checkpoints, and what is in the way


STOCK = {
    "accelerate": {"model.safetensors": b"w", "optimizer.bin": b"o", "random_states_0.pkl": b"r"},
    "trainer": {"model.safetensors": b"w", "trainer_state.json": b"{}", "optimizer.pt": b"o"},
    "dcp": {".metadata": b"index", "__0_0.distcp": b"data"},
    "accelerate fsdp": {
        "pytorch_model_fsdp_0/.metadata": b"index",
        "pytorch_model_fsdp_0/__0_0.distcp": b"d",
    },
    "lightning sharded": {"meta.pt": b"m", ".metadata": b"index", "__0_0.distcp": b"data"},
    "torn, of ours": {"__0_0.distcp": b"data", "rank-00000.json": b"{}"},
}


@pytest.mark.parametrize("kind", STOCK)
def test_another_checkpoint_of_that_name_is_set_aside_whole_when_the_new_one_is_complete(
    new_storage, kind, caplog
):
    storage = put(new_storage(), files=STOCK[kind])
    working = begin(storage, NAME, "0123abcd")
    assert_mine(storage, files=STOCK[kind])
    for path, content in FILES.items():
        storage.write_bytes(f"{working}/{path}", content)
    commit(storage, working, NAME, manifest_of(5))
    assert_whole(storage)
    (moved,) = replaced(storage)
    assert_mine(storage, moved, STOCK[kind])
    assert moved in caplog.text
    assert set(tree(storage, NAME)) == {f"{NAME}/{path}" for path in (*FILES, "manifest.json", "COMMITTED")}


def test_a_crash_at_any_point_of_setting_aside_loses_nothing():
    for storage in crashes(
        posix_like,
        lambda there: put(there, files=STOCK["trainer"]),
        lambda there: save(there, 5, name=NAME),
    ):
        collect(storage)
        (place,) = replaced(storage) or [NAME]
        assert_mine(storage, place, STOCK["trainer"])


def test_a_step_that_lost_its_marker_can_be_saved_again(tmp_path, caplog):
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(float(step))).result()
    (tmp_path / "step-000000002" / "COMMITTED").unlink()
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(state_of(0.0)) == 1
        checkpoints.save(2, state_of(2.5)).result()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2]
        (moved,) = replaced(checkpoints.storage)
    assert (tmp_path / moved / "manifest.json").exists()
    assert moved in caplog.text


def test_a_marker_that_cannot_be_read_costs_no_later_save(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(float(step))).result()
    (tmp_path / "step-000000002" / "COMMITTED").write_bytes(b"not a marker")
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(state_of(0.0))
        checkpoints.save(2, state_of(2.5)).result()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2]
        assert len(replaced(checkpoints.storage)) == 1


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("what", ["file", "link to a directory", "link to nothing", "link to a checkpoint"])
def test_a_file_or_link_of_that_name_is_set_aside_as_it_is(tmp_path, what, replace):
    storage, place = LocalStorage(tmp_path), tmp_path / NAME
    save(storage, 1)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "kept").write_bytes(b"mine")
    if what == "file":
        place.write_bytes(b"a stock checkpoint in one file")
    else:
        place.symlink_to(
            {"directory": "scratch", "nothing": "void", "checkpoint": "step-000000001"}[what.split()[-1]]
        )
    (save_over(storage, 5, NAME) if replace else save(storage, 5, name=NAME))
    assert_whole(storage)
    (moved,) = replaced(storage)
    assert (tmp_path / moved).is_symlink() == (what != "file")
    assert (tmp_path / "scratch" / "kept").read_bytes() == b"mine"
    assert verify(storage, "step-000000001") == []


def links_of_the_users(root, elsewhere):
    """Links to a checkpoint in the root, out of the root, to nothing, and to a step that is yet to come."""
    elsewhere.mkdir()
    places = {
        "latest": "step-000000001",
        "best": elsewhere,
        "gone": "nowhere",
        "step-000000009": elsewhere,
        "step-000000004": "latest",
    }
    for name, place in places.items():
        (root / name).symlink_to(place)
    return set(places)


def test_a_prune_moves_nothing_out_of_what_a_link_in_a_checkpoint_leads_to(tmp_path):
    storage = LocalStorage(tmp_path)
    info = save(storage, 1)
    (tmp_path / info.name / "model").rename(tmp_path / "aside")
    (tmp_path / "aside" / "mine").write_bytes(b"mine")
    (tmp_path / info.name / "model").symlink_to(tmp_path / "aside")
    remove(storage, info)
    assert sorted(path.name for path in (tmp_path / "aside").iterdir()) == ["__0_0.distcp", "mine"]


def test_a_link_of_the_users_never_counts_as_a_checkpoint_and_is_never_why_a_run_is_lost(tmp_path, caplog):
    root, model = tmp_path / "run", torch.nn.Linear(2, 1)
    with CheckpointManager(root) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, TrainState(model=model))
    links = links_of_the_users(root, tmp_path / "elsewhere")
    with CheckpointManager(root, keep=KeepLatest(2)) as checkpoints:
        assert checkpoints.resume(TrainState(model=model)) == 2
        assert "step-000000009, newer but a symbolic link" in caplog.text
        assert checkpoints.load({"model": model}, name="latest").step == 1
        checkpoints.continue_from(2)
        for step in (3, 4):
            checkpoints.save(step, TrainState(model=model))
            checkpoints.wait()
        assert [info.name for info in checkpoints.checkpoints()] == ["step-000000003", "step-000000004"]
        checkpoints.save(9, TrainState(model=model))
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [4, 9]
    assert {path.name for path in root.iterdir() if path.is_symlink()} >= links - {
        "step-000000004",
        "step-000000009",
    }
    for step in (4, 9):
        assert next(root.glob(f".replaced-*-step-00000000{step}~")).is_symlink()


def test_a_fresh_start_beside_links_to_checkpoints_is_told(tmp_path, caplog):
    (tmp_path / "run").mkdir()
    links_of_the_users(tmp_path / "run", tmp_path / "elsewhere")
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.resume(TrainState(model=torch.nn.Linear(2, 1))) is None
    assert "symbolic links, which do not count" in caplog.text


def test_names_in_flight_never_look_like_a_hosts_checkpoints(tmp_path):
    """What diffusers and many scripts do before each save and at `--resume_from_checkpoint latest`."""
    from ckpt_core import names

    makers = [
        names.incomplete_name,
        names.trash_name,
        names.replaced_name,
        names.aside_name,
    ]
    for make in makers:
        for name in ("checkpoint-5", "checkpoint_5", "last.ckpt", "step-000000005", "epoch_3"):
            made = make(name, "0123abcd")
            assert made.startswith(".")
            assert not re.match("checkpoint|step|epoch|last", made)
            (tmp_path / made).mkdir()
            assert names.original_name(made) == name
    assert list(tmp_path.glob("checkpoint*")) == []


# --- where nothing can be renamed


@pytest.mark.parametrize("again", ["the same manager", "another manager"])
def test_on_an_object_store_a_name_that_is_committed_is_refused_before_anything_is_written(again):
    storage = bucket_like()
    first = CheckpointManager(storage)
    first.save(1, {"w": torch.ones(4)}, name="best").result()
    if again == "another manager":
        first.close()
        first = CheckpointManager(storage)
        first.resume({"w": torch.zeros(4)})
    before = sorted(entry.name for entry in storage.list("best"))
    with first as checkpoints:
        with pytest.raises(CheckpointExistsError, match="object store: save under another name"):
            checkpoints.save(2, {"w": torch.zeros(4)}, name="best")
        checkpoints.save(2, {"w": torch.zeros(4)}, name="better").result()
        assert sorted(entry.name for entry in storage.list("best")) == before
        assert checkpoints.load(loaded := {"w": torch.zeros(4)}, name="best").step == 1
        assert loaded["w"].sum() == 4


def test_on_an_object_store_the_users_objects_are_neither_in_the_way_nor_deleted():
    storage = put(bucket_like())
    save(storage, 5, name=NAME)
    assert_mine(storage)
    assert_whole(storage)
    remove(storage, Catalog(storage).find(name=NAME))
    assert tree(storage, NAME) == {f"{NAME}/{path}": content for path, content in MINE.items()}


@pytest.mark.parametrize("name", [NAME, "step-000000005"])
def test_on_an_object_store_only_our_own_objects_of_a_torn_save_are_cleared(name):
    storage = put(bucket_like(), name)
    table = b'{"format_version":1,"block_bytes":1,"beside":["optimizer.bin"],"files":[]}'
    torn = {
        "__0_0.distcp": b"t",
        "chunks-00000.json.z": zlib.compress(table),
        "optimizer.bin": b"torn",
        "model/__0_0.distcp": b"t",
    }
    put(storage, name, torn)
    begin(storage, name, "0123abcd")
    assert tree(storage, name) == {f"{name}/{path}": content for path, content in MINE.items()}


@pytest.mark.slow
def test_on_an_object_store_a_crash_at_any_point_loses_no_object_of_the_users():
    def prepare(storage):
        save(save_first(storage), 5)
        return put(storage, "step-000000005")

    def act(storage):
        remove(storage, Catalog(storage).find(step=5))
        save(storage, 5)

    for storage in crashes(bucket_like, prepare, act):
        collect(storage)
        assert_mine(storage, "step-000000005")
        assert_whole(storage, "step-000000001", 1)
        if [info.step for info in Catalog(storage).committed()] == [1]:
            save(storage, 5)
        assert_whole(storage, "step-000000005")


@pytest.mark.parametrize("name", [NAME, "step-000000005"])
def test_on_an_object_store_another_programs_checkpoint_is_refused_at_once_and_stays(name):
    storage = put(bucket_like(), name, STOCK["dcp"])
    with pytest.raises(CheckpointExistsError, match=r"another program wrote.*move or delete it"):
        begin(storage, name, "0123abcd")
    collect(storage)
    assert_mine(storage, name, STOCK["dcp"])
