"""Words of other checkpointing libraries and tools, and what they are called here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_SAVE: Final = "CheckpointManager(root).save(step, state)"
_LOAD: Final = "resume(state) of a CheckpointManager for the newest, load(state, step=N) for a certain one"
_STEPS: Final = "save=EverySteps({})"
_LATEST: Final = "keep=KeepLatest({})"

NAMES: Final = {
    **dict.fromkeys(
        ("Checkpointer", "AsyncCheckpointer", "CheckpointSaver", "Checkpoint", "Snapshot"),
        "CheckpointManager",
    ),
    **dict.fromkeys(
        ("StandardCheckpointer", "PyTreeCheckpointer", "DistributedCheckpoint"), "CheckpointManager"
    ),
    "CheckpointManagerOptions": "CheckpointOptions",
    **dict.fromkeys(("ModelCheckpoint", "CheckpointCallback"), "lightning_ckpt.ShardedCheckpoint"),
    "TrainerState": "TrainState",
    **dict.fromkeys(("KeepLast", "KeepLastN", "KeepNewest", "MaxToKeep", "LatestN"), "KeepLatest"),
    **dict.fromkeys(("KeepTopK", "TopK", "KeepBestN", "BestN"), "KeepBest"),
    **dict.fromkeys(("EveryNSteps", "EveryNTrainSteps", "SaveInterval", "FixedIntervalPolicy"), "EverySteps"),
    **dict.fromkeys(("EveryNEpochs",), "EveryEpochs"),
    **dict.fromkeys(("EveryNSeconds", "EveryMinutes", "EveryNMinutes"), "EverySeconds"),
    **dict.fromkeys(("save_checkpoint", "save_state", "async_save", "save_async"), _SAVE),
    **dict.fromkeys(("restore", "load_checkpoint", "load_state", "restore_latest", "load_latest"), _LOAD),
    **dict.fromkeys(("all_steps", "list_checkpoints", "list", "ls"), "checkpoints() of a CheckpointManager"),
    **dict.fromkeys(
        ("latest_step", "last_checkpoint", "latest_checkpoint"), "latest() of a CheckpointManager"
    ),
    **dict.fromkeys(
        ("best", "best_step", "best_checkpoint", "best_model_path"),
        "min(manager.checkpoints(), key=lambda each: each.metrics[name]); keep=KeepBest(name) keeps it",
    ),
    **dict.fromkeys(("wait_until_finished", "wait_until_complete", "finalize", "join", "flush"), "wait()"),
    **dict.fromkeys(("should_save", "reached_preemption"), "due(step), and the property preempted"),
    **dict.fromkeys(("delete", "remove", "cleanup"), "prune(), or discard(name)"),
}
"""Class, function or method of another library -> what it is here."""

OPTIONS: Final = {
    **dict.fromkeys(
        ("max_to_keep", "preserve_latest", "keep_last", "keep_last_n", "keep_last_k", "keep_latest"), _LATEST
    ),
    **dict.fromkeys(
        ("total_limit", "save_total_limit", "num_to_keep", "max_checkpoints", "keep_latest_k"), _LATEST
    ),
    "preservation_policy": _LATEST,
    **dict.fromkeys(("every_steps", "every_n_steps", "every_n_train_steps", "save_steps"), _STEPS),
    **dict.fromkeys(("save_interval_steps", "save_interval", "save_every", "checkpoint_interval"), _STEPS),
    **dict.fromkeys(("interval", "save_decision_policy"), _STEPS),
    **dict.fromkeys(("every_epochs", "every_n_epochs"), "save=EveryEpochs({})"),
    **dict.fromkeys(("every_seconds", "save_interval_secs", "train_time_interval"), "save=EverySeconds({})"),
    **dict.fromkeys(("keep_period", "keep_every"), "keep=KeepEvery({})"),
    **dict.fromkeys(("monitor", "keep_best", "best_metric", "metric_for_best_model"), "keep=KeepBest({})"),
    **dict.fromkeys(("save_top_k", "top_k"), 'keep=KeepBest("val_loss", n={})'),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_strategy"), 'export=Export(to="hf", place="hf://USER/REPO")'
    ),
    **dict.fromkeys(("best_mode", "mode"), 'keep=KeepBest("val_loss", mode={})'),
    **dict.fromkeys(
        ("async_save", "async_mode", "blocking", "enable_async_checkpointing"),
        "nothing: saves are asynchronous, and wait() waits for them",
    ),
    "best_fn": 'keep=KeepBest("val_loss"), and save(step, state, metrics=...)',
    "save_last": "nothing: the newest checkpoint is never pruned, and resume() takes it",
    **dict.fromkeys(
        ("save_weights_only", "last_save_model_only", "save_safetensors"),
        'export=Export(to="hf", place=...): weights beside checkpoints that can be resumed',
    ),
    **dict.fromkeys(("initial_load_path", "restore_from", "pretrained"), "init_from={}"),
    "exclude_from_loading": "load(state, items=[...])",
    **dict.fromkeys(
        ("filename", "step_prefix", "step_format"), "nothing: checkpoints are called step-000000500"
    ),
    **dict.fromkeys(
        ("directory", "dir", "dirpath", "output_dir", "project_dir", "checkpoint_dir", "save_dir", "folder"),
        "root, the first argument",
    ),
}
"""Option of another library -> what to write here, with the value that was given."""

COMMANDS: Final = {
    **dict.fromkeys(("list", "status", "log"), "use `ckpt ls ROOT`"),
    **dict.fromkeys(("info", "inspect", "describe", "cat"), "use `ckpt show CHECKPOINT`"),
    **dict.fromkeys(
        ("rm", "delete", "remove", "gc", "clean"), "use `ckpt prune ROOT`, with the rule of what stays"
    ),
    **dict.fromkeys(("restore", "resume", "load"), f"a script does, by {_LOAD}"),
    **dict.fromkeys(("history", "stats"), "use `ckpt report ROOT`"),
    **dict.fromkeys(("keep", "protect", "tag"), "use `ckpt pin ROOT@STEP --reason TEXT`"),
    **dict.fromkeys(("check", "validate", "fsck"), "use `ckpt verify CHECKPOINT`"),
    **dict.fromkeys(("copy", "mv", "sync", "download", "pull"), "use `ckpt cp SRC DST`"),
    **dict.fromkeys(("push",), "use `ckpt upload ROOT --to URL`"),
    **dict.fromkeys(("compare",), "use `ckpt diff CHECKPOINT CHECKPOINT`"),
    **dict.fromkeys(("convert", "merge"), "use `ckpt export CHECKPOINT OUT --to hf`"),
}
"""Command that users guess -> the one to use."""


def instead_of(name: str, known: Iterable[str]) -> str:
    """Return advice on a name that is not there; "" if there is none."""
    if name in NAMES:
        return f"; here it is {NAMES[name]}"
    return similar(name, known)


def instead_of_option(option: str, known: Iterable[str], value: object = None) -> str:
    """Return advice on an unknown option, with the value given; "" if there is none."""
    if option in OPTIONS:
        shown = repr(value) if isinstance(value, int | float | str) and len(repr(value)) <= 40 else "..."
        return f" (write {OPTIONS[option].format(shown)})"
    return similar(option, known)


def similar(word: str, known: Iterable[str], _: object = None) -> str:
    """Return the known word that is most like another; "" if none is."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
