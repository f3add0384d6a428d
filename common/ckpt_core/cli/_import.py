"""`import`: another program's checkpoint as one of ours."""

from __future__ import annotations

from argparse import Namespace

from ckpt_core.cli._arguments import claimed, open_target, options_for
from ckpt_core.cli._outcome import Outcome
from ckpt_core.cli._progress_line import ProgressLine
from ckpt_core.options import bytes_text


def run(arguments: Namespace) -> Outcome:
    from ckpt_core.convert import import_into, open_source  # they need torch, which takes a second

    options = options_for(arguments.place, arguments)
    source = open_source(arguments.place, options, step=arguments.step)
    target = open_target(arguments.root, options_for(arguments.root, arguments))
    with (
        claimed(target, "ckpt import", take_over=arguments.take_over) as lease,
        ProgressLine(f"importing to {target.url}", source.size_bytes, plain=True) as line,
    ):
        info = import_into(source, target, check=lease.check, progress=line.add)
    return Outcome(
        fields={
            "source": source.url,
            "format": source.kind,
            "root": target.url,
            "name": info.name,
            "step": info.step,
            "size_bytes": info.size_bytes,
        },
        parts=[
            f"{target.url}/{info.name}: step {info.step}, {bytes_text(info.size_bytes)}, of {source.kind}"
        ],
    )
