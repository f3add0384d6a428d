"""Tensors that are made of others: stored as stock DCP stores them, and loaded by their parts."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from ckpt_core import CheckpointManager
from ckpt_core._torch_internals import inner_tensors
from ckpt_core.dcp import Image, ImageLayout, WrapMismatchError, fillings, load_chunk
from ckpt_core.dcp._fingerprints import Fingerprints, sample
from ckpt_core.dcp._image import specs_of
from ckpt_core.dcp._plan import Kinds, check_kind
from ckpt_core.dcp._wrapped_tensors import wrapped_pickle
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError, SaveError
from tests.unit.dcp.saved_entries import stored_crc
from tests.unit.dcp.tensors import content
from tests.unit.dcp.wrappers import Blocks, Pair, Unknown
from tests.unit.dcp.writing import copy_into


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    """As a library does at its import."""
    with torch.serialization.safe_globals([Blocks, Pair]):
        yield


def bits(tensor: torch.Tensor) -> list[tuple[str, bytes]]:
    return [(name, content(inner)) for name, inner in inner_tensors(tensor)]


def state_of(seed: int) -> dict[str, torch.Tensor]:
    return {
        "plain": torch.full((3,), float(seed)),
        "blocks": Blocks.filled(8, 16, 8, seed=seed, context={"signed": True}),
        "large": Blocks.filled(1200, 1024, 256, seed=seed),
        "pair": Pair.filled(seed),
    }


@pytest.fixture(scope="module", params=["blocking", "overlapped"])
def saved(request: Any, tmp_path_factory: Any) -> Path:
    root: Path = tmp_path_factory.mktemp(request.param)
    with (
        torch.serialization.safe_globals([Blocks, Pair]),
        CheckpointManager(root, staging=request.param) as checkpoints,
    ):
        checkpoints.save(1, state_of(1))
        checkpoints.save(2, state_of(2))
        assert checkpoints.verify() == []
    return root


@pytest.mark.parametrize("step", [1, 2])
def test_every_part_is_loaded_bit_for_bit(saved, step):
    live = state_of(0)
    CheckpointManager(saved).load(live, step=step)
    assert {name: bits(value) for name, value in live.items()} == {
        name: bits(value) for name, value in state_of(step).items()
    }


def test_stock_dcp_reads_them_and_we_read_those_of_stock_dcp(saved, tmp_path):
    live = state_of(0)
    del live["pair"]  # its class cannot be copied into
    dcp.load(live, checkpoint_id=saved / "step-000000002")
    wanted = {name: bits(value) for name, value in state_of(2).items() if name in live}
    assert {name: bits(value) for name, value in live.items()} == wanted
    dcp.save(live, checkpoint_id=tmp_path / "stock")
    fresh = {name: value for name, value in state_of(0).items() if name in live}
    CheckpointManager(tmp_path).load(fresh, name="stock")
    assert {name: bits(value) for name, value in fresh.items()} == wanted


def test_the_chunk_is_one_torch_zip_with_a_checksum_for_every_part():
    index, tensor = MetadataIndex("w", (0, 0)), Pair.filled(3)
    specs, record = specs_of(index, tensor)
    layout = ImageLayout([*specs, (MetadataIndex("v"), torch.uint8, (3,))], {index: record or b""})
    image = Image(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8))
    copy_into(image, {index: tensor, MetadataIndex("v"): torch.ones(3, dtype=torch.uint8)})
    data = b"".join(map(bytes, image.pieces()))
    chunks = [data[start:end] for start, end in layout.spans.tolist()]
    assert sum(map(len, chunks)) == len(data)
    assert zipfile.ZipFile(io.BytesIO(chunks[0])).testzip() is None
    stored_crc(chunks[1], 3)
    assert bits(torch.load(io.BytesIO(chunks[0]), weights_only=True)) == bits(tensor)
    assert layout.slots[1].payload % 64 == 0


def test_the_64_bit_fields_of_zip_are_used_for_far_and_for_large_parts():
    index, tensor = MetadataIndex("w", (0, 0)), Blocks.filled(64, 64, 64)
    specs, record = specs_of(index, tensor)
    layout = ImageLayout(specs, {index: record or b""}, zip64_from=4096)
    image = Image(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8))
    copy_into(image, {index: tensor})
    data = b"".join(map(bytes, image.pieces()))
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    assert bits(torch.load(io.BytesIO(data), weights_only=True)) == bits(tensor)
    assert bits(load_chunk(data, "w")) == bits(tensor)


class Secret:
    """A context that torch may not unpickle."""


def hidden() -> torch.Tensor:
    made = Blocks.filled(4, 4, 4)
    made.context = {"beside": torch.ones(2)}
    return made


REFUSED = {
    "its class": (lambda: Unknown.filled(4, 4, 4), "tests.unit.dcp.wrappers.Unknown, which is not on"),
    "its context": (lambda: Blocks.filled(4, 4, 4, context=Secret()), "Secret, which is not on"),
    "a hidden tensor": (hidden, "a tensor that its __tensor_flatten__ does not name"),
    "a part": (
        lambda: Blocks(torch.ones(4, 4), torch.ones(1).expand(4), torch.ones(1)),
        "w.scale is expanded",
    ),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_no_load_could_rebuild_is_refused_at_the_first_save(make, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        check_kind(make(), "w")
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(SaveError, match=reason):
        checkpoints.save(1, {"w": make()})


def test_another_context_or_another_inner_shape_is_another_plan():
    kinds = Kinds([Blocks.filled(4, 4, 4, context=[True])])
    assert kinds.fit([Blocks.filled(4, 4, 4, seed=1, context=[True])])
    assert not kinds.fit([Blocks.filled(4, 4, 4, context=[False])])
    assert not kinds.fit([Blocks.filled(4, 4, 8, context=[True])])
    assert not kinds.fit([torch.ones(4, 4)])
    assert not Kinds([torch.ones(4, 4)]).fit([Blocks.filled(4, 4, 4)])


@pytest.mark.parametrize("name", ["codes", "scale", "table"])
def test_replicas_that_differ_in_one_part_are_told_apart(name):
    one, other = Blocks.filled(4, 4, 4), Blocks.filled(4, 4, 4)
    assert Fingerprints([one]).encode() == Fingerprints([other]).encode()
    getattr(other, name).view(-1)[0] += 1
    assert Fingerprints([one]).encode() != Fingerprints([other]).encode()
    assert any(not torch.equal(sample(one, turn), sample(other, turn)) for turn in range(3))


def filled_from(live: Blocks, *stored: tuple[Blocks, int, int, int]) -> None:
    """Fill rows: each stored one has (tensor, its first row, the live one's, how many)."""
    width = live.shape[1]
    pieces = [
        (
            each,
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex("live"),
                torch.Size((into, 0)),
                MetadataIndex("stored"),
                torch.Size((start, 0)),
                torch.Size((rows, width)),
            ),
        )
        for each, start, into, rows in stored
    ]
    with torch.no_grad():
        for target, source in fillings(live, pieces):
            target.copy_(source)


def test_pieces_are_joined_and_cut_at_the_ends_of_blocks():
    whole = Blocks.filled(8, 4, 8, seed=1)
    first, second = whole[:4], whole[4:]
    live = Blocks.filled(8, 4, 8, seed=2)
    filled_from(live, (first, 0, 0, 4), (second, 0, 4, 4))
    assert bits(live) == bits(whole)
    part = Blocks.filled(4, 4, 8, seed=3)
    filled_from(part, (first, 2, 0, 2), (second, 0, 2, 2))
    assert bits(part) == bits(whole[2:6])


def other_table(rows: int) -> Blocks:
    made = Blocks.filled(rows, 4, 8)
    made.table += 1
    return made


MISMATCHES = {
    "a cut through a block": ([(Blocks.filled(8, 4, 8), 1, 0, 4)], "cuts a block"),
    "different tables": (
        [(Blocks.filled(2, 4, 8), 0, 0, 2), (other_table(2), 0, 2, 2)],
        "different table",
    ),
    "other blocks": ([(Blocks.filled(4, 4, 4), 0, 0, 4)], "scale is torch.float32"),
    "another context": ([(Blocks.filled(4, 4, 8, context=[1]), 0, 0, 4)], "of another form"),
    "another class": ([(Unknown.filled(4, 4, 8), 0, 0, 4)], "a Unknown in the checkpoint, Blocks here"),
    "a part only": ([(Blocks.filled(2, 4, 8), 0, 0, 2)], "fill 8 of the 16 elements of codes"),
}


@pytest.mark.parametrize(("stored", "reason"), MISMATCHES.values(), ids=MISMATCHES)
def test_pieces_that_do_not_make_up_the_live_tensor_change_nothing(stored, reason):
    live = Blocks.filled(4, 4, 8, seed=5)
    before = bits(live)
    with pytest.raises(WrapMismatchError, match=reason):
        filled_from(live, *stored)
    assert bits(live) == before


@pytest.mark.parametrize("live_is_plain", [True, False])
def test_wrapped_and_plain_are_never_mistaken_for_one_another(tmp_path, live_is_plain):
    pair = [torch.ones(4, 4), Blocks.filled(4, 4, 4, seed=1)]
    live, other = pair if live_is_plain else reversed(pair)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"n": torch.ones(1), "w": other})
        state = {"n": torch.zeros(1), "w": live}
        before = bits(live)
        with pytest.raises(IncompatibleCheckpointError, match="w: made of other tensors"):
            checkpoints.load(state, step=1)
    assert (bits(live), state["n"].item()) == (before, 0)


def test_the_record_does_not_depend_on_the_device_or_the_values():
    assert wrapped_pickle(Blocks.filled(4, 4, 4)) == wrapped_pickle(Blocks.filled(4, 4, 4, seed=9))
