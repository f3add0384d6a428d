"""Nothing in a checkpoint runs code unless `allow_pickle=True`, whoever reads it."""

from __future__ import annotations

import inspect
import io
import pickle
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers.trainer
from accelerate import Accelerator, checkpointing
from lightning.fabric import Fabric
from transformers import TrainerCallback

import accelerate_ckpt
import lightning_ckpt
from accelerate_ckpt._state import model_part
from ckpt_core import (
    CheckpointError,
    CheckpointManager,
    ConfigError,
    CorruptCheckpointError,
    TrainState,
    UnsafeCheckpointError,
)
from ckpt_core.errors import ALLOW_PICKLE
from tests.adapters.accelerate_jobs import Job, accelerator, prepare, prepared, step
from tests.adapters.canaries import (
    files_of,
    forgeries,
    pickled,
    planted,
    saved,
    watched_readers,
)
from tests.adapters.trainer_jobs import TrainerJob, trainer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

JOB = Job(strategy="single", world=1)
STRANGERS = (
    "custom_checkpoint_1.pkl", "scheduler_1.bin", "random_states_1.pkl", "sampler.bin", "dl_state_dict.bin",
    "scaler_1.pt", "pytorch_model.bin", "optimizer_1.bin", "rng_state_0.pth", "adapter_model.bin",
    "pytorch_model_fsdp_1/.metadata", "optimizer_1/.metadata", ".metadata", "meta.pt",
    "pytorch_model_fsdp.bin",
)  # fmt: skip
"""Files that hosts look for and a checkpoint of these jobs does not have."""


class Holder:
    """An object with whatever state a test gives it."""

    def __init__(self, value: Any = 1) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "a canary has run"


def settled(load: Callable[[], Any]) -> str:
    """How a load ended: what cannot be loaded is refused, and nothing else is raised."""
    try:
        load()
    except CheckpointError as error:
        return type(error).__name__
    except Resumed:
        pass
    return "loaded"


def refusing(load: Callable[[], Any]) -> Callable[[], Any]:
    """The same load; what stock itself refuses of its own files it refuses in its own words."""

    def loaded() -> None:
        try:
            load()
        except (CheckpointError, Resumed):
            raise
        except Exception as error:
            raise CorruptCheckpointError(str(error)) from error

    return loaded


def walk(folder: Path, trace: Path, turns: list[dict[str, Callable[[], Any]]]) -> dict[str, set[str]]:
    """Put canaries into every file, and load, by the entries of each turn; returns how loads ended."""
    ends: dict[str, set[str]] = {}
    with watched_readers() as readers:
        for path in files_of(folder):
            for (content, sealed), entries in zip(forgeries(folder, path, trace), cycle(turns)):
                with planted(folder, path, content, sealed=sealed):
                    for entry, load in entries.items():
                        ends.setdefault(path, set()).add(settled(load))
                        assert not trace.exists(), f"{entry} ran {path} (sealed: {sealed})"
        assert readers.unsafe == []
        assert readers.calls
    return ends


def plant_strangers(folder: Path, trace: Path) -> None:
    for name in STRANGERS:
        path = folder / name
        assert not path.exists()
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickled(trace) if name.endswith(".metadata") else saved(trace))


def of_accelerate(root: Path, **options: Any) -> tuple[Any, ...]:
    """A prepared accelerator with everything that there are files for; enabled, unless `stock=True`."""
    job = JOB.but(root=str(root), automatic=True, stock_files=True)
    if options.pop("stock", False):
        made = accelerator(job)
        rest = prepare(job, made)
    else:
        made, *rest = prepared(job, **options)
    made.scaler = torch.amp.GradScaler("cpu")
    made.register_for_checkpointing(holder := Holder())
    made.register_save_state_pre_hook(
        lambda _models, _states, output_dir: (Path(output_dir) / "of_hook.txt").write_text("saved")
    )
    made.register_load_state_pre_hook(lambda _models, input_dir: sorted(Path(input_dir).iterdir()))
    return made, holder, *rest


def test_the_canaries_are_alive(trace: Path) -> None:
    for run in (
        lambda: pickle.loads(pickled(trace)),
        lambda: torch.load(io.BytesIO(saved(trace)), weights_only=False),
    ):
        run()
        trace.rmdir()


@pytest.mark.slow
def test_accelerate_runs_nothing_of_a_checkpoint_of_ours(tmp_path: Path, trace: Path) -> None:
    made, _, net, optimizer, *_ = of_accelerate(tmp_path)
    step(made, net, optimizer)
    made.save_state()
    accelerate_ckpt.checkpoints(made).wait()
    folder = next(tmp_path.glob("**/checkpoint_0"))
    by_path = {"load_state(path)": lambda: made.load_state(str(folder))}
    ends = walk(folder, trace, [{"load_state()": made.load_state, **by_path}])
    for path in ("custom_checkpoint_0.pkl", "scheduler.bin", "scaler.pt"):
        assert ends[path] == {"CorruptCheckpointError", "UnsafeCheckpointError"}, path
    assert len(ends) > 10
    plant_strangers(folder, trace)
    with watched_readers() as readers:
        made.load_state(str(folder))
        made.load_state()
    assert readers.unsafe == []
    assert not trace.exists()
    made.end_training()


def saved_by_stock(tmp_path: Path) -> tuple[Accelerator, Path]:
    """An accelerator of stock's, and the checkpoint that it has saved."""
    made, _, net, optimizer, *_ = of_accelerate(tmp_path, stock=True)
    step(made, net, optimizer)
    made.save_state()
    return made, next(tmp_path.glob("**/checkpoint_0"))


def test_accelerate_runs_nothing_of_a_checkpoint_of_stock(tmp_path: Path, trace: Path) -> None:
    made, folder = saved_by_stock(tmp_path)
    made.load_state(str(folder))
    accelerate_ckpt.enable(made, folder.parent)
    ends = walk(folder, trace, [{"load_state(path)": refusing(lambda: made.load_state(str(folder)))}])
    assert ends["custom_checkpoint_0.pkl"] == {"CorruptCheckpointError", "UnsafeCheckpointError"}
    assert ends["of_hook.txt"] == {"loaded"}
    with planted(folder, "custom_checkpoint_0.pkl", saved(trace), sealed=False):
        assert settled(made.load_state) == "UnsafeCheckpointError"
    (folder / model_part(0)).mkdir()
    (folder / model_part(0) / ".metadata").write_bytes(pickled(trace))
    assert settled(lambda: made.load_state(str(folder))) == "UnsafeCheckpointError"
    assert not trace.exists()
    made.end_training()


def test_stock_accelerate_would_have_run_it(tmp_path: Path, trace: Path) -> None:
    made, folder = saved_by_stock(tmp_path)
    with planted(folder, "custom_checkpoint_0.pkl", saved(trace), sealed=False), watched_readers() as readers:
        made.load_state(str(folder))
    assert trace.exists()
    assert any("load_custom_state" in each for each in readers.unsafe)


def test_what_needs_pickle_is_told_at_the_save_and_refused_by_name_unless_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, holder, net, optimizer, *_ = of_accelerate(tmp_path)
    for value in (deque([1]), deque([2])):
        holder.value = value
        step(made, net, optimizer)
        made.save_state()
    accelerate_ckpt.checkpoints(made).wait()
    told = [each.message for each in caplog.records if "only by pickle" in each.message]
    assert len(told) == 1, "once, however many saves there are"
    assert "registered object 0, a Holder" in told[0]
    assert "scheduler" not in told[0]
    folder = next(tmp_path.glob("**/checkpoint_0"))
    holder.value = "as it was"
    with pytest.raises(UnsafeCheckpointError, match=r"custom_checkpoint_0\.pkl.*Holder.*allow_pickle=True"):
        made.load_state(str(folder))
    with pytest.raises(UnsafeCheckpointError, match="allow_pickle=True"):
        made.load_state(str(folder), load_kwargs={"weights_only": False})
    assert holder.value == "as it was"
    accelerate_ckpt.disable(made)
    accelerate_ckpt.enable(made, folder.parent, allow_pickle=True)
    made.load_state(str(folder))
    assert holder.value == deque([1])
    caplog.clear()
    step(made, net, optimizer)
    made.save_state()
    assert "only by pickle" not in caplog.text
    made.end_training()


def test_hooks_see_what_was_committed_and_nothing_else(tmp_path: Path, trace: Path) -> None:
    made, _, net, optimizer, *_ = of_accelerate(tmp_path)
    seen: list[tuple[str, list[str], str]] = []
    made.register_load_state_pre_hook(
        lambda _models, folder: seen.append(
            (Path(folder).name, files_of(Path(folder)), (Path(folder) / "of_hook.txt").read_text())
        )
    )
    step(made, net, optimizer)
    made.save_state()
    accelerate_ckpt.checkpoints(made).wait()
    folder = next(tmp_path.glob("**/checkpoint_0"))
    plant_strangers(folder, trace)
    made.load_state()
    name, files, content = seen[0]
    assert (name, content) == ("checkpoint_0", "saved")
    assert not set(files) & set(STRANGERS)
    assert {"of_hook.txt", "scheduler.bin"} <= set(files)
    made.end_training()


class Resumed(Exception):  # noqa: N818 - it says that nothing went wrong
    """A Trainer has read everything, and is about to train."""


class Stop(TrainerCallback):  # type: ignore[misc,unused-ignore]
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        raise Resumed


def of_trainer(root: Path, **changes: Any) -> Any:
    """A Trainer that has saved one checkpoint, and does nothing but resume from now on."""
    made = trainer(TrainerJob(root=str(root), steps=1, save_steps=1).but(**changes))
    made.train()
    made.args.max_steps = 2  # one is still to come
    made.add_callback(Stop())
    return made


@pytest.mark.slow
def test_the_trainer_runs_nothing_of_a_checkpoint_of_ours(tmp_path: Path, trace: Path) -> None:
    made = of_trainer(tmp_path)
    folder = tmp_path / "checkpoint-1"

    def best() -> None:
        with accelerate_ckpt.trainer_checkpoints(made)._session.training():
            made.state.best_model_checkpoint = str(folder)
            made._load_best_model()

    ends = walk(
        folder,
        trace,
        [
            {"True": lambda: made.train(resume_from_checkpoint=True), "best": best},
            {"path": lambda: made.train(resume_from_checkpoint=str(folder)), "best": best},
        ],
    )
    for path in ("rng_state.pth", "scheduler.pt"):  # the best model needs neither
        assert ends[path] == {"CorruptCheckpointError", "UnsafeCheckpointError", "loaded"}
    assert len(ends) > 10
    plant_strangers(folder, trace)
    (folder / "scaler.pt").write_bytes(saved(trace))
    with watched_readers() as readers:
        for resume in (str(folder), True):
            with pytest.raises(Resumed):
                made.train(resume_from_checkpoint=resume)
        best()
    assert readers.unsafe == []
    assert not trace.exists()
    accelerate_ckpt.disable_trainer(made)


@pytest.mark.slow
def test_the_trainer_runs_nothing_of_a_checkpoint_of_stock(tmp_path: Path, trace: Path) -> None:
    made = of_trainer(tmp_path, enabled=False)
    folder = tmp_path / "checkpoint-1"
    accelerate_ckpt.enable_trainer(made)

    def best() -> None:
        with accelerate_ckpt.trainer_checkpoints(made)._session.training():
            made.state.best_model_checkpoint = str(folder)
            made._load_best_model()

    entries: dict[str, Callable[[], Any]] = {
        "True": refusing(lambda: made.train(resume_from_checkpoint=True)),
        "path": refusing(lambda: made.train(resume_from_checkpoint=str(folder))),
        "best": refusing(best),
    }
    walk(folder, trace, [{each: entries[each]} for each in entries])
    # What FSDP with sharded state dicts writes: stock DCP would unpickle its index.
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        dcp.save({"model": {"weight": torch.zeros(2)}}, checkpoint_id=folder / part, no_dist=True)
        (folder / part / ".metadata").write_bytes(pickled(trace))
        with watched_readers():
            assert {settled(load) for load in entries.values()} == {"UnsafeCheckpointError"}
        assert not trace.exists()
        (folder / part / ".metadata").unlink()
    accelerate_ckpt.disable_trainer(made)


def test_a_stock_checkpoint_is_left_to_stock_when_pickle_is_allowed(tmp_path: Path, trace: Path) -> None:
    made = of_trainer(tmp_path, enabled=False)
    part = tmp_path / "checkpoint-1" / "optimizer_0"
    dcp.save({"model": {"weight": torch.zeros(2)}}, checkpoint_id=part, no_dist=True)
    (part / ".metadata").write_bytes(pickled(trace))
    accelerate_ckpt.enable_trainer(made, allow_pickle=True)
    with pytest.raises(Resumed):
        made.train(resume_from_checkpoint=str(part.parent))
    assert dcp.FileSystemReader.read_metadata.__module__.startswith("torch.")
    accelerate_ckpt.disable_trainer(made)


def test_peft_runs_nothing_of_what_lies_in_a_checkpoint(tmp_path: Path, trace: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    job = TrainerJob(root=str(tmp_path), steps=1, save_steps=1)
    made = trainer(job, adapt=lambda model: peft.get_peft_model(model, config))
    made.train()
    folder = tmp_path / "checkpoint-1"
    base = made.model.unload()
    entry = {"from_pretrained": refusing(lambda: peft.PeftModel.from_pretrained(base, str(folder)))}
    with watched_readers() as readers:
        for path in ("adapter_model.safetensors", "training_args.bin"):
            with planted(folder, path, saved(trace), sealed=True):
                settled(entry["from_pretrained"])
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
        with planted(folder, "adapter_model.bin", saved(trace), sealed=False):
            assert settled(entry["from_pretrained"]) == "CorruptCheckpointError"
    assert readers.unsafe == []
    assert not trace.exists()
    accelerate_ckpt.disable_trainer(made)


def test_every_door_that_advice_on_pickle_names_takes_it(tmp_path: Path) -> None:
    made = trainer(TrainerJob(root=str(tmp_path / "trainer"), steps=1))
    accelerate_ckpt.disable_trainer(made)
    doors: dict[str, Callable[..., Any]] = {
        "CheckpointManager": partial(CheckpointManager, tmp_path),
        "ShardedCheckpoint": partial(lightning_ckpt.ShardedCheckpoint, tmp_path),
        "ShardedCheckpointIO": partial(lightning_ckpt.ShardedCheckpointIO, tmp_path),
        "setup_fabric": partial(lightning_ckpt.setup_fabric, Fabric(accelerator="cpu"), tmp_path),
        "enable": partial(accelerate_ckpt.enable, made.accelerator),
        "enable_trainer": partial(accelerate_ckpt.enable_trainer, made),
    }
    assert set(re.findall(r"Checkpoint\w+|Sharded\w+|setup_\w+|enable\w*", ALLOW_PICKLE)) == doors.keys()
    for door in doors.values():
        with pytest.raises(ConfigError, match="allow_pickle"):
            door(allow_pickle="perhaps")


def test_a_scheduler_that_needs_pickle_is_told_refused_by_name_and_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(TrainerJob(root=str(tmp_path), steps=1, save_steps=1))
    stock, value = made.create_scheduler, deque([1])

    def create_scheduler(*args: Any, **kwargs: Any) -> Any:
        made.lr_scheduler = stock(*args, **kwargs)
        made.lr_scheduler.odd = value
        return made.lr_scheduler

    made.create_scheduler = create_scheduler
    made.train()
    assert "scheduler.pt (the scheduler, a LambdaLR) can be read again only by pickle" in caplog.text
    assert ALLOW_PICKLE in caplog.text
    made.args.max_steps = 2  # one is still to come
    made.add_callback(Stop())
    folder = str(tmp_path / "checkpoint-1")
    before = [value.clone() for value in made.model.state_dict().values()]
    with pytest.raises(UnsafeCheckpointError, match=r"checkpoint-1/scheduler\.pt.*allow_pickle=True"):
        made.train(resume_from_checkpoint=folder)
    assert all(map(torch.equal, before, made.model.state_dict().values()))
    accelerate_ckpt.disable_trainer(made)
    accelerate_ckpt.enable_trainer(made, allow_pickle=True)
    value = None
    with pytest.raises(Resumed):
        made.train(resume_from_checkpoint=folder)
    assert made.lr_scheduler.odd == deque([1])
    accelerate_ckpt.disable_trainer(made)


def test_no_token_is_written_into_a_checkpoint(tmp_path: Path) -> None:
    token = "hf_" + "s3cret" * 4
    made = of_trainer(tmp_path, arguments={"hub_token": token})
    assert made.args.hub_token == token, "the job goes on with it"
    folder = tmp_path / "checkpoint-1"
    written = [path for path in files_of(folder) if token.encode() in (folder / path).read_bytes()]
    assert written == []
    arguments = torch.load(folder / "training_args.bin", weights_only=False)
    assert (arguments.hub_token, arguments.max_steps) == (None, 1)
    with pytest.raises(Resumed):
        made.train(resume_from_checkpoint=str(folder))
    assert made.args.hub_token == token
    accelerate_ckpt.disable_trainer(made)


def test_a_resume_renames_nothing_even_beside_a_job_that_has_the_root(tmp_path: Path) -> None:
    made = of_trainer(tmp_path)
    accelerate_ckpt.disable_trainer(made)
    others = {
        "checkpoint-7/adapter_model.safetensors": b"an export",
        "checkpoint-8/checkpoint-is-incomplete.txt": b"of the stock Trainer",
        "checkpoint-9/notes.txt": b"of a person",
    }
    for path, content in others.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(content)
    before = sorted(path.name for path in tmp_path.iterdir())
    with CheckpointManager(tmp_path) as live:
        live.continue_from(name="checkpoint-1")
        (tmp_path / "checkpoint-1" / "scheduler.pt").write_bytes(b"damaged")
        live.save(20, TrainState(model=torch.nn.Linear(1, 1)), name="of-another-job").result()
        accelerate_ckpt.enable_trainer(made)
        with pytest.raises(CorruptCheckpointError):
            made.train(resume_from_checkpoint=True)
        assert {path: (tmp_path / path).read_bytes() for path in others} == others
        now = {path.name for path in tmp_path.iterdir() if path.name.startswith("checkpoint-")}
        assert now == {name for name in before if name.startswith("checkpoint-")}
    accelerate_ckpt.disable_trainer(made)


def test_hosts_have_no_reader_that_we_do_not_know() -> None:
    """What a new version of a host may add: another file that it unpickles."""
    custom = inspect.getsource(checkpointing.load_custom_state)
    for loads in (
        inspect.getsource(checkpointing).replace(custom, ""),
        inspect.getsource(Accelerator.load_state),
    ):
        assert not re.search(r"weights_only=(?!True)|pickle\.load|np\.load", loads)
    assert len(re.findall(r"[^_.]load\(", inspect.getsource(checkpointing.load_accelerator_state))) == 7
    trains = inspect.getsource(transformers.trainer)
    assert trains.count("torch.load(") == trains.count("weights_only=True") == 11
    assert not re.search(r"weights_only=(?!True)|pickle\.load|np\.load", trains)
