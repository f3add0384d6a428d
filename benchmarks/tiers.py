"""What a local tier with an object store behind it costs, against others that write to the store.

    python -m benchmarks.tiers --gib 2 --rounds 7 --json out.json --picture out.png
    python -m benchmarks.tiers --interference --gib 2 --rounds 7
    python -m benchmarks.tiers --resume --gib 1 --rounds 7

Without a mode: how long until the training goes on, the disk has it, the bucket has it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.buckets.clients import BucketTask
from benchmarks.command import add_common_options, add_state_options, positive, run, tell
from benchmarks.comparison import compare
from benchmarks.contenders import Task
from benchmarks.lineup import opened
from benchmarks.loading.rounds import make_load_task
from benchmarks.report import Report
from benchmarks.rounds import take_turns
from benchmarks.s3 import Server, serving
from benchmarks.state import make_state, state_shape
from benchmarks.tiering.neighbours import one_save_beside, report_neighbours
from benchmarks.tiering.nodes import ResumeNodeLost
from benchmarks.tiering.resumes import (
    Resume,
    ResumeBare,
    ResumeDisk,
    ResumeLost,
    ResumeLostRead,
    ResumeWhole,
    one_resume,
    report_resumes,
)
from benchmarks.tiering.savers import (
    SERVER,
    BarePut,
    DcpFsspecAsync,
    DcpS3TorchAsync,
    OursDiskOnly,
    OursTiers,
    OursTiersLimited,
    OursTiersThread,
    S3fsTorchSave,
    TierSaver,
)
from benchmarks.tiering.stages import one_save, report_stages
from benchmarks.training import Training, one_thread

_DESCRIPTION = "What a local tier with an object store behind it costs."
SAVERS: Sequence[type[TierSaver]] = (OursTiers, DcpFsspecAsync, DcpS3TorchAsync, S3fsTorchSave, BarePut)
NEIGHBOURS: Sequence[type[TierSaver]] = (
    OursTiers, OursTiersThread, OursTiersLimited, OursDiskOnly, DcpFsspecAsync, DcpS3TorchAsync, BarePut,
)  # fmt: skip
RESUMES: Sequence[type[Resume]] = (
    ResumeDisk, ResumeWhole, ResumeNodeLost, ResumeLost, ResumeLostRead, ResumeBare,
)  # fmt: skip
_KEYS = sorted({each.key for each in (*SAVERS, *NEIGHBOURS, *RESUMES)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=_DESCRIPTION)
    add_state_options(made, "GiB to save (default 1; --many 0.3, --large 2)", "tensors (default 330)")
    mode = made.add_argument_group("modes").add_mutually_exclusive_group()
    mode.add_argument("--interference", action="store_true", help="what uploads cost a training beside them")
    mode.add_argument("--resume", action="store_true", help="from the local tier, and after its loss")
    how = made.add_argument_group("how")
    how.add_argument("--step-ms", type=positive, default=250.0, help="--interference: a step's length")
    how.add_argument("--base-steps", type=int, default=12, help="--interference: steps before each save")
    add_common_options(how, _KEYS)
    options = made.parse_args(arguments)
    return run(made, options, _with_server)


def _with_server(options: argparse.Namespace, root: Path) -> Report:
    with serving(gives_way=options.interference) as server:
        if options.resume:
            return _resumes(options, root, server)
        return _neighbours(options, root, server) if options.interference else _stages(options, root, server)


def _stages(options: argparse.Namespace, root: Path, server: Server) -> Report:
    types = [each for each in SAVERS if not options.only or each.key in options.only]
    with opened(types, _task(options, root, server)) as lineup:
        found = take_turns(lineup, one_save, rounds=options.rounds, warm_up=1, progress=tell)
    title = f"Saving {state_shape(options)} to a disk and on to an object store"
    return report_stages(title, compare(types, found, lineup.not_run), [_rounds(options)])


def _neighbours(options: argparse.Namespace, root: Path, server: Server) -> Report:
    types = [each for each in NEIGHBOURS if not options.only or each.key in options.only]
    with one_thread():
        training = Training(options.device, step_seconds=options.step_ms / 1e3)
        task = _task(options, root, server)
        beside = partial(one_save_beside, training=training, base_steps=options.base_steps)
        with opened(types, task) as lineup:
            found = take_turns(lineup, beside, rounds=options.rounds, warm_up=1, progress=tell)
    title = (
        f"A training of steps of {options.step_ms:.0f} ms beside saves and uploads of {state_shape(options)}"
    )
    return report_neighbours(title, compare(types, found, lineup.not_run), [_rounds(options)])


def _resumes(options: argparse.Namespace, root: Path, server: Server) -> Report:
    types = [each for each in RESUMES if not options.only or each.key in options.only]
    task = BucketTask(live=make_load_task(state_shape(options), options.device, root), server=server)
    with opened(types, task) as lineup:
        for entrant in list(lineup.running):
            lineup.attempt(entrant, entrant.prepare)
        found = take_turns(lineup, one_resume, rounds=options.rounds, warm_up=1, progress=tell)
    title = f"Resuming {state_shape(options)} from a local tier, or from the bucket behind it"
    return report_resumes(title, compare(types, found, lineup.not_run), [_rounds(options)])


def _task(options: argparse.Namespace, root: Path, server: Server) -> Task:
    tensors = make_state(state_shape(options), options.device)
    return Task(tensors=tensors, root=root, device=options.device, shared={SERVER: server})


def _rounds(options: argparse.Namespace) -> str:
    return (
        f"Rounds: {options.rounds}, in each of which everybody takes a turn, after one that is not counted. "
        "Bars are medians, whiskers minimum and maximum."
    )


if __name__ == "__main__":
    raise SystemExit(main())
