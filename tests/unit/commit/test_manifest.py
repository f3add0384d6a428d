from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core.commit import Manifest, Marker
from ckpt_core.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.types import DataPosition, FileEntry, Parent, Provenance
from tests.unit.commit.checkpoints import manifest_of

GOLDEN = (
    b'{"format_version":2,"save_id":"0a1b2c3d","step":1000,"created":1700000000.5,"world_size":2,'
    b'"items":{"model":"sharded","rng":"per_rank"},"metrics":{"loss":0.5,"diverged":"nan"},'
    b'"annotations":{"note":"\xc3\xa9"},"producer":{"torch":"2.13.0"},'
    b'"num_chunks":2,"files":{"path":["__0_0.distcp","rank-00000.json"],"size_bytes":[4096,2],'
    b'"checksum":["crc32:0badcafe","sha256:00"]}}'
)

names = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/\\"), min_size=1, max_size=12
)
segments = names.filter(lambda name: name not in {".", "..", "manifest.json", "COMMITTED"})
paths = st.lists(segments, min_size=1, max_size=3).map("/".join)
checksums = st.integers(0, 2**32 - 1).map(lambda value: f"crc32:{value:08x}")
sizes = st.integers(0, 2**50)
numbers = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)


counts = st.none() | sizes
ids = st.text("0123456789abcdef", min_size=8, max_size=32)
provenances = st.builds(
    Provenance,
    parent=st.none()
    | st.builds(
        Parent, name=names, step=sizes, save_id=names, manifest_sha256=names, elsewhere=st.booleans()
    ),
    run_id=names | st.just(""),
    code_version=names | st.just(""),
    code_dirty=st.none() | st.booleans(),
    configuration_sha256=names | st.just(""),
    data=st.dictionaries(names, st.builds(DataPosition, epoch=counts, samples=counts, of=counts), max_size=2),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    file = st.builds(FileEntry, path=paths, size_bytes=sizes, checksum=checksums)
    files = tuple(draw(st.lists(file, max_size=4, unique_by=lambda entry: entry.path)))
    return Manifest(
        save_id=draw(ids),
        step=draw(sizes),
        created=draw(st.floats(0, 1e12)),
        world_size=draw(st.integers(1, 2**20)),
        items=draw(st.dictionaries(names, st.sampled_from(["sharded", "per_rank", "shared", "files"]))),
        metrics=draw(st.dictionaries(names, numbers, max_size=3)),
        annotations=draw(st.dictionaries(names, json_values, max_size=3)),
        producer=draw(st.dictionaries(names, names, max_size=3)),
        files=files,
        num_chunks=draw(sizes),
        provenance=draw(provenances),
    )


@settings(max_examples=60, deadline=None)
@given(manifests())
def test_a_manifest_reads_back_as_it_was_written(manifest):
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    Manifest.from_bytes(manifest.to_bytes(), with_files=False)


@settings(max_examples=30, deadline=None)
@given(manifests())
def test_a_reader_that_knows_no_provenance_reads_all_the_rest(manifest):
    fields = json.loads(manifest.to_bytes())
    assert ("provenance" in fields) == (manifest.provenance != Provenance())
    fields.pop("provenance", None)
    fields["of a later version"] = {"any": "value"}
    assert Manifest.from_bytes(json.dumps(fields).encode()) == replace(manifest, provenance=Provenance())


BAD_PROVENANCE = [
    7,
    {"parent": {"name": "x"}},
    {"parent": {"name": "x", "step": -1, "save_id": "", "manifest_sha256": ""}},
    {"run_id": 1},
    {"code": {"version": "x", "dirty": "yes"}},
    {"data": {"loader": {"samples": -1}}},
    {"data": {"loader": 3}},
]


@pytest.mark.parametrize("value", BAD_PROVENANCE)
def test_impossible_provenance_is_damage(value):
    fields = {**json.loads(GOLDEN), "provenance": value}
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
        Manifest.from_bytes(json.dumps(fields).encode())


@settings(max_examples=30, deadline=None)
@given(manifests())
def test_a_marker_reads_back_and_matches_only_its_own_manifest(manifest):
    content = manifest.to_bytes()
    marker = Marker.of(manifest, content)
    assert Marker.from_bytes(marker.to_bytes()) == marker
    assert marker.matches(content)
    assert not marker.matches(content[:-1] + b" ")
    assert not marker.matches(content + b" ")


def test_format_version_2_is_frozen():
    manifest = Manifest.from_bytes(GOLDEN)
    assert manifest.to_bytes() == GOLDEN
    assert manifest.step == 1000
    assert manifest.size_bytes == 4098
    assert math.isnan(manifest.metrics["diverged"])
    assert manifest.num_chunks == 2


def test_a_newer_format_asks_for_an_upgrade():
    newer = json.dumps(json.loads(GOLDEN) | {"format_version": 4, "files": "of another shape"}).encode()
    with pytest.raises(IncompatibleCheckpointError, match=r"newer ckpt-suite \(format 4\).*up to 3: upgrade"):
        Manifest.from_bytes(newer)
    with pytest.raises(IncompatibleCheckpointError, match="upgrade"):
        Marker.from_bytes(b'{"format_version": 4}')


HOSTILE_PATHS = [
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a\\b",
    "a\0b",
    "a\nb",
    "",
    ".",
    "a//b",
    "a/",
    "./a",
    "x" * 2000,
]
HOSTILE_PATHS += ["manifest.json", "COMMITTED", "\ud800", 7, None]


@pytest.mark.parametrize("path", HOSTILE_PATHS)
def test_hostile_paths_are_refused(path):
    fields = json.loads(GOLDEN)
    fields["files"]["path"][0] = path
    for read in (Manifest.from_bytes, partial(Manifest.from_bytes, with_files=False)):
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
            read(json.dumps(fields).encode())


@pytest.mark.parametrize("size", [-1, 2**53 + 1, 10**400, 1.5, "4096", None, True, []])
@pytest.mark.parametrize("where", ["file", "chunks", "step", "world size"])
def test_absurd_sizes_are_refused(where, size):
    fields = json.loads(GOLDEN)
    places = {
        "file": (fields["files"]["size_bytes"], 0),
        "chunks": (fields, "num_chunks"),
        "step": (fields, "step"),
        "world size": (fields, "world_size"),
    }
    container, key = places[where]
    container[key] = size
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"items": {"model": "pickled"}},
        {"items": []},
        {"metrics": {"loss": "high"}},
        {"metrics": {"loss": None}},
        {"created": "nan"},
        {"created": float("nan")},
        {"files": {}},
        {"files": [["a", 1, "crc32:00"]]},
        {"files": {"path": ["a"], "size_bytes": [1]}},
        {"files": {"path": ["a", "b"], "size_bytes": [1], "checksum": ["crc32:00"]}},
        {"files": {"path": "a", "size_bytes": [1], "checksum": ["crc32:00"]}},
        {"files": {"path": ["a", "a"], "size_bytes": [1, 1], "checksum": ["crc32:00", "crc32:00"]}},
        {"files": {"path": ["a"], "size_bytes": [1], "checksum": ["no checksum"]}},
        {"files": {"path": ["a"], "size_bytes": [1], "checksum": [7]}},
        {"save_id": 7},
        {"producer": {"torch": 2}},
        {"format_version": 0},
        {"format_version": None},
    ],
    ids=str,
)
def test_malformed_fields_are_refused(change):
    for read in (Manifest.from_bytes, partial(Manifest.from_bytes, with_files=False)):
        with pytest.raises(CorruptCheckpointError, match="malformed"):
            read(json.dumps(json.loads(GOLDEN) | change).encode())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe\xff", b"[" * 100_000, GOLDEN[:-10], b"9" * 10_000]
)
def test_what_is_no_json_object_is_refused(content):
    for kind in (Manifest, Marker):
        with pytest.raises(CorruptCheckpointError):
            kind.from_bytes(content)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOLDEN) - 1), st.integers(0, 255))
def test_any_changed_byte_reads_or_fails_as_corrupt(position, value):
    content = GOLDEN[:position] + bytes([value]) + GOLDEN[position + 1 :]
    with contextlib.suppress(CorruptCheckpointError, IncompatibleCheckpointError):
        Manifest.from_bytes(content)


def test_annotations_that_json_cannot_hold_are_a_config_error():
    for value in (object(), float("nan")):
        manifest = Manifest(save_id="x", step=1, created=1.0, world_size=1, annotations={"x": value})
        with pytest.raises(ConfigError, match="plain JSON"):
            manifest.to_bytes()


def test_a_diverged_loss_does_not_keep_a_checkpoint_from_being_written():
    metrics = {"nan": math.nan, "up": math.inf, "down": -math.inf}
    content = manifest_of(1, metrics=metrics).to_bytes()
    assert str(Manifest.from_bytes(content).metrics) == str(metrics)
    json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_more_metrics_than_a_listing_should_read_are_refused():
    manifest = manifest_of(1, metrics={f"a metric with a long name {i}": 1.0 for i in range(50_000)})
    with pytest.raises(ConfigError, match="metrics"):
        Marker.of(manifest, b"").to_bytes()
