"""Words of other checkpointing libraries and tools, and what they are called here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

_SAVE: Final = "CheckpointManager(root).save(step, state)"
_LOAD: Final = "resume(state) of a CheckpointManager for the newest, load(state, step=N) for a certain one"


def _by_word(table: Mapping[str, str]) -> Mapping[str, str]:
    return {word: here for here, words in table.items() for word in words.split()}


NAMES: Final = _by_word(
    {
        "CheckpointManager": "Checkpointer AsyncCheckpointer CheckpointSaver Checkpoint Snapshot "
        "StandardCheckpointer PyTreeCheckpointer DistributedCheckpoint",
        "CheckpointOptions": "CheckpointManagerOptions",
        "lightning_ckpt.ShardedCheckpoint": "ModelCheckpoint CheckpointCallback",
        "TrainState": "TrainerState",
        "KeepLatest": "KeepLast KeepLastN KeepNewest MaxToKeep LatestN",
        "KeepBest": "KeepTopK TopK KeepBestN BestN",
        "EverySteps": "EveryNSteps EveryNTrainSteps SaveInterval FixedIntervalPolicy",
        "EveryEpochs": "EveryNEpochs",
        "EverySeconds": "EveryNSeconds EveryMinutes EveryNMinutes",
        _SAVE: "save_checkpoint save_state async_save save_async",
        _LOAD: "restore load_checkpoint load_state restore_latest load_latest",
        "checkpoints() of a CheckpointManager": "all_steps list_checkpoints list ls",
        "latest() of a CheckpointManager": "latest_step last_checkpoint latest_checkpoint",
        "min(manager.checkpoints(), key=lambda each: each.metrics[name]); keep=KeepBest(name) keeps it": (
            "best best_step best_checkpoint best_model_path"
        ),
        "wait()": "wait_until_finished wait_until_complete finalize join flush",
        "due(step), and the property preempted": "should_save reached_preemption",
        "prune(), or discard(name)": "delete remove cleanup",
    }
)
"""Class, function or method of another library -> what it is here."""

OPTIONS: Final = _by_word(
    {
        "keep=KeepLatest({})": "max_to_keep preserve_latest keep_last keep_last_n keep_last_k keep_latest "
        "total_limit save_total_limit num_to_keep max_checkpoints keep_latest_k preservation_policy",
        "save=EverySteps({})": "every_steps every_n_steps every_n_train_steps save_steps "
        "save_interval_steps save_interval save_every checkpoint_interval interval save_decision_policy",
        "save=EveryEpochs({})": "every_epochs every_n_epochs",
        "save=EverySeconds({})": "every_seconds save_interval_secs train_time_interval",
        "keep=KeepEvery({})": "keep_period keep_every",
        "keep=KeepBest({})": "monitor keep_best best_metric metric_for_best_model",
        'keep=KeepBest("val_loss", n={})': "save_top_k top_k",
        'export=Export(to="hf", place="hf://USER/REPO")': "push_to_hub hub_model_id hub_strategy",
        'keep=KeepBest("val_loss", mode={})': "best_mode mode",
        "nothing: saves are asynchronous, and wait() waits for them": (
            "async_save async_mode blocking enable_async_checkpointing"
        ),
        'keep=KeepBest("val_loss"), and save(step, state, metrics=...)': "best_fn",
        "nothing: the newest checkpoint is never pruned, and resume() takes it": "save_last",
        'export=Export(to="hf", place=...): weights beside checkpoints that can be resumed': (
            "save_weights_only last_save_model_only save_safetensors"
        ),
        "init_from={}": "initial_load_path restore_from pretrained",
        "load(state, items=[...])": "exclude_from_loading",
        "nothing: checkpoints are called step-000000500": "filename step_prefix step_format",
        "root, the first argument": (
            "directory dir dirpath output_dir project_dir checkpoint_dir save_dir folder"
        ),
    }
)
"""Option of another library -> what to write here, with the value that was given."""

COMMANDS: Final = _by_word(
    {
        "use `ckpt ls ROOT`": "list status log",
        "use `ckpt show CHECKPOINT`": "info inspect describe cat",
        "use `ckpt prune ROOT`, with the rule of what stays": "rm delete remove gc clean",
        f"a script does, by {_LOAD}": "restore resume load",
        "use `ckpt report ROOT`": "history stats",
        "use `ckpt pin ROOT@STEP --reason TEXT`": "keep protect tag",
        "use `ckpt verify CHECKPOINT`": "check validate fsck",
        "use `ckpt cp SRC DST`": "copy mv sync download pull",
        "use `ckpt upload ROOT --to URL`": "push",
        "use `ckpt diff CHECKPOINT CHECKPOINT`": "compare",
        "use `ckpt export CHECKPOINT OUT --to hf`": "convert merge",
    }
)
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
