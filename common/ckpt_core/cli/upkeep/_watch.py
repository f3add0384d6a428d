"""`watch` and `annotate`: wait for checkpoints of a run, and write numbers back."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace

from ckpt_core.cli._outcome import Outcome, metrics_text
from ckpt_core.disclosure import printable, public_url
from ckpt_core.errors import CheckpointNotFoundError, ConfigError
from ckpt_core.watching import annotate, watch


def run(arguments: Namespace) -> Outcome:
    words, root, given = shlex.split(arguments.exec or ""), public_url(arguments.root), vars(arguments)
    if arguments.exec is not None and (not words or shutil.which(words[0]) is None):
        raise ConfigError(f"--exec names no program: {arguments.exec!r}")
    options = {name: given[name] for name in ("after", "each", "poll", "timeout", "storage_options")}
    seen = list[dict[str, str | int | None]]()
    for found in watch(arguments.root, **options):
        step, code = str(found.step), None
        if words:  # without a shell; 128 + n for signal n
            command = [word.replace("{path}", found.path).replace("{step}", step) for word in words]
            variables = {**os.environ, "CKPT_PATH": found.path, "CKPT_STEP": step}
            code = subprocess.run(command, env=variables, check=False).returncode  # noqa: S603 - the user's own
            code = code if code >= 0 else 128 - code
        seen.append({"step": found.step, "name": found.info.name, "path": found.path, "exit_code": code})
        if not arguments.json:
            sys.stdout.write(printable(found.path) + (f"  exit code {code}\n" if words else "\n"))
            sys.stdout.flush()
        if code and arguments.fail_fast:
            break
    if not seen:
        raise CheckpointNotFoundError(f"{root}: no checkpoint came within {arguments.timeout:g} s")
    failed = any(each["exit_code"] for each in seen)
    return Outcome(fields={"root": root, "checkpoints": seen}, exit_code=int(failed))


def write_back(arguments: Namespace) -> Outcome:
    metrics, place = dict(map(_metric, arguments.metric)), public_url(arguments.checkpoint)
    annotate(arguments.checkpoint, metrics, storage_options=arguments.storage_options)
    return Outcome(
        fields={"checkpoint": place, "metrics": metrics}, parts=[f"{place}: {metrics_text(metrics)}"]
    )


def _metric(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        return name, float(number)
    except ValueError:
        raise ConfigError(f"--metric takes NAME=NUMBER, such as val_loss=1.25, not {text!r}") from None
