"""`import`: another program's checkpoint as one of ours."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from ckpt_core.cli._arguments import claimed, open_target, options_for
from ckpt_core.cli._outcome import Outcome
from ckpt_core.cli._progress_line import ProgressLine
from ckpt_core.options import bytes_text


def run(arguments: Namespace) -> Outcome:
    from ckpt_core.convert import import_checkpoint  # it needs torch, which takes a second
    from ckpt_core.sources import NameTable

    target = open_target(arguments.root, options_for(arguments.root, arguments))
    with ProgressLine(f"importing to {target.url}", 0, plain=True) as line:
        info = import_checkpoint(
            arguments.place,
            target,
            step=arguments.step,
            names=None if arguments.map is None else dict(NameTable.read(arguments.map).pairs),
            storage_options=options_for(arguments.place, arguments),
            progress=line.add,
            claim=partial(claimed, command="ckpt import", take_over=arguments.take_over),
        )
    return Outcome(
        fields={"root": target.url, "name": info.name, "step": info.step, "size_bytes": info.size_bytes},
        parts=[f"{target.url}/{info.name}: step {info.step}, {bytes_text(info.size_bytes)}"],
    )
