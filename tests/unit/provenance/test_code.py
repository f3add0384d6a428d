"""The version of the code: found beside the training, and never waited for long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.provenance._code import PATIENCE_SECONDS, CodeSearch, CodeVersion, version_of_tree
from ckpt_core.testing import FakeClock

GIT = shutil.which("git") or ""
needs_git = pytest.mark.skipif(not GIT, reason="git is not installed")


def git(directory: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    answer = subprocess.run(
        [GIT, "-C", str(directory), *named, *words], check=True, capture_output=True, env=environment
    )
    return answer.stdout.decode().strip()


def found(directory: Path) -> list[CodeVersion]:
    return list(version_of_tree(GIT, str(directory)))


@needs_git
def test_the_commit_is_named_and_whether_tracked_files_differ_from_it(tmp_path, monkeypatch):
    assert found(tmp_path) == []
    assert found(tmp_path / "missing") == []
    git(tmp_path, "init", "-q")
    assert found(tmp_path) == []  # nothing is committed yet
    (tmp_path / "package").mkdir()
    script = tmp_path / "package" / "train.py"
    script.write_text("print(1)\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another"))  # of a hook that started the training
    assert found(script.parent) == [CodeVersion(commit), CodeVersion(commit, dirty=False)]
    (tmp_path / "untracked").write_text("")
    os.utime(script, (1, 1))  # touched, not changed
    assert found(script.parent)[-1] == CodeVersion(commit, dirty=False)
    script.write_text("print(2)\n")
    assert found(script.parent)[-1] == CodeVersion(commit, dirty=True)


def test_a_search_that_hangs_is_waited_for_once_and_not_long():
    clock, hangs = FakeClock(), threading.Event()

    def find() -> Iterator[CodeVersion]:
        yield CodeVersion("a" * 40)
        hangs.wait()
        yield CodeVersion("a" * 40, dirty=True)

    search = CodeSearch(find, clock=clock)
    try:
        clock.advance(PATIENCE_SECONDS)
        assert search.result() in {CodeVersion(), CodeVersion("a" * 40)}  # now, without the rest
    finally:
        hangs.set()
    search._ended.wait(60)
    assert search.result() == CodeVersion("a" * 40, dirty=True)


def test_a_search_that_fails_finds_nothing_and_says_nothing():
    def find() -> Iterator[CodeVersion]:
        raise PermissionError("git")

    assert CodeSearch(find).result() == CodeVersion()


@pytest.mark.parametrize(
    ("named", "version"), [("", ""), (" v1.2-3-g0123456 ", "v1.2-3-g0123456"), ("a\nb" + "c" * 300, None)]
)
def test_what_the_user_names_is_taken_without_a_search(named: str, version: str | None):
    def find() -> Iterator[CodeVersion]:
        pytest.fail("nothing is to be looked for")

    result = CodeSearch(find, named=named).result()
    assert result.dirty is None
    assert result.version.isprintable()
    assert len(result.version) <= 200
    if version is not None:
        assert result.version == version


ASKS = """
import sys
from ckpt_core.provenance import code_version
found = code_version()
print(found.version, found.dirty, "torch" in sys.modules)
"""


@needs_git
def test_a_process_knows_the_version_of_its_script(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text(ASKS)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    environment = {name: text for name, text in os.environ.items() if name != "CKPT_SUITE_CODE_VERSION"}

    def run(**variables: str) -> str:
        command = [sys.executable, str(tmp_path / "train.py")]
        variables = {**environment, **variables}
        done = subprocess.run(
            command, cwd="/", env=variables, capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout.strip()

    assert run() == f"{git(tmp_path, 'rev-parse', 'HEAD')} False False"
    assert run(CKPT_SUITE_CODE_VERSION="image-7") == "image-7 None False"
