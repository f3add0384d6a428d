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

from benchmarks.crashing.outcome import Outcome
from benchmarks.crashing.preempted_jobs import HOSTS, Job
from benchmarks.crashing.signalling import Director, Line, Run, Shot
from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage

RANKS = 2
HANG_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Signals at some moments, and what must come of them.

    Attributes:
        name: for people.
        job: what is trained.
        shots: the signals.
        committed: the steps that must be committed afterwards, oldest first.
        stopped_at: the step at which every rank must have stopped.
        preempted: whether every rank must say so.
    """

    name: str
    job: Job
    shots: tuple[Shot, ...]
    committed: tuple[int, ...]
    stopped_at: int
    preempted: bool = True

    @property
    def sweep(self) -> str:
        """The row of the table."""
        return f"preemption, {self.job.host}, {self.job.strategy}, {RANKS} ranks"


def shot(rank: int, point: str, *to: int, name: str = "SIGTERM") -> Shot:
    """Shorter to write."""
    return Shot(rank=rank, point=point, to=to, name=name)


def cases() -> list[Case]:
    """The whole matrix."""
    found: list[Case] = []
    for host in HOSTS:
        strategies = ("ddp",) if host == "trainer" else ("ddp", "fsdp2")
        for strategy in strategies:
            job = Job(host=host, strategy=strategy)
            found += [*_while_training(job), *_around_training(job), *_during_saves(job)]
            found += [*_evaluating(job), *_going_on(job), *_accumulating(job)]
    return found


def _while_training(job: Job) -> Iterator[Case]:
    shots = {
        "SIGTERM to rank 0": (shot(0, "step 3", 0),),
        "SIGTERM to rank 1": (shot(1, "step 3", 1),),
        "SIGUSR1 to rank 1": (shot(1, "step 3", 1, name="SIGUSR1"),),
        "all ranks at once": (shot(0, "step 3", 0, 1),),
        "all ranks, each twice at once": (shot(0, "step 3", 0, 1, 0, 1),),
        "rank 0, then rank 1": (shot(0, "step 3", 0), shot(1, "step 3", 1)),
        "rank 1, then rank 0": (shot(1, "step 3", 1), shot(0, "step 3", 0)),
    }
    for name, fired in shots.items():
        yield Case(name=name, job=job, shots=fired, committed=(4,), stopped_at=4)
    last = job.steps
    yield Case(
        name="in the last step", job=job, shots=(shot(1, f"step {last - 1}", 1),),
        committed=(last,), stopped_at=last,
    )  # fmt: skip


def _around_training(job: Job) -> Iterator[Case]:
    begun = job.host == "trainer"  # it makes a step before it looks
    yield Case(
        name="before the first step", job=job, shots=(shot(1, "start", 1),),
        committed=(1,) if begun else (), stopped_at=int(begun),
    )  # fmt: skip
    if job.host in {"lightning", "trainer"}:
        yield Case(
            name="between epochs", job=job, shots=(shot(0, "epoch end", 0),), committed=(7,), stopped_at=7
        )


def _during_saves(job: Job) -> Iterator[Case]:
    if job.host == "trainer":
        yield Case(
            name="again when it has stopped", job=job,
            shots=(shot(0, "step 3", 0), shot(1, "epoch end", 0, 1)), committed=(4,), stopped_at=4,
        )  # fmt: skip
        return
    yield Case(
        name="again during the last save", job=job, shots=(shot(0, "step 3", 0), shot(1, "write 1", 0, 1)),
        committed=(4,), stopped_at=4,
    )  # fmt: skip
    yield Case(
        name="during an earlier save", job=replace(job, every=3),
        shots=(shot(0, "step 3", 0), shot(0, "write 1")), committed=(3, 4), stopped_at=4,
    )  # fmt: skip
    yield Case(
        name="in a step that is saved anyway", job=replace(job, every=3), shots=(shot(0, "step 2", 0),),
        committed=(3,), stopped_at=3,
    )  # fmt: skip


def _evaluating(job: Job) -> Iterator[Case]:
    evaluated = replace(job, evaluate_every=3)
    for point in ("evaluation 0", "evaluation 1", "evaluation 3"):
        for rank in range(RANKS):
            yield Case(
                name=f"in {point}, rank {rank}", job=evaluated, shots=(shot(rank, point, rank),),
                committed=(3,), stopped_at=3,
            )  # fmt: skip
    yield Case(
        name="in the evaluation of a step that is saved", job=replace(evaluated, every=3),
        shots=(shot(0, "evaluation 1", 0, 1),), committed=(3,), stopped_at=3,
    )  # fmt: skip


def _going_on(job: Job) -> Iterator[Case]:
    going_on = replace(job, save={"stop": False})
    yield Case(
        name="save and go on, rank 1 two steps later", job=going_on,
        shots=(shot(0, "step 2", 0), shot(1, "step 4", 1)), committed=(3,), stopped_at=job.steps,
        preempted=False,
    )  # fmt: skip


def _accumulating(job: Job) -> Iterator[Case]:
    if job.host in {"lightning", "accelerate"}:
        yield Case(
            name="within an accumulation window", job=replace(job, accumulation=3, steps=5),
            shots=(shot(1, "batch 6", 1),), committed=(3,), stopped_at=3,
        )  # fmt: skip


def experiment(case: Case, folder: Path, reference: Callable[[Job], Run]) -> Outcome:
    """Preempt a run, look at what it left, and let fresh ranks go on to the end."""
    root = folder / "run"
    root.mkdir(parents=True)
    broken = pair(case.job, root, case.shots, resume=False)
    storage = LocalStorage(root)
    committed = [info.step for info in Catalog(storage).committed()]
    problems = [*_conduct(case, broken, committed), *_damage(storage)]
    resumed: int | None = None
    if not problems:
        rest = replace(case.job, save={})
        whole, after = reference(rest), pair(rest, root, (), resume=True)
        problems += _resumed_inexactly(whole, broken, after)
        resumed = _first(after, case.stopped_at)
    shutil.rmtree(folder)
    return Outcome(
        sweep=case.sweep,
        point=case.name,
        kills=0,
        acknowledged=case.stopped_at,
        resumed=resumed,
        problem="; ".join(problems),
    )


def _first(after: Run, default: int) -> int:
    losses = after.results[0]["losses"]
    return min(map(int, losses), default=default)


def _conduct(case: Case, run: Run, committed: Sequence[int]) -> Iterator[str]:
    for rank, code in run.codes.items():
        if code != 0:
            hang = f"hung for {HANG_SECONDS:g} s" if code is None else f"ended with {code}"
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


def pair(job: Job, root: Path, shots: Sequence[Shot], *, resume: bool) -> Run:
    """Two ranks of a job, forked; the store is in a process of its own, as under torchrun."""
    sys.stdout.flush()
    sys.stderr.flush()
    store, port = _fork_store()
    try:
        return Director(shots=shots, seconds=HANG_SECONDS).run(
            lambda: [_fork(rank, port, job, root, resume=resume) for rank in range(RANKS)]
        )
    finally:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)


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
    faulthandler.dump_traceback_later(HANG_SECONDS - 5)
    line, code = Line(rank), 0
    try:
        line.end(HOSTS[job.host](job, root, line, resume=resume))
    except BaseException:  # noqa: BLE001 - told to the parent
        line.end({"error": traceback.format_exc()})
        code = 1
    os._exit(code)


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
            self.made[key] = pair(job, root, (), resume=False)
        return self.made[key]


def chosen(seed: int, count: int | None) -> list[Case]:
    """All cases, or some of them, every host among them."""
    every = cases()
    return every if count is None else random.Random(seed).sample(every, min(count, len(every)))


def run(*, seed: int, folder: Path, count: int | None) -> Iterator[Outcome]:
    """Every case, or `count` of them, in a fresh process that forks its ranks."""
    command = [sys.executable, "-m", "benchmarks.crashing.preemption", str(folder), str(seed)]
    yield from _outcomes([*command, *([] if count is None else [str(count)])])


def run_named(names: Sequence[str], folder: Path) -> Iterator[Outcome]:
    """The cases with these names, each `sweep: name`."""
    yield from _outcomes([sys.executable, "-m", "benchmarks.crashing.preemption", str(folder), *names])


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
        wanted = [case for case in cases() if f"{case.sweep}: {case.name}" in rest]
    torch.set_num_threads(1)
    for host in {case.job.host for case in wanted}:
        _import(host)
    references = References(Path(folder) / "references")
    for number, case in enumerate(wanted):
        outcome = experiment(case, Path(folder) / str(number), references)
        print(json.dumps(asdict(outcome)), flush=True)


def _import(host: str) -> None:
    """Before the first fork, so that no rank has to."""
    if host == "lightning":
        import benchmarks.crashing.preempted_lightning
    elif host == "trainer":
        import benchmarks.crashing.preempted_trainer  # noqa: F401
    elif host == "accelerate":
        import accelerate_ckpt  # noqa: F401


if __name__ == "__main__":
    main(sys.argv[1:])
