"""All that is done before a release, in one command: `make release`, or `python -m tests.release [--tag]`.

Builds the archive of the sources, and from it the wheel; checks their metadata, and that no link of the
README is dead on an index; installs the wheel in an empty environment, and runs each quickstart of
docs/start.md twice there; runs tests from the unpacked sources; writes a bill of materials. With `--tag` a
clean checkout is tagged. Nothing is uploaded: `twine upload dist/*.whl dist/*.tar.gz` does that, by hand.
`CKPT_SUITE_HOME` gives the address of the repository (hatch_build.py). The quick tests on the oldest and
newest versions: `make versions`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ckpt_core._version import __version__
from tests.archives import unpack

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TORCH = "torch==2.13.0"
HOST = re.compile(r"^## (?P<name>[^\n]+)\n(?P<body>.*?)(?=^## |\Z)", flags=re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def main() -> None:
    """Do all of it; a step that fails ends it, with what it printed."""
    parser = argparse.ArgumentParser(prog="python -m tests.release")
    parser.add_argument("--tag", action="store_true", help="tag the commit at the end; nothing is pushed")
    parser.add_argument("--torch", default=TORCH, help=f"what to install in the empty environment ({TORCH})")
    options = parser.parse_args()
    if options.tag and git("status", "--porcelain"):
        sys.exit("there are changes that are not committed: a tag would not have them")
    one_version()
    build()
    say("check the metadata and the links of the README")
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    links()
    with tempfile.TemporaryDirectory() as folder:
        python = installed(Path(folder), options.torch)
        for name, code in list(quickstarts()) or sys.exit("docs/start.md shows no quickstart"):
            twice(python, Path(folder), name, code)
        from_sources(Path(folder))
        bill(python)
    if options.tag:
        git("tag", "--annotate", f"v{__version__}", "-m", f"ckpt-suite {__version__}")
    say(f"ready in {DIST}: {', '.join(sorted(each.name for each in DIST.iterdir()))}")


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def git(*arguments: str) -> str:
    return run("git", *arguments).strip()


def one_version() -> None:
    for name, line in (("CHANGELOG.md", f"## {__version__}"), ("CITATION.cff", f"version: {__version__}")):
        if line not in (ROOT / name).read_text(encoding="utf-8").splitlines():
            sys.exit(f"{name} has no line {line!r}")


def build() -> None:
    say("build")
    DIST.mkdir(exist_ok=True)
    for old in DIST.iterdir():
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", DIST)


def links() -> None:
    """Refuse links of the rendered README that lead to no address of their own."""
    from importlib.metadata import PathDistribution
    from zipfile import Path as ZipPath

    from readme_renderer.markdown import render

    (wheel,) = DIST.glob("*.whl")
    (info,) = (each for each in ZipPath(wheel).iterdir() if each.name.endswith(".dist-info"))
    shown = render(PathDistribution(info).metadata.get_payload()) or sys.exit("the README does not render")
    dead = re.findall(r'(?:href|src)="(?!https?://|mailto:|#)([^"]*)"', shown)
    if dead:
        sys.exit(f"dead on an index: {', '.join(dead)}")


def installed(folder: Path, torch: str) -> Path:
    say("an empty environment with the wheel")
    python = folder / "environment" / "bin" / "python"
    run(sys.executable, "-m", "venv", folder / "environment")
    (wheel,) = DIST.glob("*.whl")
    for requirement in (torch, f"{wheel}[lightning,accelerate]"):
        run(python, "-m", "pip", "install", requirement)
    run(python, "-m", "pip", "check")
    return python


def quickstarts() -> Iterator[tuple[str, str]]:
    """Yield the sections of the start page that have Python, each with its code."""
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    for host in HOST.finditer(page):
        if blocks := BLOCK.findall(host["body"]):
            yield host["name"], "\n".join(blocks)


def twice(python: Path, folder: Path, name: str, code: str) -> None:
    """Run a quickstart, and again; both must end well and leave the same newest checkpoint."""
    say(f"docs/start.md: {name}, twice")
    (script := folder / f"{name.replace(' ', '-')}.py").write_text(code, encoding="utf-8")
    newest = []
    for _ in range(2):
        run(python, script, cwd=folder, PYTHONPATH="", CUDA_VISIBLE_DEVICES="")
        newest.append({marker.parent.name for marker in (folder / "runs").glob("*/*/COMMITTED")})
    if not newest[0] or newest[0] != newest[1]:
        sys.exit(f"{name}: {sorted(newest[0])} after the first run, {sorted(newest[1])} after the second")


def from_sources(folder: Path) -> None:
    say("tests from the sources")
    (archive,) = DIST.glob("*.tar.gz")
    unpack(archive, folder)
    there = folder / archive.name.removesuffix(".tar.gz")
    tests = ("tests/unit", "tests/test_public_api.py", "tests/test_private_names.py")
    path = os.pathsep.join((str(there), str(there / "common")))
    run(sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *tests, cwd=there, PYTHONPATH=path)


def bill(python: Path) -> None:
    say("bill of materials")
    output = DIST / f"ckpt_suite-{__version__}.cdx.json"
    run(sys.executable, "-m", "cyclonedx_py", "environment", "--output-file", output, python)


if __name__ == "__main__":
    main()
