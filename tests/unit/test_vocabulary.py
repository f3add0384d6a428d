"""Words of other libraries: each door says what is meant here."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest

import ckpt_core
from ckpt_core import CheckpointManager, CheckpointOptions, ConfigError
from ckpt_core.cli import main
from ckpt_core.cli._commands import parser
from ckpt_core.vocabulary import COMMANDS, NAMES, OPTIONS


@pytest.mark.parametrize("name", ["KeepLast", "EveryNSteps", "KeepTopK", "Checkpointer", "EveryNEpochs"])
def test_a_class_of_another_library_is_told_by_its_name_here(name):
    assert NAMES[name] in ckpt_core.__all__
    with pytest.raises(ImportError, match=f"here it is {NAMES[name]}"):
        getattr(ckpt_core, name)


@pytest.mark.parametrize("name", ["restore", "all_steps", "best", "latest_step", "wait_until_finished"])
def test_a_method_of_another_library_is_told_by_its_name_here(name, tmp_path):
    with CheckpointManager(tmp_path) as manager, pytest.raises(AttributeError, match="here it is"):
        getattr(manager, name)
    assert not hasattr(ckpt_core, name)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("max_to_keep", 3, "keep=KeepLatest(3)"),
        ("every_steps", 10, "save=EverySteps(10)"),
        ("save_interval_steps", 5, "save=EverySteps(5)"),
        ("monitor", "val_loss", "keep=KeepBest('val_loss')"),
        ("total_limit", 2, "keep=KeepLatest(2)"),
        ("arena", 2, "did you mean 'arenas'?"),
    ],
)
def test_an_option_of_another_library_is_answered_with_what_to_write(option, value, told, tmp_path):
    for door in (lambda: CheckpointManager(tmp_path, **{option: value}),
                 lambda: CheckpointOptions.from_mapping({option: value})):  # fmt: skip
        with pytest.raises(ConfigError, match=re.escape(told)):
            door()


def test_no_word_of_others_is_one_of_ours_and_each_command_named_exists():
    commands = next(each for each in parser()._actions if each.choices).choices
    assert not COMMANDS.keys() & commands.keys()
    assert not OPTIONS.keys() & {each.name for each in fields(CheckpointOptions)}
    assert not NAMES.keys() & {*ckpt_core.__all__, *dir(CheckpointManager)}
    named = {word for hint in COMMANDS.values() for word in re.findall(r"`ckpt (\w+)", hint)}
    assert named <= commands.keys()


@pytest.mark.parametrize("command", ["list", "status", "rm", "convert", "restore", "protect", "history"])
def test_a_command_that_users_guess_is_answered_with_the_one_to_use(command, capsys):
    assert main([command, "runs/a"]) == 2
    assert COMMANDS[command] in capsys.readouterr().err


def test_the_signature_of_a_manager_shows_every_option_with_its_default():
    shown = inspect.signature(CheckpointManager).parameters
    for each in fields(CheckpointOptions):
        assert shown[each.name].default == inspect.signature(CheckpointOptions).parameters[each.name].default
