"""Newest means newest of this run: what training went away from never comes back by itself."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch

from ckpt_core import CheckpointManager, CheckpointNotFoundError, CorruptCheckpointError, KeepBest, KeepLatest
from ckpt_core.commit import Catalog, Manifest, Marker, begin, commit
from ckpt_core.errors import CheckpointExistsError
from ckpt_core.storage import LocalStorage
from tests.unit.commit.checkpoints import bucket_like, manifest_of, posix_like, save, write_files


@pytest.fixture(params=[posix_like, bucket_like])
def storage(request):
    return request.param()


def state_of(step):
    return {"w": torch.full((4,), float(step))}


def run(storage, *steps, resume=False, go_back_to=None, **options):
    """One job: saves of these steps, after a resume, a load or neither; what it resumed."""
    state, resumed = state_of(-1), None
    with CheckpointManager(storage, **options) as checkpoints:
        if resume:
            resumed = checkpoints.resume(state)
        if go_back_to is not None:
            checkpoints.load(state, step=go_back_to)
        for step in steps:
            checkpoints.save(step, state_of(step), metrics={"m": float(step)})
            checkpoints.wait()
    return resumed


def steps_of(storage, *, abandoned=False):
    return [info.step for info in Catalog(storage).committed(abandoned=abandoned)]


def marked(storage, step):
    Catalog(storage).mark_damaged(f"step-{step:09d}", "a test")


def test_a_fresh_run_never_resumes_an_older_one(storage, caplog):
    run(storage, 10, 20, 30)
    with caplog.at_level(logging.WARNING):
        run(storage, 5, 10)
    assert "starting afresh" in caplog.text
    assert "3 checkpoint(s) of an earlier run" in caplog.text
    assert steps_of(storage) == [5, 10]
    assert steps_of(storage, abandoned=True) == [5, 10, 10, 20, 30]
    assert run(storage, resume=True) == 10


def test_who_says_that_a_run_starts_afresh_is_not_warned_of_it(storage, caplog):
    run(storage, 10, 20)
    for fold in (1, 2):
        with CheckpointManager(storage) as checkpoints:
            checkpoints.start_afresh()
            checkpoints.save(5, state_of(fold)).result()
    assert "starting afresh" not in caplog.text
    assert steps_of(storage) == [5]
    assert steps_of(storage, abandoned=True) == [5, 5, 10, 20]
    with CheckpointManager(storage) as checkpoints:
        checkpoints.start_afresh()
        checkpoints.resume(state_of(0))
        checkpoints.save(7, state_of(7)).result()
    assert steps_of(storage) == [5, 7], "what is loaded afterwards counts"


def test_a_resumed_run_stays_on_its_line_however_often(storage, caplog):
    run(storage, 1)
    for step in (2, 3, 4):
        assert run(storage, step, resume=True) == step - 1
    infos = Catalog(storage).committed()
    assert [info.step for info in infos] == [1, 2, 3, 4]
    assert len({info.lineage for info in infos}) == 1
    assert "abandoned" not in caplog.text


def test_going_back_and_training_on_leaves_behind_what_came_after(storage, caplog):
    run(storage, 10, 20, 30)
    run(storage, 15, go_back_to=10)
    assert "going back to step 10" in caplog.text
    assert steps_of(storage) == [10, 15]
    assert run(storage, 20, resume=True) == 15
    assert steps_of(storage) == [10, 15, 20]
    assert run(storage, resume=True) == 20
    loaded = state_of(-1)
    with CheckpointManager(storage) as checkpoints:
        assert checkpoints.load(loaded, step=30).step == 30, "an abandoned step can be asked for"
        assert checkpoints.load(loaded, step=20).name.startswith("step-000000020.run-")
        assert checkpoints.load(loaded, name="step-000000020").step == 20


def test_going_back_in_the_same_process_forks_too(storage):
    state = state_of(0)
    with CheckpointManager(storage) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step))
        checkpoints.load(state, step=1)
        checkpoints.save(2, state)
        checkpoints.save(3, state)
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2, 3]
        assert checkpoints.load(state_of(0), step=3).name.startswith("step-000000003.run-")
    assert steps_of(storage, abandoned=True) == [1, 2, 2, 3, 3]


def test_each_fork_remembers_all_that_it_goes_on_from_and_no_more(storage):
    run(storage, 10, 20)
    run(storage, 15, 25, go_back_to=10)
    run(storage, 22, go_back_to=15)
    assert steps_of(storage) == [10, 15, 22]
    run(storage, 12, go_back_to=10)
    assert steps_of(storage) == [10, 12]
    run(storage, 3)
    assert steps_of(storage) == [3]
    run(storage, 26, go_back_to=25)
    assert steps_of(storage) == [10, 15, 25, 26]
    (newest,) = [info for info in Catalog(storage).committed() if info.step == 26]
    assert (newest.lineage.number, len(newest.lineage.ancestry)) == (6, 2)


def test_falling_back_from_a_damaged_newest_begins_a_new_lineage(storage):
    run(storage, 1, 2)
    data = f"step-{2:09d}/__0_0.distcp"
    storage.replace(data, b"x" * storage.size(data))
    assert run(storage, 2, 3, resume=True) == 1
    infos = Catalog(storage).committed()
    assert [(info.step, info.damaged) for info in infos] == [(1, None), (2, None), (3, None)]
    assert steps_of(storage, abandoned=True) == [1, 2, 2, 3]


def test_the_newest_may_be_marked_and_is_gone_on_from_all_the_same(storage):
    run(storage, 1, 2)
    marked(storage, 2)
    run(storage, 3, go_back_to=2)
    assert steps_of(storage) == [1, 2, 3]


def test_a_load_of_a_part_is_no_continuation(storage):
    def saves_after(*names, **load):
        before = max(info.lineage.number for info in Catalog(storage).committed())
        with CheckpointManager(storage) as checkpoints:
            checkpoints.load({name: torch.zeros_like(both[name]) for name in names}, **load)
            checkpoints.save(step := 10 + before, both)
        assert step == max(steps_of(storage))
        return max(info.lineage.number for info in Catalog(storage).committed()) - before

    both = {"w": torch.ones(4), "v": torch.ones(1)}
    with CheckpointManager(storage) as checkpoints:
        checkpoints.save(1, both)
    assert saves_after("w", "v") == 0
    assert saves_after("w", "v", items=["w"]) == 1
    assert saves_after("w", include=["w"]) == 1
    assert saves_after("w", "v", strict=False) == 1
    assert saves_after("w") == 1, "a mapping without all that is there"


def test_a_host_can_say_what_the_live_state_goes_on_from(storage):
    run(storage, 1, 2)
    with CheckpointManager(storage) as checkpoints:
        assert checkpoints.continue_from().step == 2
        checkpoints.save(3, state_of(3))
        checkpoints.wait()
        assert checkpoints.continue_from(step=1).step == 1
        checkpoints.save(2, state_of(2))
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2]
        assert checkpoints.continue_from(name="step-000000003").abandoned
        with pytest.raises(CheckpointNotFoundError):
            checkpoints.continue_from(step=9)


def test_steps_counted_from_the_start_again_leave_behind_what_is_higher(storage):
    """A script that loads the newest and forgets to go on with its step: what it saves is what it resumes."""
    run(storage, 10, 20)
    run(storage, 5, go_back_to=20)
    assert run(storage, 6, resume=True) == 5
    assert steps_of(storage) == [5, 6]


def test_saves_out_of_order_are_no_new_lineage(storage):
    run(storage, 1, 5, 3)
    assert steps_of(storage) == [1, 3, 5]
    assert len({info.lineage for info in Catalog(storage).committed()}) == 1


def test_a_step_saved_twice_in_one_lineage_is_refused(storage):
    run(storage, 1, 2)
    with pytest.raises(CheckpointExistsError, match="committed already"):
        run(storage, 2, resume=True)
    with pytest.raises(CheckpointExistsError, match="committed already"):
        run(storage, 1, go_back_to=1)


def test_checkpoints_from_before_there_were_lineages_load_and_are_gone_on_from(storage):
    for step in (1, 2, 3):
        save(storage, step)
    marker = json.loads(storage.read_bytes("step-000000001/COMMITTED"))
    assert "lineage" not in marker
    assert steps_of(storage) == [1, 2, 3]
    with CheckpointManager(storage) as checkpoints:
        checkpoints.continue_from()
        checkpoints.save(4, state_of(4))
    assert steps_of(storage) == [1, 2, 3, 4]
    with CheckpointManager(storage) as checkpoints:
        checkpoints.continue_from(step=2)
        checkpoints.save(3, state_of(3))
    assert steps_of(storage) == [1, 2, 3]
    assert steps_of(storage, abandoned=True) == [1, 2, 3, 3, 4]


def test_the_lineage_is_in_manifest_and_marker_and_read_as_hostile_input(storage):
    run(storage, 1, 2)
    run(storage, 3, go_back_to=1)
    name = "step-000000003"
    manifest, marker = Catalog(storage).manifest(name), Catalog(storage).marker(name)
    assert manifest.lineage == marker.lineage
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert marker.lineage.number == 2
    fields = json.loads(manifest.to_bytes())
    for wrong in (
        {"id": "../x", "number": 1, "ancestry": []},
        {"id": "00000000", "number": 0, "ancestry": []},
        {"id": "00000000", "number": 1, "ancestry": [["00000000", -1]]},
        {"id": "00000000", "number": 1, "ancestry": [["00000000"]]},
        {"id": "00000000", "number": 1, "ancestry": [[0, 1]]},
        {"id": "00000000", "number": 1, "ancestry": [["00000000", 1]] * 1001},
        [],
        None,
    ):
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_bytes(json.dumps(fields | {"lineage": wrong}).encode())


def test_no_clock_decides_which_lineage_is_the_present_one(storage):
    run(storage, 10)
    run(storage, 5)
    newest = Catalog(storage).committed()[-1]
    for number, (step, created) in enumerate([(7, 1.0), (8, 9e9)], start=3):
        lineage = replace(newest.lineage, id=f"{number:08x}", number=number)
        manifest = replace(manifest_of(step), created=created, lineage=lineage)
        working = begin(storage, f"step-{step:09d}", f"{step:08x}")
        write_files(storage, working)
        commit(storage, working, f"step-{step:09d}", manifest)
        assert steps_of(storage) == [step]
    assert Marker.of(manifest, manifest.to_bytes()).lineage == lineage


def test_retention_counts_the_present_line_only_and_keeps_what_was_abandoned(storage):
    run(storage, 10, 20, 30)
    run(storage, 1, 2, 3, keep=KeepLatest(2))
    assert steps_of(storage) == [2, 3]
    assert steps_of(storage, abandoned=True) == [2, 3, 10, 20, 30]


def test_the_best_is_the_best_of_the_present_line(storage):
    run(storage, 10, 20)
    run(storage, 3, 4, 5, keep=KeepLatest(1) | KeepBest("m", mode="max") | KeepBest("m"))
    assert steps_of(storage) == [3, 5]


def test_abandoned_ones_go_if_asked_for_but_never_pinned_ones(storage):
    run(storage, 10, 20, 30)
    Catalog(storage).pin(20, "for the paper")
    run(storage, 1, 2, keep=KeepLatest(2), abandoned="prune")
    assert steps_of(storage, abandoned=True) == [1, 2, 20]


def test_who_forgot_to_resume_can_still_do_so_after_the_first_save(storage, caplog):
    options = {"keep": KeepLatest(2), "abandoned": "prune"}
    run(storage, 10, 15, 20, **options)
    run(storage, 5, **options)
    assert "starting afresh" in caplog.text
    assert steps_of(storage, abandoned=True) == [5, 20]
    run(storage, 25, 30, go_back_to=20, **options)
    assert steps_of(storage, abandoned=True) == [25, 30]


def test_if_nothing_of_the_present_line_is_usable_the_abandoned_are_named_not_resumed(storage):
    run(storage, 10)
    run(storage, 5)
    Catalog(storage).mark_bad("step-000000005", "loss spike")
    with CheckpointManager(storage) as checkpoints:
        with pytest.raises(CorruptCheckpointError, match=r"bad: step-000000005.*left step-000000010"):
            checkpoints.resume(state_of(0))
        assert checkpoints.latest() is None


def test_the_directory_of_a_wrong_start_can_be_deleted_and_the_run_before_is_back(tmp_path):
    storage = LocalStorage(tmp_path)
    run(storage, 10)
    run(storage, 5)
    storage.delete("step-000000005")
    assert run(storage, resume=True) == 10


def test_a_damaged_marker_of_the_newest_lineage_does_not_bring_back_an_older_run(storage):
    run(storage, 10)
    run(storage, 5)
    storage.replace("step-000000005/COMMITTED", b"rotten")
    told = pytest.raises(CorruptCheckpointError, match=r"damaged: step-000000005.*left step-000000010")
    with CheckpointManager(storage) as checkpoints, told:
        checkpoints.resume(state_of(0))
    run(storage, 6)
    assert steps_of(storage) == [6]
    assert Catalog(storage).committed()[-1].lineage.number == 3


def test_a_step_marked_as_bad_is_passed_over_until_the_mark_is_taken_away(storage):
    run(storage, 1, 2, 3)
    with CheckpointManager(storage) as checkpoints:
        checkpoints.mark(3, "loss spike")
        assert checkpoints.latest().step == 2
        assert [info.bad for info in checkpoints.checkpoints()] == [None, None, "loss spike"]
    assert run(storage, 3, resume=True) == 2
    assert steps_of(storage) == [1, 2, 3]
    with CheckpointManager(storage) as checkpoints:
        checkpoints.unmark(3)
        assert [info.bad for info in checkpoints.checkpoints(abandoned=True)] == [None] * 4
        assert checkpoints.latest().name.startswith("step-000000003.run-")
        with pytest.raises(CheckpointNotFoundError):
            checkpoints.mark(9, "there is none")


def test_a_mark_of_damage_and_one_as_bad_know_nothing_of_each_other(storage):
    run(storage, 1, 2)
    catalog, name = Catalog(storage), "step-000000002"
    catalog.mark_bad(name, "spike")
    catalog.mark_damaged(name, "torn")
    assert (catalog.find(name=name).bad, catalog.find(name=name).damaged) == ("spike", "torn")
    catalog.unmark(name)
    assert (catalog.find(name=name).bad, catalog.find(name=name).damaged) == ("spike", None)
    catalog.unmark(name, bad=True)
    assert catalog.find(name=name).usable


def test_retention_counts_what_is_bad_for_nothing_and_leaves_it(storage):
    run(storage, 1, 2, 3)
    Catalog(storage).mark_bad("step-000000003", "spike")
    with CheckpointManager(storage, keep=KeepLatest(1)) as checkpoints:
        plan = checkpoints.prune()
    assert ([info.step for info in plan.drop], [info.step for info in plan.bad]) == ([1], [3])
    assert steps_of(storage) == [2, 3]
