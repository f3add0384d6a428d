"""Names on disk: what is written is recognised, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core import names


@given(step=st.integers(0, 10**12))
def test_a_step_survives_its_name(step):
    assert names.parse_step_name(names.step_name(step)) == step


@given(left=st.integers(0, 10**9 - 1), right=st.integers(0, 10**9 - 1))
def test_names_sort_like_steps(left, right):
    assert (names.step_name(left) < names.step_name(right)) == (left < right)


@pytest.mark.parametrize(
    "name",
    [
        "step-5",
        "step-0000000005",
        "step-00000005",
        "step-000000005 ",
        "step-000000005\n",
        "xstep-000000005",
        "step--00000005",
        "step-" + 8 * "\u0660" + "\u0665",
        "step-000000005.incomplete-0123abcd",
        "step-000000005.trash-0123abcd",
        "checkpoint-5",
        "",
    ],
)
def test_only_our_own_spelling_is_a_step(name):
    assert names.parse_step_name(name) is None


def test_incomplete_and_trash_are_told_apart_and_from_checkpoints():
    name, mark = names.step_name(5), "0123abcd"
    incomplete, trash = names.incomplete_name(name, mark), names.trash_name(name, mark)
    kinds = [(names.is_incomplete(n), names.is_trash(n)) for n in (name, incomplete, trash)]
    assert kinds == [(False, False), (True, False), (False, True)]


def test_a_name_in_flight_of_a_name_in_flight_is_of_the_checkpoint():
    torn = names.incomplete_name("last.ckpt", "0123abcd")
    assert names.original_name(names.trash_name(torn, "4567abcd")) == "last.ckpt"


@pytest.mark.parametrize(
    "name", ["lit_model.pth", "last.ckpt", "checkpoint-8", "epoch=1-step=8.ckpt", "step-000000005"]
)
def test_no_pattern_by_which_others_look_for_checkpoints_finds_one_in_flight(tmp_path, name):
    makers = (*(names.incomplete_name, names.trash_name, names.replaced_name, names.aside_name),)
    for make in makers:
        (tmp_path / "run" / make(name, "0123abcd")).mkdir(parents=True)
    suffix = Path(name).suffix or "-8"
    for pattern in (f"*{suffix}", f"**/*{suffix}", "checkpoint*", "step-*", "epoch=*", f"*/{name}"):
        assert not list(tmp_path.rglob(pattern)), pattern


@pytest.mark.parametrize("name", ["x" * 255, "\udcff" * 100, "\u6a21" * 85])
def test_a_name_beside_fits_and_can_be_made(tmp_path, name):
    (tmp_path / names.beside_name(name, "0123abcd")).touch()


@pytest.mark.parametrize(
    "name", ["step-000000005.incomplete-", "x.incomplete-XYZ12345", "my.trash-bin", ".trash-", ".trash-1000"]
)
def test_a_persons_own_directory_is_not_mistaken_for_ours(name):
    assert not names.is_incomplete(name)
    assert not names.is_trash(name)


def test_file_names_are_those_of_format_version_2():
    assert names.FORMAT_VERSION == 2
    assert (names.MARKER, names.MANIFEST, names.METADATA) == ("COMMITTED", "manifest.json", ".metadata")
    assert (names.SHARED, names.PINS, names.DAMAGED) == (
        "shared.json",
        ".ckpt-suite/pins.json",
        ".ckpt-suite/damaged.json",
    )
    assert names.step_name(1000) == "step-000001000"
    assert names.rank_name(7) == "rank-00007.json"
    assert names.data_name(12, 3) == "__12_3.distcp"


def test_the_rank_of_a_data_file_is_in_its_name():
    assert names.chunks_name(3) == "chunks-00003.json.z"
    for path in ("__12_3.distcp", "optimizer_0/__12_0.distcp"):
        assert names.data_rank(path) == 12
    for path in ("__12_3.distcp.x", "_12_3.distcp", "__x_3.distcp", "rank-00012.json", "__12_3.distcp/y"):
        assert names.data_rank(path) is None
