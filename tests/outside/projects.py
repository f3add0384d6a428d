"""Real projects that nobody here wrote: each trained whole, and killed and resumed through ours.

A case is a driver in `cases/`, which runs the project as its user would. It is run three times or more: stock
and whole; with ours and whole, which must change nothing; with ours, killed by SIGKILL in the middle and
started again under another seed, which must go on bit for bit.

On 2026-11-24, with torch 2.13.0, lightning 2.6.6, accelerate 1.15.0 and transformers 5.23.0:

    nanogpt                          exact, also on two ranks (nanogpt_ddp), each with its own batch ahead
    imagenet (torchvision 0.29.1)    exact, with random crops and flips in two workers
    fsdp2, two ranks                 exact
    litgpt 0.5.13                    exact
    trl_sft, trl_dpo 1.16.0          exact
    sentence_transformers 6.2.0      exact
    diffusers_unconditional 0.42.1   exact
    diffusers_ddp, two ranks         as documented: only the random numbers of rank 1 are not its own
    pytorch_forecasting 1.8.0        exact
    neuralforecast 3.3.0             exact
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Project:
    """A training of somebody else.

    Attributes:
        packages: it imports, as they are installed.
        checkout: of `--sources` that it needs; none if the package is all.
        kill: after which optimizer step it is killed.
        ranks: how many processes `torchrun` starts; 1 needs none.
        documented: what docs/ says is not exact here; empty if it must be.
    """

    packages: Sequence[str] = ()
    checkout: str = ""
    kill: int = 8
    ranks: int = 1
    documented: str = ""


PROJECTS: Mapping[str, Project] = {
    "nanogpt": Project(checkout="nanoGPT"),
    "nanogpt_ddp": Project(checkout="nanoGPT", ranks=2),
    "imagenet": Project(packages=["torchvision"], checkout="pytorch-examples", kill=10),
    "fsdp2": Project(checkout="pytorch-examples", ranks=2, kill=7),
    "litgpt": Project(packages=["litgpt"]),
    "trl_sft": Project(packages=["trl", "datasets"]),
    "trl_dpo": Project(packages=["trl", "datasets"]),
    "sentence_transformers": Project(packages=["sentence_transformers", "datasets"]),
    "diffusers_unconditional": Project(
        packages=["diffusers", "datasets", "torchvision"], checkout="diffusers"
    ),
    "diffusers_ddp": Project(
        packages=["diffusers", "datasets", "torchvision"],
        checkout="diffusers",
        ranks=2,
        kill=5,
        documented="of a save by the main process alone, the others' random numbers are unknown",
    ),
    "pytorch_forecasting": Project(packages=["pytorch_forecasting"]),
    "neuralforecast": Project(packages=["neuralforecast"]),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a project: an empty `problem` is an exact resume."""

    steps: int
    resumed_at: int
    problem: str = ""


class _FailedError(Exception):
    pass


def train(name: str, folder: Path, trace: str, sources: Path | None, **role: str) -> None:
    """Run a driver once, in a process of its own, below `folder`."""
    project = PROJECTS[name]
    paths = [str(ROOT), str(ROOT / "common"), *([str(sources / "site-packages")] if sources else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "OUTSIDE_TRACE": str(folder.parent / trace),
        "OUTSIDE_SOURCES": str(sources),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",
        "WANDB_MODE": "disabled",
        "CKPT_SUITE_CODE_VERSION": "",
        **role,
    }
    folder.mkdir(exist_ok=True)
    command = [sys.executable]
    if project.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={project.ranks}"]
    command += ["-m", f"tests.outside.cases.{name}"]
    with (folder.parent / f"{trace}.log").open("ab") as log:
        try:
            ended = subprocess.run(
                command, cwd=folder, env=environment, stdout=log, stderr=log, check=False, timeout=600
            )
        except subprocess.TimeoutExpired as error:
            raise _FailedError(f"{trace}: hangs") from error
    if ended.returncode and not role.get("OUTSIDE_KILL"):
        text = (folder.parent / f"{trace}.log").read_text(encoding="utf-8", errors="replace")
        raise _FailedError(f"{trace}: ended with {ended.returncode}\n{text[-2500:]}")


def steps_of(trace: Path) -> list[dict[str, object]]:
    """All steps of one rank; no file if it never came to one."""
    return (
        [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
        if trace.exists()
        else []
    )


def judge(name: str, folder: Path, sources: Path | None = None, *, stock: bool = True) -> Result:
    """Train whole, also without ours if `stock`; kill and resume; compare each step of each rank."""
    project = PROJECTS[name]
    try:
        if stock:
            train(name, folder / "stock", "trace-stock", sources)
        train(name, folder / "whole", "trace-whole", sources, OUTSIDE_OURS="1")
        train(
            name, folder / "killed", "trace-killed", sources, OUTSIDE_OURS="1", OUTSIDE_KILL=str(project.kill)
        )
        train(name, folder / "killed", "trace-resumed", sources, OUTSIDE_OURS="1", OUTSIDE_RESUME="1")
    except _FailedError as error:
        return Result(steps=0, resumed_at=0, problem=str(error))
    at = 0
    whole: list[dict[str, object]] = []
    for rank in range(project.ranks):
        whole, resumed = (steps_of(folder / f"trace-{run}.{rank}") for run in ("whole", "resumed"))
        problem = _difference(steps_of(folder / f"trace-stock.{rank}"), whole) if stock else ""
        if problem:
            return Result(steps=len(whole), resumed_at=0, problem=f"saving changes the training: {problem}")
        if not 0 < len(resumed) < len(whole):
            return Result(steps=len(whole), resumed_at=0, problem=f"{len(resumed)} steps after the resume")
        at = len(whole) - len(resumed)
        if problem := _difference(whole[at:], resumed):
            return Result(
                steps=len(whole), resumed_at=at, problem=f"resumed after {at} steps, then {problem}"
            )
    return Result(steps=len(whole), resumed_at=at)


def _difference(one: list[dict[str, object]], other: list[dict[str, object]]) -> str:
    if len(one) != len(other):
        return f"{len(other)} steps, not {len(one)}"
    for number, (a, b) in enumerate(zip(one, other, strict=True), start=1):
        if what := [key for key in a if a[key] != b[key]]:
            return f"step {number} differs in {', '.join(what)}"
    return ""


def run(names: Sequence[str], sources: Path) -> int:
    """Judge several projects and print a table; the number that is neither exact nor documented."""
    sys.path.append(str(sources / "site-packages"))
    problems = 0
    for name in names or list(PROJECTS):
        project = PROJECTS[name]
        missing = [package for package in project.packages if find_spec(package) is None]
        if project.checkout and not (sources / project.checkout).is_dir():
            missing.append(f"{sources.name}/{project.checkout}")
        if missing:
            print(f"{name:24} not run: {', '.join(missing)} is missing", flush=True)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            result = judge(name, Path(scratch), sources)
        exact = f"exact, {result.resumed_at} of {result.steps} steps restored"
        problems += bool(result.problem) and not project.documented
        told = f" (documented: {project.documented})" if project.documented else ""
        print(f"{name:24} {result.problem + told if result.problem else exact}", flush=True)
    return problems
