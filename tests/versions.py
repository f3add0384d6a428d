"""The quick tests with the oldest or the newest versions of all that we depend on.

    python -m tests.versions minima                      # each lower bound of pyproject.toml, as it stands
    python -m tests.versions newest --python python3.13  # what an index has today
    python -m tests.versions table                       # docs/versions.json as the page shows it

An environment is made, the project installed in it with all extras, `pytest -m "not slow"` run, and a row of
docs/versions.json written. `--environment DIR` keeps it, and uses one that is there already as it is. Further
arguments go to pytest, and into the row: `tests/test_private_names.py` asks only what a host has moved.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "docs" / "versions.json"
SHOWN = ("torch", "lightning", "accelerate", "transformers", "fsspec")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def minima() -> Iterator[str]:
    """Yield the lower bound of each requirement and extra, and of the hosts of the tests, as a pin."""
    project = PYPROJECT["project"]
    for text in [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
        *PYPROJECT["dependency-groups"]["hosts"],
    ]:
        requirement = Requirement(text)
        for bound in requirement.specifier:
            yield f"{requirement.name}=={bound.version}"


def install(python: Path, which: str, folder: Path) -> None:
    """Install the project, its extras and what its tests need."""
    pins = folder / "pins.txt"
    pins.write_text("\n".join(minima() if which == "minima" else []), encoding="utf-8")
    pip = (python, "-m", "pip", "--quiet", "install", "--upgrade")
    subprocess.run([*pip, "pip>=25.1"], check=True)
    group = f"{ROOT}/pyproject.toml:dev"
    subprocess.run([*pip, "--constraint", pins, "--editable", f"{ROOT}[all]", "--group", group], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)


def versions(python: Path) -> dict[str, str]:
    code = f"from importlib.metadata import version as v; print(*(v(n).split('+')[0] for n in {SHOWN}))"
    told = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    return dict(zip(SHOWN, told.split(), strict=True))


def run(python: Path, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the quick tests; return how many passed and were skipped, and which failed."""
    report = folder / "report.xml"
    pytest = (python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider")
    subprocess.run([*pytest, f"--junitxml={report}", *arguments], cwd=ROOT, check=False)
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [each for each in cases if each.find("failure") is not None or each.find("error") is not None]
    skipped = [each for each in cases if each.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": [f"{each.get('classname')}.{each.get('name')}" for each in failed],
        "skipped": len(skipped),
    }


def table() -> str:
    """Return docs/versions.json as a table."""
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    names = ("Versions", "Python", *SHOWN, "tests", "passed", "failed", "skipped", "on")
    lines = [names, ["---"] * len(names)]
    for row in rows:
        counts = (row["tests"], row["passed"], len(row["failed"]), row["skipped"], row["date"])
        lines.append((row["which"], row["python"], *(row["versions"][name] for name in SHOWN), *counts))
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def measure(which: str, interpreter: str, environment: Path, arguments: list[str]) -> bool:
    """Write a row of docs/versions.json; return whether a test failed."""
    python = environment.absolute() / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        if not python.exists():
            subprocess.run([interpreter, "-m", "venv", environment], check=True)
            install(python, which, Path(folder))
        told = subprocess.run([python, "--version"], check=True, capture_output=True, text=True).stdout
        key = {"which": which, "python": told.split()[1]}
        row = {
            **key,
            "versions": versions(python),
            "date": datetime.now(UTC).date().isoformat(),
            "tests": " ".join(each for each in arguments if each.startswith("tests/")) or "all quick ones",
            **run(python, Path(folder), arguments),
        }
    others = [
        each for each in json.loads(ROWS.read_text(encoding="utf-8")) if not key.items() <= each.items()
    ]
    rows = sorted([*others, row], key=lambda each: (each["which"], each["python"]))
    ROWS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return bool(row["failed"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("which", choices=["minima", "newest", "table"])
    parser.add_argument("--python", default=sys.executable, help="the interpreter to try")
    parser.add_argument("--environment", type=Path, help="where to make the environment, or the one to use")
    options, arguments = parser.parse_known_args()
    if options.which == "table":
        print(table())
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = options.environment or Path(folder) / "environment"
        sys.exit(measure(options.which, options.python, environment, arguments))


if __name__ == "__main__":
    main()
