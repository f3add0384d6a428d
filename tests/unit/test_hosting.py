"""What hosts share: one rule for paths, managers by root, and a close at exit."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import ConfigError, KeepAll, KeepBest, KeepLatest, SaveError
from ckpt_core.commit import Occupant
from ckpt_core.hosting import (
    CheckpointPath,
    ManagersByRoot,
    RunRoot,
    attach,
    attached_to,
    detach,
    kind_of,
    ranking,
    replaced,
    root_of,
)
from ckpt_core.policies import leaves
from ckpt_core.storage import LocalStorage
from tests.kit.memory import MemoryStorage
from tests.unit.commit.checkpoints import save


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a root, and links to both."""
    (tmp_path / "home" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "home")
    (tmp_path / "current").symlink_to("home/run")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path


SPELLINGS = [
    "{0}/home/run",
    "{0}/home/run/",
    "{0}/home/x/../run/.",
    "{0}/link/run",
    "{0}/current",
    "file://{0}/link/run",
    "local://{0}/home/run/",
    "run",
    "./run",
    "~/run",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_directory_is_one_root(here: Path, spelling: str) -> None:
    root = str(here / "home" / "run")
    written = spelling.format(here)
    assert root_of(written) == root_of(Path(root)) == root
    assert CheckpointPath.of(f"{written.rstrip('/')}/step-1") == CheckpointPath(root, "step-1")
    assert RunRoot.of(written) == RunRoot(root)


def test_a_root_stays_where_it_was_given_whatever_becomes_of_links_and_the_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_link, relative = RunRoot.of(here / "current"), RunRoot.of("run")
    (here / "current").unlink()
    (here / "current").symlink_to("elsewhere")
    monkeypatch.chdir(here)
    assert {by_link.path, relative.path} == {str(here / "home" / "run")}


@pytest.mark.parametrize(
    ("written", "root", "name"),
    [
        ("s3://bucket/run/step-1", "s3://bucket/run", "step-1"),
        ("s3://bucket/run/step-1//", "s3://bucket/run", "step-1"),
        ("s3://bucket/step-1", "s3://bucket", "step-1"),
        ("simplecache::s3://bucket/run/x", "simplecache::s3://bucket/run", "x"),
        ("memory://run/x", "memory://run", "x"),
        ("/step-1", "/", "step-1"),
    ],
)
def test_the_url_of_an_object_store_is_split_as_it_is_written(written: str, root: str, name: str) -> None:
    place = CheckpointPath.of(written)
    assert (place.root, place.name) == (root, name)
    assert str(place) == written.rstrip("/")


@pytest.mark.parametrize("name", ["latest", "dangling", ".hidden", "a:b"])
def test_the_name_of_a_checkpoint_is_taken_as_written_links_included(here: Path, name: str) -> None:
    (here / "home" / "run" / "latest").symlink_to("step-1")
    (here / "home" / "run" / "dangling").symlink_to("nowhere")
    assert CheckpointPath.of(here / "link" / "run" / name) == CheckpointPath(str(here / "home" / "run"), name)


def test_dots_are_no_names(here: Path) -> None:
    place = CheckpointPath(str(here / "home"), "run")
    (here / "home" / "run" / "below").mkdir()
    assert [CheckpointPath.of("run/."), CheckpointPath.of("run/below/..")] == [place, place]


@pytest.mark.parametrize("written", ["s3://bucket", "s3://bucket/", "/", "", 5, None, b"run/x"])
def test_what_cannot_be_a_checkpoint_is_refused(written: Any) -> None:
    with pytest.raises(ConfigError):
        CheckpointPath.of(written)


@pytest.mark.parametrize("written", ["", "s3:/bucket/run", "$SCRATCH/run", "~nobody-of-that-name/run"])
def test_what_cannot_be_a_root_is_refused_as_by_a_manager(written: str) -> None:
    with pytest.raises(ConfigError):
        root_of(written)


def test_a_storage_given_as_the_root_is_opened_as_it_is(tmp_path: Path) -> None:
    given = MemoryStorage()
    run = RunRoot.of(given)
    assert run.opens(given.url) is given
    assert run.opens(str(tmp_path)) == str(tmp_path)
    local = LocalStorage(tmp_path / "x" / ".." / "run")
    assert RunRoot.of(local).opens(str(tmp_path / "run")) is local


def test_the_kind_of_a_directory_is_what_a_host_would_do_with_it(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = save(storage, 1).name
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / "optimizer.bin").touch()
    (tmp_path / "notes").mkdir()
    found = {
        each: kind_of(storage, each)
        for each in (name, ".incomplete-deadbeef-step-000000002", "stock", "notes")
    }
    assert list(found.values()) == [Occupant.COMMITTED, Occupant.TORN, Occupant.STOCK, Occupant.NOTHING]


class Managed:
    def __init__(self, root: str, closed: list[str], *, failing: bool = False) -> None:
        self.root, self._closed, self._failing = root, closed, failing

    def wait(self) -> None:
        self._closed.append(f"waited {self.root}")

    def close(self, *, wait_for_uploads: bool = True) -> None:
        assert wait_for_uploads
        self._closed.append(self.root)
        if self._failing:
            raise SaveError(f"{self.root} failed")


def test_each_root_has_one_manager_on_one_coordinator_until_they_are_closed() -> None:
    made: list[tuple[str, Any]] = []

    def make(root: str, coordinator: Any) -> Any:
        made.append((root, coordinator))
        return Managed(root, [])

    managers = ManagersByRoot(make, deadline_seconds=60)
    first = managers.at("a")
    assert managers.at("a") is first
    managers.at("b")
    assert managers.roots == ["a", "b"]
    assert next(iter(managers)) is first
    managers.close()
    assert managers.roots == []
    managers.at("a")
    managers.close()
    managers.close()
    (_, one), (_, same), (_, other) = made
    assert one is same is not other


def test_a_manager_that_fails_to_close_keeps_no_other_open() -> None:
    closed: list[str] = []
    managers = ManagersByRoot(
        lambda root, _: Managed(root, closed, failing=root != "b"),  # type: ignore[arg-type,return-value]
        deadline_seconds=60,
    )
    for root in "abc":
        managers.at(root)
    with pytest.raises(SaveError, match="a failed"):
        managers.close()
    assert sorted(closed) == ["a", "b", "c"]
    assert managers.roots == []


def test_before_a_save_only_those_of_other_roots_are_waited_for() -> None:
    seen: list[str] = []
    managers = ManagersByRoot(lambda root, _: Managed(root, seen), deadline_seconds=60)  # type: ignore[arg-type,return-value]
    kept = [managers.at(root) for root in "abc"][1]
    managers.wait(but=kept)
    assert seen == ["waited a", "waited c"]
    managers.wait()
    assert seen[2:] == ["waited a", "waited b", "waited c"]
    managers.close()


class Host:
    def save(self) -> str:
        return "the host's"

    def load(self) -> str:
        return "the host's"


class Ours:
    def save(self) -> str:
        return "ours"

    def close(self) -> None:
        """Nothing is in flight."""


def users() -> str:
    return "the user's"


@pytest.mark.parametrize("own", [{}, {"save": users}, {"load": users}], ids=["none", "replaced", "another"])
def test_what_is_detached_and_what_is_copied_has_the_methods_that_it_had(own: dict[str, Any]) -> None:
    host, ours = Host(), Ours()
    vars(host).update(own)
    before = host.save(), host.load()
    attach(host, ours, {"save": ours.save})
    assert (host.save(), host.load()) == ("ours", before[1])
    assert attached_to(host) is ours
    for made in (copy.deepcopy(host), pickle.loads(pickle.dumps(host))):
        assert attached_to(made) is None
        assert (made.save(), made.load()) == before
        assert detach(made) is None
    assert detach(host) is ours
    assert (host.save(), host.load()) == before
    assert vars(host) == own
    assert attached_to(host) is detach(host) is None


@pytest.mark.parametrize("own", [{}, {"save": users}, {"save": users, "extra": 1}])
def test_what_is_replaced_for_a_while_is_as_before_whatever_happens(own: dict[str, Any]) -> None:
    host = Host()
    vars(host).update(own)
    with suppress(ConfigError), replaced(host, save=Ours().save, load=users, new=2):
        assert (host.save(), host.load(), vars(host)["new"]) == ("ours", "the user's", 2)
        raise ConfigError("it ends here")
    assert vars(host) == own


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "kept"), [(False, True), (True, True), (False, False)])
def test_what_is_still_alive_at_exit_is_closed_and_its_failure_logged(*, failing: bool, kept: bool) -> None:
    code = (
        "import sys\n"
        "from ckpt_core.errors import SaveError\n"
        "from ckpt_core.hosting import close_at_exit\n"
        "class Saves:\n"
        "    def close(self):\n"
        "        print('closed')\n"
        f"        if {failing}: raise SaveError('step 3 was not saved')\n"
        "saves = Saves()\n"
        "close_at_exit(saves)\n"
        f"if not {kept}: del saves\n"
        "assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert ended.stdout == ("closed\n" if kept else "")
    assert ("step 3 was not saved" in ended.stderr) == (failing and kept)


def test_policies_are_taken_apart_into_those_that_were_joined() -> None:
    best, latest, everything = KeepBest("loss"), KeepLatest(2), KeepAll()
    assert list(leaves((best | latest) & everything)) == [best, latest, everything]
    assert list(leaves(best)) == [best]
    assert list(leaves(None)) == []
    assert ranking((best | latest) & everything) == [best]
    assert ranking(None) == ranking(latest) == []
