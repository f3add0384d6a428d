"""The version of the code: found beside the training, and never waited for long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_core.provenance import CodeVersion, code_version, version_of_tree

GIT = shutil.which("git") or ""
needs_git = pytest.mark.skipif(not GIT, reason="git is not installed")


def git(directory: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    answer = subprocess.run(
        [GIT, "-C", str(directory), *named, *words], check=True, capture_output=True, env=environment
    )
    return answer.stdout.decode().strip()


def found(directory: Path) -> CodeVersion:
    return version_of_tree(GIT, str(directory))


@needs_git
def test_the_commit_is_named_and_whether_tracked_files_differ_from_it(tmp_path, monkeypatch):
    assert found(tmp_path) == CodeVersion()
    assert found(tmp_path / "missing") == CodeVersion()
    git(tmp_path, "init", "-q")
    assert found(tmp_path) == CodeVersion()  # nothing is committed yet
    (tmp_path / "package").mkdir()
    script = tmp_path / "package" / "train.py"
    script.write_text("print(1)\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another"))  # of a hook that started the training
    assert found(script.parent) == CodeVersion(commit, dirty=False)
    (tmp_path / "untracked").write_text("")
    os.utime(script, (1, 1))  # touched, not changed
    assert found(script.parent) == CodeVersion(commit, dirty=False)
    script.write_text("print(2)\n")
    assert found(script.parent) == CodeVersion(commit, dirty=True)


@pytest.mark.parametrize("words", ["exec sleep 600", "exit 1", "echo nonsense", "kill -9 $$"])
def test_git_that_hangs_or_fails_leaves_the_version_out(tmp_path, words):
    slow = tmp_path / "git"
    slow.write_text(f"#!/bin/sh\n{words}\n")
    slow.chmod(0o755)
    assert version_of_tree(str(slow), str(tmp_path)) == CodeVersion()
    assert version_of_tree(str(tmp_path / "missing"), str(tmp_path)) == CodeVersion()


@needs_git
def test_a_commit_is_known_though_its_changes_are_not(tmp_path):
    commit = "a" * 40
    half = tmp_path / "git"
    half.write_text(
        '#!/bin/sh\ncase "$*" in *rev-parse*) printf "/tree\\n/index\\n/objects\\n%s\\n" ' + commit + ";; "
        "*) exec sleep 600;; esac\n"
    )
    half.chmod(0o755)
    assert version_of_tree(str(half), str(tmp_path)) == CodeVersion(commit)


@pytest.mark.parametrize(
    ("named", "version"), [("", ""), (" v1.2-3-g0123456 ", "v1.2-3-g0123456"), ("a\nb" + "c" * 300, None)]
)
def test_what_the_user_names_is_taken_without_a_search(named: str, version: str | None, monkeypatch):
    monkeypatch.setenv("CKPT_SUITE_CODE_VERSION", named)
    monkeypatch.setattr(shutil, "which", lambda _: pytest.fail("nothing is to be looked for"))
    code_version.cache_clear()
    result = code_version()
    code_version.cache_clear()
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
