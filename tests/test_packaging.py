"""What people get: a wheel of four typed packages, and an archive of the sources whose tests run."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import ckpt_core
from ckpt_core._version import __version__
from tests.archives import unpack
from tests.versions import minima, table

ROOT = Path(__file__).parent.parent
PACKAGES = {"ckpt_core", "ckpt_suite", "lightning_ckpt", "accelerate_ckpt"}
FRAMEWORKS = ("lightning", "pytorch_lightning", "accelerate", "transformers")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python(*arguments: str, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the archive of the sources is, and the wheel that was built from that."""
    folder = tmp_path_factory.mktemp("built")
    python("-m", "build", "--no-isolation", "--outdir", str(folder))
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Iterator[zipfile.ZipFile]:
    (found,) = built.glob("*.whl")
    with zipfile.ZipFile(found) as archive:
        yield archive


@pytest.fixture(scope="module")
def sources(built: Path) -> Path:
    """The archive of the sources, unpacked."""
    (found,) = built.glob("*.tar.gz")
    unpack(found, built)
    return built / found.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_holds_four_packages_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_every_package_is_marked_as_typed(wheel):
    assert {name for name in wheel.namelist() if name.endswith("py.typed")} == {
        f"{p}/py.typed" for p in PACKAGES
    }


def test_every_module_of_the_checkout_is_in_the_wheel(wheel):
    roots = (ROOT / "common", ROOT)
    modules = {
        path.relative_to(root).as_posix()
        for root in roots
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
    }
    assert modules - set(wheel.namelist()) == set()


def test_the_licence_is_in_the_repository_in_the_sources_and_in_the_wheel(wheel, metadata, sources):
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert metadata["License-Expression"] == PROJECT["license"] == "Apache-2.0"
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
    assert wheel.read(name).decode() == (sources / "LICENSE").read_text(encoding="utf-8") == text


def test_the_sources_hold_all_that_is_imported_and_read_by_tests(sources):
    folders = (
        "tests",
        "benchmarks",
        "examples",
        "docs",
        ".ci",
        "common",
        "lightning_ckpt",
        "accelerate_ckpt",
    )
    there = {path for folder in folders for path in files_in(ROOT, folder)}
    assert there - {path for folder in folders for path in files_in(sources, folder)} == set()
    assert len(there) > 500


def files_in(root: Path, folder: str) -> Iterator[str]:
    for path in (root / folder).rglob("*"):
        if path.is_file() and not {"__pycache__", "lightning_logs", "runs"} & {*path.parts}:
            yield path.relative_to(root).as_posix()


@pytest.mark.slow
def test_the_tests_run_from_the_sources_alone(sources):
    """Two small files of them: of the core, and of the rig."""
    told = python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
        *("tests/unit/test_names.py", "tests/reliability/disk/test_findings.py"),
        cwd=sources,
        PYTHONPATH=os.pathsep.join([str(sources), str(sources / "common")]),
    )
    assert "passed" in told
    assert "error" not in told


def test_the_version_is_the_one_in_the_code(metadata):
    assert metadata["Version"] == __version__
    assert getattr(ckpt_core, "__version__", __version__) == __version__


def test_entry_points_name_the_command_and_nothing_of_a_host(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(name).decode().split() == ["[console_scripts]", "ckpt", "=", "ckpt_core.cli:main"]


def expanded(extra: str) -> set[str]:
    """Names of the distributions an extra stands for, with references to other extras resolved."""
    requirements = [Requirement(text) for text in PROJECT["optional-dependencies"][extra]]
    own = {r.name.lower() for r in requirements if r.name != PROJECT["name"]}
    return own.union(*(expanded(e) for r in requirements if r.name == PROJECT["name"] for e in r.extras))


def test_every_extra_of_the_project_is_offered_with_all_its_requirements(metadata):
    offered = metadata.get_all("Provides-Extra") or []
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    assert set(offered) == set(PROJECT["optional-dependencies"])
    for extra in offered:
        got = {r.name.lower() for r in requirements if r.marker and r.marker.evaluate({"extra": extra})}
        assert got == expanded(extra), extra


def test_what_only_a_checkout_needs_is_offered_to_nobody(metadata):
    offered = set(metadata.get_all("Provides-Extra") or [])
    assert not offered & {"dev", "bench", "release"}
    assert {name for name in PYPROJECT["dependency-groups"] if name in offered} == set()
    assert {"dev", "bench", "release"} <= set(PYPROJECT["dependency-groups"])


def test_links_of_the_readme_live_on_an_index_or_are_none(metadata):
    shown = str(metadata.get_payload())
    home = "https://repository.example"
    for text, alive in ((shown, ()), (hook().readme(README, home), (home,))):
        targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
        dead = [a or b for a, b in targets if not (a or b).startswith(("https://", "http://", "#", *alive))]
        assert dead == []
    assert f"({home}/blob/HEAD/SECURITY.md)" in hook().readme(README, home)
    assert metadata.get_all("Project-URL") is None, "an address that nobody gave"
    assert "SECURITY.md)" not in shown


def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_lower_bound_is_tried_as_it_stands():
    pins = {Requirement(each) for each in minima()}
    wanted = [
        Requirement(text)
        for text in (
            *PROJECT["dependencies"],
            *chain.from_iterable(PROJECT["optional-dependencies"].values()),
        )
    ]
    assert {each.name for each in pins} >= {each.name for each in wanted} - {PROJECT["name"]}
    for each in wanted:
        assert all(bound.operator == ">=" for bound in each.specifier), f"{each}: see docs/compatibility.md"


def test_the_page_of_compatibility_shows_the_versions_that_were_run():
    assert f"\n{table()}\n" in (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")


def test_extras_that_refer_to_the_project_itself_name_extras_that_exist():
    extras = PROJECT["optional-dependencies"]
    requirements = [Requirement(text) for wanted in extras.values() for text in wanted]
    own = {extra for r in requirements if r.name == PROJECT["name"] for extra in r.extras}
    assert own
    assert own <= set(extras)


@pytest.mark.slow
def test_importing_the_core_imports_no_framework():
    loaded = python(
        "-c", "import sys, ckpt_core; [getattr(ckpt_core, n) for n in dir(ckpt_core)]; print(*sys.modules)"
    )
    assert set(loaded.split()) & set(FRAMEWORKS) == set()


def test_the_project_names_no_package_index():
    tracked = [
        ROOT / name for name in ("pyproject.toml", "Makefile", ".ci/run", "CONTRIBUTING.md", "README.md")
    ]
    hosts = [
        path.name
        for path in tracked
        for word in ("index-url", "pypi.org", "://download")
        if word in path.read_text()
    ]
    assert hosts == []
