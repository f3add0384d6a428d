"""Preemption at every moment: real signals to real ranks, then a fresh pair of ranks that goes on.

`python -m benchmarks.crashing.preemption FOLDER SEED [COUNT]` prints one outcome per line. It imports every
host once and forks the ranks: a fork takes milliseconds.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.crashing.outcome import Outcome
from benchmarks.crashing.preempted_jobs import HOSTS, Job
from benchmarks.crashing.preemption_cases import RANKS, Case, cases, stock_cases
from benchmarks.crashing.signalling import Director, Line, Run
from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage


def experiment(case: Case, folder: Path, reference: Callable[[Job], Run]) -> Outcome:
    """Preempt a run, look at what it left, and let fresh ranks go on to the end."""
    root = folder / "run"
    root.mkdir(parents=True)
    broken = (launch if case.launched else pair)(case.job, root, case, resume=False)
    storage = LocalStorage(root)
    committed = [info.step for info in Catalog(storage).committed()]
    problems = [*_conduct(case, broken, committed), *_damage(storage)]
    acknowledged, resumed = case.committed[-1] if case.committed else 0, None
    if not problems:
        rest = replace(case.job, save={})
        # The Trainer of transformers makes one step too many when it resumes what was over.
        over = case.job.host == "trainer" and case.committed[-1:] == (case.job.steps,)
        whole, after = reference(rest), broken if over else pair(rest, root, None, resume=True)
        problems += _resumed_inexactly(whole, broken, after)
        resumed = acknowledged if over else after.results[0].get("began")
    shutil.rmtree(folder)
    return Outcome(
        sweep=case.sweep,
        point=case.name,
        kills=0,
        acknowledged=acknowledged,
        resumed=resumed,
        problem="; ".join(problems),
    )


def _conduct(case: Case, run: Run, committed: Sequence[int]) -> Iterator[str]:
    for rank, code in run.codes.items():
        if code != 0:
            hang = f"hung for {case.seconds:g} s" if code is None else f"ended with {code}"
            yield f"rank {rank} {hang}: {run.results.get(rank, {}).get('error', 'it told nothing')}"
            return
    if run.missed:
        yield f"never came to {run.missed[0].point}"
    for rank, result in run.results.items():
        if result["step"] != case.stopped_at:
            yield f"rank {rank} stopped at step {result['step']} instead of {case.stopped_at}"
        if result["preempted"] != case.preempted:
            yield f"rank {rank} says preempted={result['preempted']}"
    if tuple(committed) != case.committed:
        yield f"committed are {list(committed)} instead of {list(case.committed)}"


def _damage(storage: LocalStorage) -> Iterator[str]:
    for info in Catalog(storage).committed():
        for failure in verify(storage, info.name):
            yield f"{info.name} is damaged: {failure}"
    for name in Catalog(storage).torn():
        yield f"{name} was left behind"


def _resumed_inexactly(whole: Run, broken: Run, after: Run) -> Iterator[str]:
    for rank, code in after.codes.items():
        if code != 0:
            yield f"resumed rank {rank} ended with {code}: {after.results.get(rank, {}).get('error')}"
            return
    for rank in range(RANKS):
        losses = {**broken.results[rank]["losses"], **after.results[rank]["losses"]}
        if losses != whole.results[rank]["losses"]:
            yield f"rank {rank} has other losses: {losses} instead of {whole.results[rank]['losses']}"
        if after.results[rank]["weights"] != whole.results[rank]["weights"]:
            yield f"rank {rank} has other weights in the end"


def pair(job: Job, root: Path, case: Case | None, *, resume: bool) -> Run:
    """Two ranks of a job, forked; the store is in a process of its own, as under torchrun."""
    sys.stdout.flush()
    sys.stderr.flush()
    store, port = _fork_store()
    try:
        return _director(case).run(
            lambda: [_fork(rank, port, job, root, resume=resume) for rank in range(RANKS)]
        )
    finally:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)


def launch(job: Job, root: Path, case: Case | None, *, resume: bool) -> Run:
    """A script that Lightning runs once more for the other rank."""
    told = json.dumps({"job": asdict(job), "root": str(root), "resume": resume})
    command = [sys.executable, "-m", "benchmarks.crashing.preempted_lightning", told]
    return _director(case, results=RANKS).run(lambda: [subprocess.Popen(command, stdout=sys.stderr).pid])


def _director(case: Case | None, *, results: int = 0) -> Director:
    if case is None:
        return Director(shots=(), results=results)
    return Director(shots=case.shots, seconds=case.seconds, results=results)


def _fork_store() -> tuple[int, int]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, f"{store.port}\n".encode())
        signal.pause()
    os.close(writer)
    with os.fdopen(reader) as stream:
        return child, int(stream.readline())


def _fork(rank: int, port: int, job: Job, root: Path, *, resume: bool) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    os.dup2(2, 1)  # standard output is for outcomes
    faulthandler.dump_traceback_later(140)
    code = 1
    try:
        line = Line(rank)
        code = _told(line, lambda: HOSTS[job.host](job, root, line, resume=resume))
    finally:
        # Whatever happens: what follows is the parent's.
        os._exit(code)


def _told(line: Line, act: Callable[[], dict[str, Any]]) -> int:
    try:
        line.end(act())
    except BaseException:  # noqa: BLE001 - told to the parent
        line.end({"error": traceback.format_exc()})
        return 1
    return 0


@dataclass(frozen=True)
class References:
    """Uninterrupted runs, made when first needed."""

    folder: Path
    made: dict[str, Run] = field(default_factory=dict)

    def __call__(self, job: Job) -> Run:
        """What a job does if nothing happens to it."""
        key = json.dumps(asdict(job), sort_keys=True)
        if key not in self.made:
            root = self.folder / f"reference-{len(self.made)}"
            root.mkdir(parents=True)
            self.made[key] = pair(job, root, None, resume=False)
        return self.made[key]


def chosen(seed: int, count: int | None) -> list[Case]:
    """All cases, or some of them, every host among them."""
    every = cases()
    return every if count is None else random.Random(seed).sample(every, min(count, len(every)))


def run(*, seed: int, folder: Path, count: int | None) -> Iterator[Outcome]:
    """Every case, or `count` of them, in a fresh process that forks its ranks."""
    command = [sys.executable, "-m", "benchmarks.crashing.preemption", str(folder), str(seed)]
    yield from _outcomes([*command, *([] if count is None else [str(count)])])


def run_titled(titles: Sequence[str], folder: Path) -> Iterator[Outcome]:
    """The cases with these titles."""
    yield from _outcomes([sys.executable, "-m", "benchmarks.crashing.preemption", str(folder), *titles])


def _outcomes(command: Sequence[str]) -> Iterator[Outcome]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield Outcome(**json.loads(line))
    if process.returncode:
        raise RuntimeError(f"the experiments ended with {process.returncode}; see their output above")


def main(arguments: Sequence[str]) -> None:
    """Run what the arguments name and print the outcomes."""
    import torch

    folder, *rest = arguments
    if rest and rest[0].isdecimal():
        wanted = chosen(int(rest[0]), int(rest[1]) if len(rest) > 1 else None)
    else:
        wanted = [case for case in [*cases(), *stock_cases()] if case.title in rest]
    torch.set_num_threads(1)
    for host in {case.job.host for case in wanted}:
        _import(host)
    references = References(Path(folder) / "references")
    for number, case in enumerate(wanted):
        outcome = experiment(case, Path(folder) / str(number), references)
        print(json.dumps(asdict(outcome)), flush=True)


def _import(host: str) -> None:
    """Before the first fork, so that no rank has to."""
    if "lightning" in host:
        import benchmarks.crashing.preempted_lightning
    elif host == "trainer":
        import benchmarks.crashing.preempted_trainer  # noqa: F401
    elif host == "accelerate":
        import accelerate_ckpt  # noqa: F401


if __name__ == "__main__":
    main(sys.argv[1:])
