"""`ckpt show` says where a checkpoint comes from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ckpt_core.cli import main
from ckpt_core.commit import begin, commit
from ckpt_core.names import step_name
from ckpt_core.storage import LocalStorage
from ckpt_core.types import CheckpointInfo, DataPosition, Parent, Provenance
from tests.unit.commit.checkpoints import manifest_of, write_files

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


def test_show_names_parent_run_code_and_data(capsys, storage):
    text, document = shown(capsys, storage.url)
    known = document["provenance"]
    assert known["parent"]["name"] == "step-000000003"
    assert (known["run_id"], known["code_version"], known["code_dirty"]) == ("bbbbbbbb", COMMIT, True)
    assert known["data"] == {"training": {"epoch": 4, "samples": 4000, "of": 60_000}}
    assert "parent:      step-000000003 (step 3)" in text
    assert f"code:        {COMMIT}, changed" in text
    assert "data:        epoch 4, 4,000 of 60,000 samples" in text


def test_what_began_here_has_no_parent_and_no_name_is_a_control_code(capsys, tmp_path):
    storage = LocalStorage(tmp_path / "run")
    save_with(storage, 1, Provenance(run_id="\x1b[31mr"))
    text, document = shown(capsys, storage.url)
    assert document["provenance"]["parent"] is None
    assert "parent:" not in text
    assert "\x1b" not in text
