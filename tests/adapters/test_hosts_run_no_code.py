"""Nothing in a checkpoint runs code unless `allow_pickle=True`, whoever reads it."""

from __future__ import annotations

import gc
import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback

import accelerate_ckpt
from accelerate_ckpt._state import model_part
from ckpt_core import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from tests.adapters.accelerate_jobs import Job, accelerator, forget_accelerators, prepare, prepared, step
from tests.adapters.canaries import (
    files_of,
    forgeries,
    pickled,
    planted,
    saved,
    watched_readers,
)
from tests.adapters.trainer_jobs import TrainerJob, trainer

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


@pytest.fixture(autouse=True)
def _fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    forget_accelerators()
    yield
    forget_accelerators()


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


def walk(folder: Path, trace: Path, turns: list[dict[str, Callable[[], Any]]]) -> dict[str, set[str]]:
    """Put canaries into every file, and load, by the entries of each turn; returns how loads ended."""
    ends: dict[str, set[str]] = {}
    gc.freeze()  # transformers collects garbage at every turn
    with watched_readers() as readers:
        for path in files_of(folder):
            for (content, sealed), entries in zip(forgeries(folder, path, trace), cycle(turns)):
                with planted(folder, path, content, sealed=sealed):
                    for entry, load in entries.items():
                        ends.setdefault(path, set()).add(settled(load))
                        assert not trace.exists(), f"{entry} ran {path} (sealed: {sealed})"
        gc.unfreeze()
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


def test_accelerate_runs_nothing_of_a_checkpoint_of_stock(tmp_path: Path, trace: Path) -> None:
    made, _, net, optimizer, *_ = of_accelerate(tmp_path, stock=True)
    step(made, net, optimizer)
    made.save_state()
    folder = next(tmp_path.glob("**/checkpoint_0"))
    made.load_state(str(folder))
    accelerate_ckpt.enable(made, folder.parent)
    ends = walk(folder, trace, [{"load_state(path)": lambda: loads(made, str(folder))}])
    assert ends["custom_checkpoint_0.pkl"] == {"CorruptCheckpointError", "UnsafeCheckpointError"}
    assert ends["of_hook.txt"] == {"loaded"}
    with planted(folder, "custom_checkpoint_0.pkl", saved(trace), sealed=False):
        assert settled(made.load_state) == "UnsafeCheckpointError"
    (folder / model_part(0)).mkdir()
    (folder / model_part(0) / ".metadata").write_bytes(pickled(trace))
    assert settled(lambda: made.load_state(str(folder))) == "UnsafeCheckpointError"
    assert not trace.exists()
    made.end_training()


def loads(made: Accelerator, folder: str) -> None:
    """Load; what stock itself refuses of its own files it refuses in its own words."""
    try:
        made.load_state(folder)
    except CheckpointError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(str(error)) from error


def test_stock_accelerate_would_have_run_it(tmp_path: Path, trace: Path) -> None:
    made, _, net, optimizer, *_ = of_accelerate(tmp_path, stock=True)
    step(made, net, optimizer)
    made.save_state()
    folder = next(tmp_path.glob("**/checkpoint_0"))
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
    made.add_callback(Stop())
    return made


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
