"""`ckpt show` follows the parents of a checkpoint, as far as they are there."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ckpt_core.cli import main
from ckpt_core.commit import Catalog, begin, commit, remove
from ckpt_core.names import step_name
from ckpt_core.storage import LocalStorage
from ckpt_core.types import CheckpointInfo, DataPosition, Parent, Provenance
from tests.unit.commit.checkpoints import manifest_of, save, write_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def save_with(storage: LocalStorage, step: int, known: Provenance) -> CheckpointInfo:
    name = step_name(step)
    working = begin(storage, name, f"{step:08x}")
    write_files(storage, working)
    return commit(storage, working, name, replace(manifest_of(step), provenance=known))


@pytest.fixture
def storage(tmp_path) -> LocalStorage:
    """A root with steps 1 to 4, each the parent of the next; step 3 is of another start of the job."""
    storage = LocalStorage(tmp_path / "run")
    parent = None
    for step in (1, 2, 3, 4):
        known = Provenance(
            parent=parent,
            run_id="aaaaaaaa" if step < 3 else "bbbbbbbb",
            code_version=COMMIT,
            code_dirty=step == 4,
            configuration_sha256="c" * 64,
            data={"training": DataPosition(epoch=step, samples=1000 * step, of=60_000)},
        )
        parent = Parent.of(save_with(storage, step, known))
    return storage


def shown(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[str, dict[str, Any]]:
    assert main(["show", *map(str, arguments)]) == 0
    text = capsys.readouterr().out
    assert main(["show", *map(str, arguments), "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


def states(document: dict[str, Any]) -> list[tuple[int, str]]:
    return [(link["step"], link["state"]) for link in document["chain"]]


def test_the_chain_has_step_time_run_code_and_data(capsys, storage):
    text, document = shown(capsys, storage.url)
    assert states(document) == [(4, "here"), (3, "here"), (2, "here"), (1, "here")]
    assert [link["run_id"] for link in document["chain"]] == ["bbbbbbbb"] * 2 + ["aaaaaaaa"] * 2
    assert document["chain"][0]["code_dirty"] is True
    assert document["chain"][1]["created_utc"] == "2023-11-14T22:13:23.000+00:00"
    assert document["provenance"]["parent"]["name"] == "step-000000003"
    assert document["provenance"]["data"] == {"training": {"epoch": 4, "samples": 4000, "of": 60_000}}
    rows = [line.split() for line in text.splitlines() if "<- step" in line]
    assert [row[:3] for row in rows] == [[str(step), "<-", f"step-00000000{step}"] for step in (3, 2, 1)]
    assert f"code:        {COMMIT}, changed" in text
    assert "data:        epoch 4, 4,000 of 60,000 samples" in text
    assert "began here" in text


def test_as_many_parents_are_followed_as_asked_for(capsys, storage):
    assert states(shown(capsys, storage.url, "--chain", 1)[1]) == [(4, "here"), (3, "here")]
    text, document = shown(capsys, storage.url, "--step", 2, "--chain", 0)
    assert states(document) == [(2, "here")]
    assert "CHAIN" not in text
    with pytest.raises(SystemExit) as usage:
        main(["show", storage.url, "--chain", "-1"])
    assert usage.value.code == 2


def test_a_chain_ends_where_a_parent_is_gone_or_another(capsys, storage):
    catalog = Catalog(storage)
    newest = storage.url, "--step", 4
    remove(storage, catalog.find(step=2))
    text, document = shown(capsys, *newest)
    assert states(document) == [(4, "here"), (3, "here"), (2, "pruned")]
    assert "not in this root any more" in text
    save(storage, 2)  # of the same save id, and with another manifest
    assert states(shown(capsys, *newest)[1]) == [(4, "here"), (3, "here"), (2, "altered")]
    path = storage.local_path("step-000000003/manifest.json")
    path.write_bytes(path.read_bytes().replace(b"a test", b"a tesT"))
    assert states(shown(capsys, *newest)[1]) == [(4, "here"), (3, "unreadable")]


def test_a_parent_in_another_root_is_said_to_be_there(capsys, storage):
    elsewhere = Parent(name="best", step=9, save_id="e", manifest_sha256="f" * 64, elsewhere=True)
    save_with(storage, 10, Provenance(parent=elsewhere, run_id="r"))
    text, document = shown(capsys, storage.url)
    assert states(document) == [(10, "here"), (9, "elsewhere")]
    assert "in another root" in text


def test_a_name_that_another_save_has_is_no_parent(capsys, storage):
    parent = Parent(name="step-000000001", step=1, save_id="another", manifest_sha256="f" * 64)
    save_with(storage, 10, Provenance(parent=parent, run_id="r"))
    assert states(shown(capsys, storage.url)[1]) == [(10, "here"), (1, "replaced")]


def test_a_circle_which_no_save_makes_ends(capsys, tmp_path):
    storage = LocalStorage(tmp_path / "run")
    own = Parent(name="step-000000001", step=1, save_id=f"{1:08x}", manifest_sha256="f" * 64)
    save_with(storage, 1, Provenance(parent=own, run_id="\x1b[31mr"))
    text, document = shown(capsys, storage.url)
    assert states(document) == [(1, "here")]
    assert "\x1b" not in text
