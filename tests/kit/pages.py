"""`python -m tests.kit.pages`: imports every host once, then forks a process for each page that comes.

A line of JSON on standard input is a page with its blocks; one line on standard output is how it ended. Lines
of bash that only call `ckpt` or `python` are run by forks, too, of a process that has run nothing yet.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import runpy
import shlex
import sys
import types
from typing import Any, Never, TextIO

import torch.distributed.checkpoint.state_dict
from lightning.pytorch.demos import boring_classes
from peft import LoraConfig
from transformers import GPT2LMHeadModel, Trainer

import ckpt_core.cli
from accelerate_ckpt import enable, enable_trainer
from ckpt_core import CheckpointManager
from lightning_ckpt import ShardedCheckpoint, setup_fabric

IMPORTED = (
    *(torch.distributed.checkpoint.state_dict, boring_classes, LoraConfig, GPT2LMHeadModel, Trainer),
    *(ckpt_core.cli, enable, enable_trainer, CheckpointManager, ShardedCheckpoint, setup_fabric),
)
"""What takes seconds to import, here once for all pages."""
MOST_SECONDS = 220


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    gc.freeze()  # so that no fork looks through all of it when it ends
    for line in sys.stdin:
        page: dict[str, Any] = json.loads(line)
        if (child := os.fork()) == 0:
            return run(page)
        answers.write(f"{ended(child)}\n")
        answers.flush()
    os._exit(0)  # nothing of its own is left to do, and to take all that it imported apart takes seconds


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(page: dict[str, Any]) -> int:
    """Run the blocks in the page's folder; they end as a script does."""
    os.chdir(page["folder"])
    output = os.open(".output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    asked, answers = served()
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)  # a fork of one that has this would hang
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["train.py"]
    for block in page["blocks"]:
        text, place = block["text"], f"{page['page']}:{block['line']}"
        if block["language"] == "python":
            exec(compile("\n" * block["line"] + text, page["page"], "exec"), vars(module))
            continue
        for words in simple(text) or [["bash", "-euo", "pipefail", "-c", text]]:
            asked.write(json.dumps(words) + "\n")
            asked.flush()
            if code := int(answers.readline()):
                raise SystemExit(f"{place}: {' '.join(words)} ended with {code}")
    return 0


def simple(text: str) -> list[list[str]] | None:
    """The commands of a block, if nothing but `ckpt` and `python` is called; else None."""
    commands = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    found = [words for words in commands if words]
    plain = not re.search(r"[|<>$;&`=]\s|[$`<>]|&&", re.sub(r"'[^']*'|#.*", "", text))
    return found if plain and all(words[0] in {"ckpt", "python"} for words in found) else None


def served() -> tuple[TextIO, TextIO]:
    """Fork what runs commands; return what they are written to, and where their exit codes come from."""
    asked, answered = os.pipe(), os.pipe()
    if os.fork():
        os.close(asked[0])
        os.close(answered[1])
        return os.fdopen(asked[1], "w"), os.fdopen(answered[0])
    os.close(asked[1])
    os.close(answered[0])
    for line in os.fdopen(asked[0]):
        if (child := os.fork()) == 0:
            run_command(json.loads(line))
        os.write(answered[1], f"{ended(child)}\n".encode())
    os._exit(0)


def run_command(words: list[str]) -> Never:
    """Run one command in this process, which ends with it."""
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
    sys.argv = words[1:] if words[0] == "python" else words
    if words[0] == "bash":
        os.execvp(words[0], words)
    if words[0] == "ckpt":
        sys.exit(ckpt_core.cli.main(words[1:]))
    sys.path.insert(0, "")
    if words[1] == "-m":
        sys.argv = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[1], run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
