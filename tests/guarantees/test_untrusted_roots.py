"""An untrusted root chooses neither where to write, nor what to connect to, nor what runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_core.cli import main
from ckpt_core.commit import Catalog, begin, commit
from ckpt_core.names import OWN
from ckpt_core.storage import LocalStorage
from ckpt_core.tiers import TierRecord, write_tiers
from tests.unit.commit.checkpoints import manifest_of, save, write_files

pytestmark = pytest.mark.reliability

SECRET = "hunter2SECRET"


def tree(folder: Path) -> dict[str, bytes | str]:
    """Every entry below a directory, links as what they point to."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture
def untrusted(tmp_path):
    """A root from a stranger, whose one checkpoint is called as the test likes."""
    root = tmp_path / "untrusted"

    def make(name: str, *more: str) -> Path:
        storage, files = LocalStorage(root), {"__0_0.distcp": b"x", **dict.fromkeys(more, b"the attacker's")}
        working = begin(storage, "first", "00000008")
        write_files(storage, working, files)
        commit(storage, working, "first", manifest_of(8, files))
        (root / "first").rename(root / name)
        return root

    return make


@pytest.fixture
def project(tmp_path):
    """A directory of the user's, with his own files."""
    place = tmp_path / "project"
    for file in ("src/train.py", ".git/config", "notes", "cron.d/backup", "step-000000008/mine"):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text("the user's")
    return place


# --- where to write -----------------------------------------------------------------------------------------

STRANGE = [
    *(".git", "src", ".ssh", "..git", "...", "cron.d", "autostart", "torch", "site-packages", "notes"),
    *(
        "\uff0egit",
        "\u200c.git",
        "ste\u0440-000000008",
        "checkpoint-8\n",
        "checkpoint-8.d",
        ".ckpt",
    ),
    *("-rf", "checkpoint-\u0668", "CVS"),
]


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("form", ["{root}", "{root}@8"])
def test_a_copy_takes_no_name_that_the_root_chose_and_no_host_uses(untrusted, project, name, form, capsys):
    root, before = untrusted(name), tree(project)
    for target in (project, project / "new"):
        assert main(["cp", form.format(root=root), str(target)]) == 2
        assert "is not called as checkpoints are" in capsys.readouterr().err
        assert main(["upload", str(root), "--to", str(target)]) == 2
    assert tree(project) == before


@pytest.mark.parametrize(
    "name", ["checkpoint-8", "epoch=1-step=8.ckpt", "checkpoint_8", "last.ckpt", "epoch_3"]
)
def test_the_names_of_hosts_are_copied_as_they_are(untrusted, tmp_path, name):
    root = untrusted(name)
    for words in (
        ["cp", str(root), str(tmp_path / "one")],
        ["upload", str(root), "--to", str(tmp_path / "two")],
    ):
        assert main(words) == 0
        assert [info.name for info in Catalog(LocalStorage(words[-1])).committed()] == [name]


def test_a_name_of_the_users_own_is_copied_when_he_writes_it_unless_it_is_hidden(
    untrusted, tmp_path, project
):
    root = untrusted("my-best-model")
    assert main(["cp", f"{root}/my-best-model", str(tmp_path / "to")]) == 0
    assert [info.name for info in Catalog(LocalStorage(tmp_path / "to")).committed()] == ["my-best-model"]
    (root / "newest").symlink_to("my-best-model")
    assert main(["cp", f"{root}/newest", str(tmp_path / "other")]) == 2  # the link has chosen the name
    (root / "my-best-model").rename(root / ".git")
    before = tree(project)
    assert main(["cp", f"{root}/.git", str(project)]) == 2
    assert tree(project) == before


@pytest.mark.parametrize("kind", ["directory", "file", "link", "dangling link", "empty directory"])
def test_a_copy_joins_nothing_that_is_no_checkpoint(untrusted, tmp_path, kind, capsys):
    root, target, name = untrusted("step-000000008"), tmp_path / "target", "step-000000008"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("the user's")
    target.mkdir()
    if "link" in kind:
        (target / name).symlink_to(tmp_path / "nothing" if "dangling" in kind else elsewhere)
    elif kind == "file":
        (target / name).write_text("the user's")
    else:
        (target / name).mkdir()
        if kind == "directory":
            (target / name / "manifest.json").write_text("the user's")
    before = tree(target), tree(elsewhere)
    for words in (["cp", str(root), str(target)], ["upload", str(root), "--to", str(target)]):
        assert main(words) in {1, 2}
        assert "was not touched" in capsys.readouterr().err
    assert (tree(target), tree(elsewhere)) == before
    assert sorted(path.name for path in target.iterdir()) == [name]


@pytest.mark.parametrize("path", [".git/config", ".envrc", "sub/.ssh/authorized_keys", ".git/.metadata"])
def test_no_file_that_other_programs_read_by_its_hidden_name_is_copied(untrusted, tmp_path, path, capsys):
    root = untrusted("step-000000008", ".metadata", path)
    assert main(["cp", str(root), str(tmp_path / "to")]) == 1
    assert f"hidden files, which other programs may read: {path}" in capsys.readouterr().out
    assert not [file for file in tree(tmp_path / "to") if not file.startswith(OWN)]


def test_upload_writes_to_no_place_that_the_user_has_not_named(untrusted, project, capsys):
    root, before = untrusted("step-000000008"), tree(project)
    for url in (str(project), f"file://{project}", f"local://{project}/new", "/etc", f"{root}/../project"):
        write_tiers(LocalStorage(root), [TierRecord(url=url, due=["step-000000008"])])
        for words in (["upload", str(root)], ["upload", str(root), "--all", "--take-over"]):
            assert main(words) == 2
            assert f"names {url}; the writer of that root chose it" in capsys.readouterr().err
    assert tree(project) == before


# --- what to connect to -------------------------------------------------------------------------------------


class Canary:
    """A server on loopback that notes whoever comes, and what is said."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.heard = b""
        self.visits = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError:
                return
            self.visits += 1
            with visitor:
                visitor.sendall(b"220 welcome\r\n")
                visitor.settimeout(1)
                try:
                    while text := visitor.recv(4096):
                        self.heard += text
                        visitor.sendall(b"331 go on\r\n")
                except OSError:
                    continue

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def canary():
    server = Canary()
    yield server
    server.close()


COMMANDS = [
    *("ls {root}", "ls {root} --json", "show {root}", "verify {root}", "verify {root} --all", "du {root}"),
    *("report {root}", "diff {root} --steps 8 9", "prune {root} --keep-latest 1", "prune {root} --bad"),
    *("pin {root}@8 --reason x", "unpin {root}@8", "mark {root}@8 bad --reason x", "upload {root}"),
    *("upload {root} --to {to}", "cp {root} {to}", "cp {root}@8 {to}", "ls {root} --tier {to}"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_connects_to_what_only_the_root_names(untrusted, tmp_path, canary, monkeypatch, command):
    root = untrusted("step-000000008")
    save(LocalStorage(root), 9)
    places = [f"{scheme}://127.0.0.1:{canary.port}/x" for scheme in ("ftp", "http", "sftp", "webhdfs")]
    tiers = [
        TierRecord(url=url, due=["step-000000009"])
        for url in [*places, *(f"{places[0]}{n}" for n in range(40))]
    ]
    write_tiers(LocalStorage(root), tiers)
    monkeypatch.setenv("CKPT_SUITE_STORAGE_OPTIONS", json.dumps({"username": "me", "password": SECRET}))
    words = [word.format(root=root, to=tmp_path / "to") for word in command.split()]
    main([*words, "--storage-option", f"token={SECRET}"])
    assert (canary.visits, canary.heard) == (0, b"")


def test_what_the_user_asks_for_is_asked_without_his_options_unless_he_names_it(
    untrusted, canary, monkeypatch, capsys
):
    root = untrusted("step-000000008")
    url = f"ftp://127.0.0.1:{canary.port}/x"
    write_tiers(LocalStorage(root), [TierRecord(url=url)])
    monkeypatch.setenv("CKPT_SUITE_STORAGE_OPTIONS", json.dumps({"username": "me", "password": SECRET}))
    assert main(["ls", str(root)]) == 0
    assert f"not asked: {url}: `ckpt ls {root} --tier {url}`" in capsys.readouterr().out
    main(["ls", str(root), "--tiers"])
    assert canary.visits > 0
    assert b"USER" in canary.heard
    assert b"me" not in canary.heard.replace(b"anonymous", b"").lower()
    assert SECRET.encode() not in canary.heard
    main(["ls", str(root), "--tier", url])
    assert SECRET.encode() in canary.heard  # the control: this server does hear passwords


def test_ls_says_what_tiers_json_says(untrusted, capsys):
    root = untrusted("step-000000008")
    write_tiers(LocalStorage(root), [TierRecord(url="nosuch://place", due=["step-000000008"])])
    assert main(["ls", str(root), "--json"]) == 0
    (tier,) = json.loads(capsys.readouterr().out)["tiers"]
    assert [each["state"] for each in tier["checkpoints"]] == ["waiting"]
    assert tier["problem"] is None


# --- what runs ----------------------------------------------------------------------------------------------

GIT = shutil.which("git")
needs_git = pytest.mark.skipif(GIT is None, reason="git is not installed")
HOOKS = ("post-index-change", "pre-commit", "post-checkout", "fsmonitor-watchman", "reference-transaction")

ASKS = """
from ckpt_core.provenance import code_version
print(code_version().version or None, code_version().dirty)
"""
SAVES = f"""
import sys, torch
from ckpt_core import CheckpointManager
with CheckpointManager(sys.argv[1]) as checkpoints:
    checkpoints.save(1, {{"x": torch.zeros(4)}}).result()
{ASKS}
"""


def git(directory: Path, *words: str) -> str:
    command = [GIT, "-C", str(directory), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def trapped(place: Path, ran: Path) -> str:
    """A repository of which everything that it can name runs a program; its commit."""
    place.mkdir()
    git(place, "init", "-q")
    (place / "train.py").write_text(ASKS)
    (place / "data.x").write_text("one")
    git(place, "add", ".")
    git(place, "commit", "-qm", "one")
    trap = place / ".git" / "trap"
    trap.write_text(f'#!/bin/sh\necho "$0 $*" >> {ran}\ncat\n')
    trap.chmod(0o755)
    for hook in HOOKS:
        shutil.copy(trap, place / ".git" / "hooks" / hook)
    (place / ".gitattributes").write_text("*.x filter=f diff=d merge=m\n")
    (place / ".git" / "info" / "attributes").write_text("*.py filter=g diff=d\n")
    (place / ".git" / "more").write_text(f'[filter "f"]\n smudge = {trap}\n required = true\n')
    for name, value in {
        "filter.f.clean": trap, "filter.g.process": trap, "diff.d.textconv": trap, "diff.d.command": trap,
        "diff.external": trap, "core.fsmonitor": trap, "core.pager": trap, "pager.status": trap,
        "pager.rev-parse": trap, "alias.status": f"!{trap}", "alias.rev-parse": f"!{trap}",
        "core.hooksPath": place / ".git" / "hooks", "core.sshCommand": trap, "core.editor": trap,
        "credential.helper": trap, "core.askPass": trap, "gpg.program": trap, "include.path": "more",
        "remote.origin.url": f"ext::{trap}", "remote.origin.promisor": "true", "protocol.ext.allow": "always",
        "extensions.partialClone": "origin", "core.alternateRefsCommand": trap,
    }.items():  # fmt: skip
        git(place, "config", name, str(value))
    os.utime(place / "data.x", (1, 1))  # so that its content has to be looked at
    os.utime(place / "train.py", (1, 1))
    return (place / ".git" / "refs" / "heads" / git_branch(place)).read_text().strip()


def git_branch(place: Path) -> str:
    return (place / ".git" / "HEAD").read_text().strip().rpartition("/")[2]


def saved_from(script: Path, cwd: Path, root: Path, **variables: str) -> str:
    environment = {name: text for name, text in os.environ.items() if name != "CKPT_SUITE_CODE_VERSION"}
    done = subprocess.run(
        [sys.executable, str(script), str(root)], cwd=cwd, env={**environment, **variables},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@needs_git
def test_no_version_is_looked_for_in_the_current_directory(tmp_path):
    ran, script = tmp_path / "ran", tmp_path / "elsewhere.py"
    trapped(tmp_path / "archive", ran)
    ran.unlink(missing_ok=True)
    script.write_text(SAVES)
    assert saved_from(script, tmp_path / "archive", tmp_path / "run") == "None None"
    hostile = str(tmp_path / "archive" / ".git")
    assert (
        saved_from(script, tmp_path, tmp_path / "run2", GIT_DIR=hostile, GIT_WORK_TREE=str(tmp_path))
        == "None None"
    )
    assert not ran.exists()


@needs_git
def test_noting_the_version_runs_nothing_that_the_repository_names(tmp_path):
    ran = tmp_path / "ran"
    commit = trapped(tmp_path / "archive", ran)
    script = tmp_path / "archive" / "train.py"
    ran.unlink(missing_ok=True)
    assert saved_from(script, tmp_path / "archive", tmp_path / "run") == f"{commit} False"
    (tmp_path / "archive" / "data.x").write_text("two")
    assert saved_from(script, tmp_path, tmp_path / "run2") == f"{commit} True"
    # An object that is not there is asked of no remote.
    for pack in (tmp_path / "archive" / ".git" / "objects").glob("??/*"):
        pack.unlink()
    assert saved_from(script, tmp_path, tmp_path / "run3").startswith(commit)
    assert not ran.exists(), ran.read_text()
    itself = subprocess.Popen(
        [GIT, "-C", str(script.parent), "status"], stdout=subprocess.DEVNULL, start_new_session=True
    )
    with suppress(subprocess.TimeoutExpired):  # the trap does not answer git as it should
        itself.wait(2)
    os.killpg(itself.pid, signal.SIGKILL)
    itself.wait(60)
    assert ran.exists()  # the control: git itself does run them


@needs_git
def test_the_version_of_a_worktree_and_of_staged_changes_is_known_and_runs_nothing(tmp_path):
    place, ran = tmp_path / "plain", tmp_path / "ran"
    place.mkdir()
    git(place, "init", "-q")
    (place / "train.py").write_text(ASKS)
    git(place, "add", ".")
    git(place, "commit", "-qm", "one")
    git(place, "worktree", "add", "-q", str(tmp_path / "tree"))
    commit = git(place, "rev-parse", "HEAD")
    git(place, "config", "core.fsmonitor", f"touch {ran};")
    script = tmp_path / "tree" / "train.py"
    assert saved_from(script, tmp_path, tmp_path / "run") == f"{commit} False"
    (tmp_path / "tree" / "more.py").write_text("1")
    git(tmp_path / "tree", "-c", "core.fsmonitor=false", "add", ".")
    assert saved_from(script, tmp_path, tmp_path / "run2") == f"{commit} True"
    assert not ran.exists()


UPLOADS = """
import os, sys
sys.path[1:1] = os.environ.get("MORE", "").split(":") if "MORE" in os.environ else []
import psutil, torch
from ckpt_core import CheckpointManager, Upload
from ckpt_core.tiers import _copy_process
_copy_process._LEAST_BYTES = 0
hostile, place = sys.argv[1:]
os.chdir(hostile)
with CheckpointManager(place + "/root", upload=Upload(place + "/tier")) as checkpoints:
    checkpoints.save(1, {"x": torch.zeros(4)}).uploaded.result(100)
    print(["_copy_process:" in str(each.cmdline()) for each in psutil.Process().children()])
"""


@pytest.mark.parametrize("variables", [{}, {"MORE": "lib:.:"}, {"PYTHONPATH": "."}], ids=str)
def test_a_process_that_copies_imports_nothing_from_where_the_job_has_gone(tmp_path, variables):
    ran, hostile, clean = tmp_path / "ran", tmp_path / "hostile", tmp_path / "clean"
    clean.mkdir()
    names = (
        "dataclasses",
        "sitecustomize",
        "usercustomize",
        "signal",
        "json",
        "ckpt_core",
        "msgspec",
        "typing",
    )
    for name in names:
        for place in (hostile, hostile / "lib"):
            place.mkdir(exist_ok=True)
            (place / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write(__file__)")
    before = os.environ.get("PYTHONPATH", "")
    paths = variables.get("PYTHONPATH")
    environment = {**os.environ, **variables, "PYTHONPATH": before if paths is None else f"{paths}:{before}"}
    done = subprocess.run(
        [sys.executable, "-c", UPLOADS, str(hostile), str(tmp_path)],
        cwd=clean, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[True]\n"), done.stderr
    assert not ran.exists(), ran.read_text()
