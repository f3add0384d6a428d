"""Run the demo; exit with 0 only if every run equals the uninterrupted one."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from examples.demo.driver import RUNNING, Driver
from examples.demo.evidence import read_evidence
from examples.demo.picture import draw
from examples.demo.plan import FRAMEWORKS, RESHARDED, Plan
from examples.demo.ranks import RanksFailedError, import_once
from examples.demo.report import report

FAILED, INTERRUPTED = 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)  # a log wraps nothing
    signal.signal(signal.SIGTERM, _end)
    started = time.monotonic()
    try:
        plan = Plan(steps=options.steps)
        import_once(options.framework)
        for framework in options.framework:
            run_phases(framework, plan, options.out / framework, console)
        evidences = [read_evidence(options.out / framework) for framework in options.framework]
        equal = [report(console, evidence, plan) for evidence in evidences]
        picture = options.out / "demo.png"
        draw(evidences, plan, picture, equal=all(equal))
    except (RanksFailedError, ValueError) as error:
        console.print(f"[red bold]failed:[/] {error}", highlight=False)
        return FAILED
    except KeyboardInterrupt:
        console.print("[red]interrupted; every process of the demo was killed")
        return INTERRUPTED
    verdict = "[green bold]everything is equal" if all(equal) else "[red bold]there are differences"
    console.print(f"{verdict}[/] ({time.monotonic() - started:.0f} s). Picture: {picture}", highlight=False)
    return 0 if all(equal) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--framework", nargs="+", choices=FRAMEWORKS, default=["lightning", "accelerate"])
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="for records, checkpoints and picture"
    )
    parser.add_argument("--steps", type=int, default=Plan().steps, help="a multiple of 6, at least 12")
    return parser


def run_phases(framework: str, plan: Plan, folder: Path, console: Console) -> None:
    """Run all phases of a framework, with a progress bar for each."""
    columns = (
        TextColumn("{task.description:<30}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        bars: dict[str, TaskID] = {}

        def show(phase: str, step: int, note: str) -> None:
            if phase not in bars:
                total = plan.steps + (plan.save_every if phase == RESHARDED else 0)
                bars[phase] = progress.add_task(f"{framework}: {phase}", total=total, note="")
            progress.update(bars[phase], completed=step, note=note)
            if note not in RUNNING:
                progress.stop_task(bars[phase])
                if not console.is_terminal:  # no moving bars in a log
                    console.print(f"{framework}: {phase}, step {step}: {note}", highlight=False)

        Driver(framework, plan, folder.absolute(), show).run()


def _end(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
