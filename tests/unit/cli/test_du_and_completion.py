"""`du`, the list of runs below a directory, and completion by real shells."""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import shutil
import subprocess
import time

import pytest
import torch

from ckpt_core import CheckpointManager
from ckpt_core.cli import _commands, main
from ckpt_core.commit import Catalog, working_name
from ckpt_core.storage import open_storage


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "one"
    with CheckpointManager(root) as manager:
        for step in (100, 200):
            manager.save(step, {"model": {"w": torch.zeros(1000)}, "optimizer": {"m": torch.zeros(500)}})
    return root


@pytest.fixture
def ckpt_json(capsys):
    def run(*words):
        code = main([*map(str, words), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_du_adds_up_by_item_lineage_and_state(ckpt_json, run):
    _, found = ckpt_json("du", run)
    sizes = {each["item"]: each["size_bytes"] for each in found["items"]}
    total = sum(info.size_bytes for info in Catalog(open_storage(str(run))).committed())

    assert (sizes["model"], sizes["optimizer"]) == (2 * 4000, 2 * 2000)
    assert sum(sizes.values()) == found["size_bytes"] == total
    assert [(each["checkpoints"], each["size_bytes"]) for each in found["lineages"]] == [(2, total)]
    assert found["states"] == [{"state": "usable", "checkpoints": 2, "size_bytes": total}]


def test_du_counts_what_is_damaged_and_what_crashes_left(ckpt_json, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    Catalog(open_storage(str(copy))).mark_damaged("step-000000100", "a bit flipped")

    left = copy / working_name(open_storage(str(copy)), "step-000000300", "0123456789abcdef")
    (left / "deep").mkdir(parents=True)
    (left / "deep" / "file").write_bytes(bytes(77))
    _, found = ckpt_json("du", copy)
    assert {each["state"]: each["checkpoints"] for each in found["states"]} == {"usable": 1, "damaged": 1}
    assert found["left_over"] == [{"name": left.name, "size_bytes": 77}]


def test_a_directory_of_runs_lists_them(ckpt_json, run):
    _, found = ckpt_json("ls", run.parent)
    (child,) = found["children"]
    assert (child["name"], child["step"], child["checkpoints"]) == ("one", 200, 2)
    assert child["last_event"] == "end"


def completed(shell_words, current):
    words = " ".join(f"'{word}'" for word in shell_words)
    line = f"COMP_WORDS=({words}); COMP_CWORD={current}; _ckpt"
    return f'eval "$SCRIPT"; {line}; printf "%s\\n" "${{COMPREPLY[@]}}"'


def test_a_real_bash_completes_commands_options_paths_and_steps(capsys, run):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def ask(*words):
        program = completed(words, len(words) - 1)
        done = subprocess.run(
            ["bash", "-c", program], env={"SCRIPT": script, "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
        return done.stdout.split()

    assert ask("ckpt", "ver") == ["verify"]
    assert ask("ckpt", "prune", "--keep-l") == ["--keep-latest"]
    assert ask("ckpt", "show", str(run), "--step", "") == ["100", "200"]
    assert ask("ckpt", "ls", str(run.parent / "o")) == [str(run)]
    assert ask("ckpt", "completion", "f") == ["fish"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_a_real_fish_completes_commands_options_paths_and_steps(capsys, run):
    assert main(["completion", "fish"]) == 0
    script = capsys.readouterr().out
    lines = [
        "ckpt ver", "ckpt prune --keep-l", f"ckpt show {run} --step ",
        f"ckpt ls {run.parent}/o", "ckpt completion f", "ckpt --v",
    ]  # fmt: skip
    asked = "".join(f"complete -C '{line}'; echo ---\n" for line in lines)
    done = subprocess.run(
        ["fish", "--no-config", "-c", script + asked],
        capture_output=True, text=True, check=True, timeout=20,
    )  # fmt: skip
    found = [part.split() for part in done.stdout.split("---\n")][: len(lines)]

    assert done.stderr == ""
    assert found == [
        ["verify"], ["--keep-latest"], ["100", "200"], [f"{run}/"], ["fish"], ["--version"],
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_a_real_zsh_completes_commands_options_paths_and_steps(capsys, run, tmp_path):
    assert main(["completion", "zsh"]) == 0
    (tmp_path / "ckpt.zsh").write_text(capsys.readouterr().out)
    with Terminal(["zsh", "-f", "-i"]) as zsh:
        zsh.type(f"PS1=; cd {run.parent}; source {tmp_path}/ckpt.zsh; echo rea''dy\n")
        zsh.read_until("ready")
        for line, completed in (
            ("ckpt ver", "verify "),
            ("ckpt prune --keep-l", "--keep-latest "),
            ("ckpt ls on", "one"),
            ("ckpt show one --step ", "100  200"),
            ("ckpt completion f", "fish "),
        ):
            zsh.type(f"{line}\t")
            zsh.read_until(completed)
            zsh.type("\x15")  # take the line back


class Terminal:
    """A program on a terminal of its own, as a person sees it."""

    def __init__(self, command):
        self._fd, own = pty.openpty()
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TERM": "dumb"}
        self._process = subprocess.Popen(
            command, stdin=own, stdout=own, stderr=own, env=environment, start_new_session=True
        )
        os.close(own)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def type(self, text):
        os.write(self._fd, text.encode())

    def read_until(self, wanted, seconds=20.0):
        found, until = "", time.monotonic() + seconds
        while wanted not in found:
            left = until - time.monotonic()
            assert left > 0, f"not {wanted!r} in {found!r}"
            if select.select([self._fd], [], [], left)[0]:
                found += os.read(self._fd, 4096).decode()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_in_every_script(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    parser = _commands.parser()
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for name, command in commands.choices.items():
        options = {o for a in command._actions for o in a.option_strings if o.startswith("--")}
        assert name in script
        assert all(option.removeprefix("--") in script for option in options)


def test_every_help_names_the_exit_codes():
    parser = _commands.parser()
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    assert all("Exit codes: 0" in command.format_help() for command in commands.choices.values())
