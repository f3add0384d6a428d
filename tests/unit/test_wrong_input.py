"""Whatever a user gives or has in a directory: it works, or the error says what it is and what to do."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from ckpt_core import CheckpointManager, Counters, EverySteps, KeepLatest, TrainState
from ckpt_core.commit import Catalog, describe, look_around
from ckpt_core.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError, LoadError
from ckpt_core.storage import LocalStorage, object_storage, open_storage
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.memory import MemoryStorage
from tests.unit.commit.checkpoints import save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    step_once(model, optimizer)
    return model, optimizer, scheduler


def step_once(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class StepCounter:
    """As torchtitan's `TrainState`: tensors in a state of its own."""

    def __init__(self, step=0):
        self.step = step

    def state_dict(self):
        return {"step": torch.tensor(self.step), "seen": self.step * 10}

    def load_state_dict(self, state):
        self.step = int(state["step"])


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A directory with everything that is no checkpoint of ours."""
    root = tmp_path_factory.mktemp("foreign") / "run"
    model, optimizer, scheduler = trained()
    for _ in range(3):
        scheduler.step()
    whole, of_optimizer = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    named = {
        "model": whole,
        "optimizer": of_optimizer,
        "train_state": StepCounter(7),
        "lr_scheduler": scheduler,
    }
    flat = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    dcp.save(named, checkpoint_id=root / "step-7")
    dcp.save({**whole, "optimizer": flat}, checkpoint_id=root / "flat")
    dcp.save({"model": whole, "optimizer": optimizer.state_dict()}, checkpoint_id=root / "numbered")
    (root / "hf").mkdir()
    (root / "hf" / "model.safetensors").write_bytes(b"")
    torch.save(whole, root / "weights.pt")
    (root / "deepspeed").mkdir()
    (root / "deepspeed" / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04")
    (root / "empty").mkdir()
    return root


@pytest.fixture
def run(tmp_path):
    """Steps 1 to 3 of ours."""
    storage = LocalStorage(tmp_path / "run")
    for step in (1, 2, 3):
        save(storage, step)
    return tmp_path / "run"


@contextmanager
def told(caplog, level=logging.WARNING):
    """What is logged at that level or above inside the block, one text."""
    texts = []
    caplog.clear()
    with caplog.at_level(logging.INFO):
        yield texts
    texts.append("\n".join(each.getMessage() for each in caplog.records if each.levelno >= level))


# --- a fresh start is never silent --------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["nothing", "an empty directory", "what a kill leaves", "notes"])
def test_a_fresh_start_is_told(tmp_path, caplog, left):
    root = tmp_path / "run"
    if left != "nothing":
        root.mkdir()
    if left == "notes":
        (root / "notes.txt").write_text("x")
    if left == "what a kill leaves":
        (root / "step-000000001.incomplete-0123abcd").mkdir()
        (root / ".ckpt-suite").mkdir()
        (root / ".ckpt-suite/writer.json").write_text("{}")
        (root / ".ckpt-suite/writer.json.lock").write_text("")
    with told(caplog, logging.INFO) as texts, CheckpointManager(root) as checkpoints:
        assert checkpoints.resume({"x": torch.ones(2)}) is None
    assert f"training starts afresh: {root} holds no checkpoint yet" in texts[0]
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, {"x": torch.ones(2)})
    with told(caplog) as texts, CheckpointManager(root) as checkpoints:
        assert checkpoints.resume({"x": torch.ones(2)}) == 1
    assert "afresh" not in texts[0]


def test_a_fresh_start_beside_stock_checkpoints_names_them(foreign, tmp_path, caplog):
    root = shutil.copytree(foreign, tmp_path / "run")
    with told(caplog) as texts, CheckpointManager(root) as checkpoints:
        assert checkpoints.resume({"x": torch.ones(2)}) is None
    assert "afresh" in texts[0]
    assert "load(state, name='step-7')" in texts[0]


def test_a_fresh_start_above_runs_names_them(run, caplog):
    with told(caplog) as texts, CheckpointManager(run.parent) as checkpoints:
        assert checkpoints.resume({"x": torch.ones(2)}) is None
    assert "run there hold checkpoints: give one of them as the root" in texts[0]


@pytest.mark.parametrize("act", ["resume", "save", "prune"])
def test_a_checkpoint_is_no_root(run, act):
    before = sorted(path.name for path in (run / "step-000000002").iterdir())
    acts = {"resume": ({},), "save": (9, {"x": torch.ones(1)}), "prune": ()}
    refusal = pytest.raises(ConfigError, match=rf"itself a committed checkpoint.*give {run} as the root")
    with CheckpointManager(run / "step-000000002") as checkpoints, refusal:
        getattr(checkpoints, act)(*acts[act])
    left = sorted(path.name for path in (run / "step-000000002").iterdir())
    assert left == before


def test_a_step_that_lost_its_marker_is_told_when_an_older_one_is_resumed(tmp_path, caplog):
    root, values = tmp_path / "run", {"x": torch.ones(2)}
    with CheckpointManager(root) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, values)
    (root / "step-000000002" / "COMMITTED").unlink()
    with told(caplog) as texts, CheckpointManager(root) as checkpoints:
        assert checkpoints.resume(values) == 1
        checkpoints.save(2, values)  # and its name is no obstacle
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2]
    assert "step-000000002, newer but without COMMITTED" in texts[0]


def test_looking_around_is_the_same_on_an_object_store(tmp_path):
    storage = object_storage(f"memory://around-{os.urandom(4).hex()}")
    for run in ("a", "b"):
        save(object_storage(f"{storage.url}/{run}"), 1)
    around = look_around(storage)
    assert (around.runs, around.stock, around.unmarked) == (["a", "b"], [], [])
    assert look_around(object_storage(f"{storage.url}/a/step-000000001")).is_checkpoint
    assert "a root of checkpoints" in describe(storage, "a")


def closed(name: str) -> FaultyStorage:
    """A root with a directory that this user may not enter."""
    inner = MemoryStorage("around")
    inner.make_directory(name)
    denied = PermissionError(13, "Permission denied")
    return FaultyStorage(inner, [Fault(key=f"{name}*", error=denied)])


def test_a_directory_that_may_not_be_listed_is_named_and_hides_no_other():
    storage = closed("theirs")
    storage.make_directory("run")
    storage.make_directory("run/step-000000001")
    storage.write_bytes("run/step-000000001/COMMITTED", b"{}")
    around = look_around(storage)
    assert (around.runs, around.unlisted) == (["run"], ["theirs"])


def test_a_root_at_the_top_of_a_filesystem_is_used_although_lost_and_found_is_closed():
    values = {"w": torch.ones(3)}
    storage = closed("lost+found")
    for step in (1, 2, 3):
        with CheckpointManager(storage, keep=KeepLatest(1)) as checkpoints:
            assert checkpoints.resume(values) == (step - 1 or None)
            checkpoints.save(step, values)
    assert [info.step for info in Catalog(storage).committed()] == [3]
    with pytest.raises(ConfigError, match="cannot be the name of a checkpoint"):
        CheckpointManager(storage).save(4, values, name="lost+found")


def test_a_closed_directory_that_may_be_a_newer_checkpoint_is_no_reason_to_go_back():
    values = {"w": torch.ones(3)}
    storage = closed("theirs")
    with CheckpointManager(storage) as checkpoints:
        checkpoints.save(1, values)
    with CheckpointManager(storage) as checkpoints, pytest.raises(LoadError, match="around/theirs may hold"):
        checkpoints.resume(values)


# --- wrong kinds of checkpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hf", r"safetensors files.*load\(state, source="),
        ("weights.pt", r"a file by `torch.save`.*torch\.load"),
        ("deepspeed", r"a directory of files by `torch.save`"),
        ("hf/model.safetensors", "a safetensors file"),
        ("empty", "a directory without files"),
        ("nowhere", "no committed checkpoint 'nowhere'.*stock DCP wrote"),
    ],
)
def test_what_is_no_checkpoint_is_named_for_what_it_is(foreign, name, says):
    with CheckpointManager(foreign) as checkpoints, pytest.raises(CheckpointNotFoundError, match=says):
        checkpoints.load({"x": torch.ones(2)}, name=name)


@pytest.mark.parametrize("what", [{"step": 7}, {}])
def test_steps_of_stock_directories_are_loaded_by_name(foreign, what):
    refusal = pytest.raises(CheckpointNotFoundError, match=r"load\(state, name='step-7'\)")
    with CheckpointManager(foreign) as checkpoints, refusal:
        checkpoints.load({"x": torch.ones(2)}, **what)


@pytest.mark.parametrize("kind", ["ours", "ours torn", "stock", "a link"])
def test_a_job_given_a_checkpoint_as_root_writes_nothing_into_it(tmp_path, kind):
    place = tmp_path / "run" / "step-000000001"
    if kind == "stock":
        dcp.save({"x": torch.ones(2)}, checkpoint_id=place)
    else:
        save(LocalStorage(place.parent), 1)
    if kind == "ours torn":
        (place / "COMMITTED").unlink()
    if kind == "a link":
        place = place.rename(tmp_path / "elsewhere")
        (tmp_path / "link").symlink_to(place)
        place = tmp_path / "link"
    before = place.stat().st_mtime_ns
    with CheckpointManager(place) as checkpoints, pytest.raises(ConfigError, match="is itself"):
        checkpoints.save(2, {"x": torch.ones(2)})
    assert place.stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["weights.pt", "hf/model.safetensors"])
def test_a_file_given_as_root_is_named_for_what_it_is(foreign, name):
    with CheckpointManager(foreign / name) as checkpoints:
        for act in (lambda: checkpoints.load({}), lambda: checkpoints.load({}, step=1)):
            with pytest.raises(ConfigError, match=r"no directory.*load it (with|by)"):
                act()


@pytest.mark.parametrize("form", ["plain", "by get_state_dict", "app"])
def test_the_usual_recipes_of_dcp_are_loaded_under_their_own_names(tmp_path, form):
    model, optimizer, _ = trained()
    saved = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    if form != "plain":
        saved = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save({"app": saved} if form == "app" else saved, checkpoint_id=tmp_path / "step-7")
    live, live_optimizer, _ = trained(3)
    state = {"model": live, "optim": live_optimizer}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.load({"app": state} if form == "app" else state, name="step-7")
    assert torch.equal(live[0].weight, model[0].weight)
    assert torch.equal(
        live_optimizer.state[live[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"]
    )


@pytest.mark.parametrize("item", ["optim", "model", "step"])
def test_a_rename_of_an_item_is_refused_with_the_form_that_works(tmp_path, item):
    dcp.save({item: {"x": torch.ones(2)}}, checkpoint_id=tmp_path / "step-7")
    refusal = pytest.raises(ConfigError, match=r'load\({"model": ..., "optim": ...}\)')
    with CheckpointManager(tmp_path) as checkpoints, refusal:
        checkpoints.load({"mine": {"x": torch.zeros(2)}}, name="step-7", rename={item: "mine"})


def test_stock_states_beside_the_model_are_loaded_too(foreign):
    model, optimizer, scheduler = trained(3)
    counter, strays = StepCounter(), Counters(epoch=5)
    state = TrainState(
        model=model, optimizer=optimizer, train_state=counter, lr_scheduler=scheduler, mine=strays
    )
    with CheckpointManager(foreign) as checkpoints:
        checkpoints.load(state, name="step-7")
    expected, _, _ = trained()
    assert torch.equal(model[0].weight, expected[0].weight)
    assert (counter.step, scheduler.last_epoch, strays.epoch) == (7, 3, 5)


def test_another_layout_is_refused_with_the_way_to_load_it(foreign):
    model, optimizer, _ = trained(3)
    before = model[0].weight.clone()
    with CheckpointManager(foreign) as checkpoints:
        with pytest.raises(
            IncompatibleCheckpointError, match=r"at its top level.*load\(\{\*\*model\.state_dict"
        ):
            checkpoints.load(TrainState(model=model, optimizer=optimizer), name="flat")
        assert torch.equal(model[0].weight, before)
        checkpoints.load(dict(model.state_dict()), name="flat")
    expected, _, _ = trained()
    assert torch.equal(model[0].weight, expected[0].weight)


def test_optimizer_state_by_numbers_is_loaded_in_the_order_of_the_live_optimizer(foreign):
    model, optimizer, _ = trained(3)
    with CheckpointManager(foreign) as checkpoints:
        checkpoints.load(TrainState(model=model, optimizer=optimizer), name="numbered")
    expected, expected_optimizer, scheduler = trained()
    for _ in range(3):
        scheduler.step()
    for live, other in ((model, optimizer), (expected, expected_optimizer)):
        step_once(live, other)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizer.state[one]["exp_avg_sq"], expected_optimizer.state[other]["exp_avg_sq"])


def test_optimizer_state_by_numbers_needs_the_same_groups(foreign):
    model, _, _ = trained(3)
    groups = [{"params": [each]} for each in model.parameters()]
    optimizer, before = torch.optim.AdamW(groups), model[0].weight.clone()
    refusal = pytest.raises(IncompatibleCheckpointError, match=r"groups of \[4\].*\[1, 1, 1, 1\]")
    with CheckpointManager(foreign) as checkpoints, refusal:
        checkpoints.load(TrainState(model=model, optimizer=optimizer), name="numbered")
    assert torch.equal(model[0].weight, before)
    assert not optimizer.state


def test_a_load_that_is_not_strict_and_changes_nothing_says_so(foreign, caplog):
    model = nn.Embedding(2, 3)
    with told(caplog) as texts, CheckpointManager(foreign) as checkpoints:
        saved = checkpoints.load(TrainState(model=model, rng=False), name="step-7", strict=False)
    assert saved.left[0].startswith("nothing was loaded")
    assert "nothing was loaded" in texts[0]


# --- arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.load({}, name="../other"), "name must be the name of a directory in the root"),
        (lambda c: c.load({}, name="/etc"), "name must be the name of a directory"),
        (lambda c: c.load({}, name=""), "name must be a non-empty string"),
        (lambda c: c.load({}, name=5), "name must be a non-empty string"),
        (lambda c: c.load({}, step="5"), "step must be a whole number"),
        (lambda c: c.load({}, step=1.5), "step must be a whole number"),
        (lambda c: c.load({}, step=True), "step must be a whole number"),
        (lambda c: c.load("model.pt"), "is no training state"),
        (lambda c: c.load({}, items="model"), "items must be"),
        (lambda c: c.resume(None), "is no training state"),
        (lambda c: c.save(10**18, {}), "step must be at most"),
        (lambda c: c.save(2**64, {}), "step must be at most"),
        (lambda c: c.save(4, {}, metrics=[1]), "metrics must be a mapping"),
        (lambda c: c.save(4, {}, annotations="x"), "annotations must be a mapping"),
        (lambda c: c.save(4, {}, metrics={"loss": 10**400}), "metrics of step 4 must be numbers"),
        (lambda c: c.save(4, {}, metrics={"loss": "4"}), "metrics of step 4 must be numbers"),
        (lambda c: c.save(4, {}, metrics={"loss": b"4"}), "metrics of step 4 must be numbers"),
        (lambda c: c.save(4, {}, metrics={"loss": True}), "metrics of step 4 must be numbers"),
        (lambda c: c.save(4, 3), "is no training state"),
        (lambda c: c.save(4, {}, name=7), "name must be a non-empty string"),
        (lambda c: c.maybe_save("4", {}), "step must be a whole number"),
        (lambda c: c.pin(1, ""), "reason must be a non-empty string"),
        (lambda c: c.pin(1.0, "x"), "step must be a whole number"),
        (lambda c: c.verify("1"), "step must be a whole number"),
        (lambda c: c.mark("1", "diverged"), "mark: step must be a whole number"),
        (lambda c: c.mark(None, "diverged"), "mark: step must be a whole number"),
        (lambda c: c.mark(1, ""), "reason must be a non-empty string"),
        (lambda c: c.mark(1, 5), "reason must be a non-empty string"),
        (lambda c: c.unmark("1"), "unmark: step must be a whole number"),
        (lambda c: c.continue_from("1"), "continue_from: step must be a whole number"),
        (lambda c: c.continue_from(name="../other"), "name must be the name of a directory"),
    ],
)
def test_a_wrong_argument_is_a_config_error(run, call, says):
    with CheckpointManager(run, save=EverySteps(1)) as checkpoints, pytest.raises(ConfigError, match=says):
        call(checkpoints)


def test_a_name_of_another_step_is_told_as_such(run):
    with CheckpointManager(run) as checkpoints, pytest.raises(CheckpointNotFoundError) as caught:
        checkpoints.load({}, step=99, name="step-000000001")
    assert "no committed checkpoint 'step-000000001' of step 99" in str(caught.value)
    assert "no checkpoint;" not in str(caught.value)


@pytest.mark.parametrize("step", [np.int64(5), np.uint8(5), torch.tensor(5)])
def test_whole_numbers_of_other_libraries_are_steps(tmp_path, step):
    values = {"x": torch.ones(2)}
    with CheckpointManager(tmp_path / "run", save=EverySteps(5)) as checkpoints:
        checkpoints.maybe_save(step, values).result(60)
        checkpoints.pin(step, "kept")
        assert checkpoints.load(values, step=step).step == 5
        assert checkpoints.verify(step) == []
        assert type(checkpoints.latest().step) is int


@pytest.mark.parametrize(
    ("root", "says"),
    [
        (b"runs/x", "must be a str, a path or a Storage"),
        (None, "must be a str, a path or a Storage"),
        (5, "must be a str, a path or a Storage"),
        ("$HOME/runs", "expandvars"),
        ("runs/${USER}/x", "expandvars"),
        ("C:\\runs\\x", "no Windows system"),
        ("\\\\server\\runs", "no Windows system"),
        ("~nobody-of-that-name/x", "give the whole path"),
        ("a\0b", "null character"),
        ("s3://", "names no bucket"),
        ("gs:///run", "names no bucket"),
    ],
)
def test_a_root_that_cannot_be_meant_is_refused(root, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        open_storage(root)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_an_odd_name_that_is_there_may_be_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$HOME").mkdir()
    with CheckpointManager("$HOME") as checkpoints:
        checkpoints.save(1, {"x": torch.ones(1)})
    assert (tmp_path / "$HOME" / "step-000000001").is_dir()


@pytest.mark.parametrize("below", ["", "run"])
def test_a_link_that_leads_nowhere_is_told_as_one(tmp_path, below):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    refusal = pytest.raises(ConfigError, match=rf"symbolic link to {tmp_path / 'gone'}, which does not exist")
    with CheckpointManager(link / below) as checkpoints, refusal:
        checkpoints.resume({"x": torch.ones(1)})


# --- modes of torch -----------------------------------------------------------------------------------------


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


MODES = {
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device meta": lambda: default_device("meta"),
    "device context meta": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "deterministic": deterministic,
}


@pytest.mark.slow
@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
@pytest.mark.parametrize("mode", MODES)
def test_a_save_and_a_resume_are_the_same_inside_any_mode_of_torch(tmp_path, mode, staging):
    model, optimizer, scheduler = trained()
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
    with CheckpointManager(tmp_path, staging=staging) as checkpoints:
        with MODES[mode]():
            checkpoints.prewarm(state)
            checkpoints.save(1, state).result(60)
        step_once(model, optimizer)
        checkpoints.save(2, state).result(60)  # outside again: the memory must not be of that mode
    other, its_optimizer, its_scheduler = trained(3)
    its_optimizer.state.clear()
    with CheckpointManager(tmp_path) as checkpoints, MODES[mode]():
        assert (
            checkpoints.resume(TrainState(model=other, optimizer=its_optimizer, scheduler=its_scheduler)) == 2
        )
    for each in ((model, optimizer), (other, its_optimizer)):
        step_once(*each)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    for one, another in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], another[key]) for key in one)


def test_a_model_made_in_inference_mode_can_be_loaded_in_it_and_outside(tmp_path):
    model, _, _ = trained()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, TrainState(model=model, rng=False)).result(60)
        with torch.inference_mode():
            frozen, odd = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.empty(4, 3).t()
            checkpoints.load({"model": frozen})
        assert torch.equal(frozen[0].weight, model[0].weight)
        with torch.inference_mode():
            nn.init.zeros_(frozen[0].weight)
        checkpoints.load(TrainState(model=frozen), items=["model"])
        checkpoints.load({"model": {"0.weight": odd}}, include=["model.0.weight"])
    for found in (frozen[0].weight, odd):
        assert torch.equal(found, model[0].weight)


@pytest.mark.parametrize("wrap", ["train state", "mapping of tensors", "mapping of modules"])
def test_a_model_on_the_meta_device_is_refused_before_anything(tmp_path, wrap):
    model, _, _ = trained()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": dict(model.state_dict())}).result(60)
        with torch.device("meta"):
            unmade = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        state = {
            "train state": TrainState(model=unmade),
            "mapping of tensors": {"model": dict(unmade.state_dict())},
            "mapping of modules": {"model": unmade},
        }[wrap]
        with pytest.raises(ConfigError, match=r"4 tensor\(s\).*meta device.*model\.0\.weight.*to_empty"):
            checkpoints.load(state)
        made = unmade.to_empty(device="cpu")
        checkpoints.load({"model": made})
    assert torch.equal(made[0].weight, model[0].weight)
