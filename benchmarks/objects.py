"""How long saves to an object store and loads from it take, and what they cost, side by side.

    python -m benchmarks.objects --gib 1 --rounds 7 --json out.json --picture out.png

Every client saves the same state to the same server on this machine, loads it back, and is verified. The
server is `benchmarks.s3`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.buckets.bare import BareObstore, BareObstoreWhole, S3fsFile, S5cmd
from benchmarks.buckets.clients import BucketClient, BucketTask
from benchmarks.buckets.formats import DcpFsspec, DcpS3Torch, OursDefault, OursRead
from benchmarks.buckets.peak import peak_mib
from benchmarks.buckets.results import Peaks, report_objects
from benchmarks.buckets.turns import one_turn
from benchmarks.command import add_common_options, add_state_options, positive, run, tell
from benchmarks.lineup import opened
from benchmarks.loading.rounds import make_load_task
from benchmarks.report import Report
from benchmarks.rounds import take_turns
from benchmarks.s3 import Server, serving
from benchmarks.state import state_shape

_DESCRIPTION = "How long saves to an object store and loads from it take, and what they cost."
CLIENTS: Sequence[type[BucketClient]] = (
    OursDefault, OursRead, BareObstore, BareObstoreWhole, DcpFsspec, DcpS3Torch, S3fsFile,
    S5cmd,
)  # fmt: skip
_BY_KEY: Mapping[str, type[BucketClient]] = {each.key: each for each in CLIENTS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.objects", description=_DESCRIPTION)
    add_state_options(made, "GiB to save (default 1; --many 0.3, --large 2)", "tensors (default 330)")
    how = made.add_argument_group("how")
    how.add_argument("--no-peak", action="store_true", help="do not measure memory in fresh processes")
    how.add_argument("--verify", action="store_true", help="the server compares checksums of bodies")
    how.add_argument("--timeout-s", type=positive, default=600.0, help="of each fresh process")
    add_common_options(how, _BY_KEY)
    return run(made, made.parse_args(arguments), _measure)


def _measure(options: argparse.Namespace, root: Path) -> Report:
    types = [_BY_KEY[key] for key in options.only] or list(CLIENTS)
    shape = state_shape(options)
    with serving(verifies=options.verify) as server:
        task = BucketTask(live=make_load_task(shape, options.device, root), server=server)
        with opened(types, task) as lineup:
            for client in list(lineup.running):
                lineup.attempt(client, client.prepare)
            turns = take_turns(lineup, one_turn, rounds=options.rounds, warm_up=1, progress=tell)
        peaks = {} if options.no_peak else _peaks(types, options, server, root)
    title = f"Saving {shape} to an object store and loading it"
    return report_objects(title, types, turns, not_run=lineup.not_run, peaks=peaks)


def _peaks(
    types: Sequence[type[BucketClient]], options: argparse.Namespace, server: Server, root: Path
) -> Peaks:
    shape = state_shape(options)
    found = {
        each.key: peak_mib(each, shape, server, root, timeout_seconds=options.timeout_s) for each in types
    }
    return {key: peak for key, peak in found.items() if not isinstance(peak, str)}


if __name__ == "__main__":
    raise SystemExit(main())
