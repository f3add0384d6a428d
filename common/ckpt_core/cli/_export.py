"""`export`, `average` and `import`: checkpoints in formats of others."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from ckpt_core.cli._arguments import claimed, is_local, open_target, options_for, storage_options
from ckpt_core.cli._cp import interruptible
from ckpt_core.cli._outcome import Outcome, ProgressLine
from ckpt_core.errors import ConfigError
from ckpt_core.hosting import step_in
from ckpt_core.options import bytes_text
from ckpt_core.validation import parse_size


def run(arguments: Namespace) -> Outcome:
    return _exported(arguments, ema=arguments.ema)


def average(arguments: Namespace) -> Outcome:
    return _exported(arguments, average=arguments.last, decay=arguments.decay)


def _exported(arguments: Namespace, **options: Any) -> Outcome:
    from ckpt_core.convert import export

    if arguments.adapters and arguments.merge_adapters:
        raise ConfigError("--adapters writes them alone, --merge-adapters the model with them: give one")
    kept: Literal["keep"] | None = "keep" if arguments.adapters else None
    place, step = arguments.place, arguments.step
    if step is None and (found := step_in(place)) and not (is_local(place) and os.path.lexists(place)):
        place, step = found
    given = options_for(arguments.target, arguments)
    if arguments.to_storage_option and not is_local(arguments.target):
        given = storage_options(arguments.to_storage_option, "")
    with interruptible() as stop, ProgressLine("exporting", 0, plain=True) as line:

        def progress(size_bytes: int) -> None:
            stop()
            line.add(size_bytes)

        summary = export(
            place,
            arguments.target,
            to=arguments.to,
            step=step,
            like=arguments.like,
            dtype=arguments.dtype,
            adapters="merge" if arguments.merge_adapters else kept,
            include=arguments.include,
            names=_names(arguments),
            shard_bytes=parse_size("--shard-size", arguments.shard_size) or 0,
            storage_options=options_for(place, arguments),
            out_storage_options=given,
            progress=progress,
            expect=line.expect,
            **options,
        )
    step_text = "" if summary.step is None else f", step {summary.step}"
    return Outcome(
        fields=asdict(summary),
        parts=[
            f"{summary.url}: {len(summary.files)} files, {bytes_text(summary.size_bytes)}, of "
            f"{summary.source}{step_text}"
        ],
    )


def _names(arguments: Namespace) -> Mapping[str, str] | None:
    from ckpt_core.sources import NameTable  # it needs torch, which takes a second

    return None if arguments.map is None else dict(NameTable.read(arguments.map).pairs)


def import_(arguments: Namespace) -> Outcome:
    from ckpt_core.convert import import_checkpoint

    target = open_target(arguments.root, options_for(arguments.root, arguments))
    with ProgressLine(f"importing to {target.url}", 0, plain=True) as line:
        info = import_checkpoint(
            arguments.place,
            target,
            step=arguments.step,
            names=_names(arguments),
            storage_options=options_for(arguments.place, arguments),
            progress=line.add,
            claim=partial(claimed, command="ckpt import", take_over=arguments.take_over),
        )
    return Outcome(
        fields={"root": target.url, "name": info.name, "step": info.step, "size_bytes": info.size_bytes},
        parts=[f"{target.url}/{info.name}: step {info.step}, {bytes_text(info.size_bytes)}"],
    )
