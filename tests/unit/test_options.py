"""Options and policies as people write them: in Python, YAML and TOML, right and wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from ckpt_core.cadence import (
    AtSteps,
    EveryEpochs,
    EveryFraction,
    EverySeconds,
    EverySteps,
    EveryTokens,
    OnPreemption,
    Optimal,
)
from ckpt_core.errors import ConfigError
from ckpt_core.options import CheckpointOptions, Upload, policy_from
from ckpt_core.retention import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepEveryEpochs,
    KeepEveryFraction,
    KeepEverySeconds,
    KeepFor,
    KeepLatest,
    KeepSteps,
    KeepThinned,
    KeepWeights,
    KeepWithin,
)

YAML = """
checkpoint:
  save: {every_steps: 500, every_seconds: 900, on_preemption: true}
  keep:
    latest: 3
    every: 10000
    best: {metric: val_loss, n: 2, mode: min}
  back_pressure: skip
  storage_options: {endpoint: local}
training: {learning_rate: 0.1}
"""
TOML = """
[training]
learning_rate = 0.1
[checkpoint]
back_pressure = "skip"
storage_options = {endpoint = "local"}
save = {every_steps = 500, every_seconds = 900, on_preemption = true}
[checkpoint.keep]
latest = 3
every = 10000
best = {metric = "val_loss", n = 2, mode = "min"}
"""
EXPECTED = CheckpointOptions(
    save=EverySteps(500) | EverySeconds(900) | OnPreemption(),
    keep=KeepLatest(3) | KeepEvery(10_000) | KeepBest("val_loss", n=2, mode="min"),
    back_pressure="skip",
    storage_options={"endpoint": "local"},
)


def test_every_option_has_its_text_in_the_docstring():
    assert CheckpointOptions.described().keys() == {option.name for option in fields(CheckpointOptions)}


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ({"every_steps": 5}, EverySteps(5)),
        ({"every_steps": {"n": 5, "offset": 1}}, EverySteps(5, offset=1)),
        ({"at_steps": [3, 1]}, AtSteps([1, 3])),
        ({"every_seconds": 1.5}, EverySeconds(1.5)),
        ({"every_fraction": 0.1}, EveryFraction(0.1)),
        ({"every_epochs": 2, "every_tokens": {"n": 9}}, EveryEpochs(2) | EveryTokens(9)),
        ({"every_fraction": {"fraction": 0.1, "total_steps": 50}}, EveryFraction(0.1, total_steps=50)),
        ({"at_steps": [1], "on_preemption": False}, AtSteps([1])),
        ({"on_preemption": ["SIGINT"]}, OnPreemption(("SIGINT",))),
        ({"on_preemption": {"signals": ["SIGINT"]}}, OnPreemption(("SIGINT",))),
        ({"on_preemption": {"file": "stop", "stop": False}}, OnPreemption(file=Path("stop"), stop=False)),
        ({"on_preemption": {"signals": [], "when": "cloud:spot"}}, OnPreemption((), when="cloud:spot")),
        (EverySteps(5), EverySteps(5)),
        ([EverySteps(5), {"at_steps": [1]}], EverySteps(5) | AtSteps([1])),
        ({"any": [{"every_steps": 5}, {"at_steps": [1]}]}, EverySteps(5) | AtSteps([1])),
        ({"all_of": {"every_steps": 5, "every_seconds": 60}}, EverySteps(5) & EverySeconds(60)),
        ({"all_of": [{"every_steps": 5}, {"not": {"at_steps": [10]}}]}, EverySteps(5) & ~AtSteps([10])),
    ],
)
def test_save_policies_read_as_they_are_written(value, policy):
    assert policy_from(value, "save") == policy


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ({"latest": 3}, KeepLatest(3)),
        ({"every": 10}, KeepEvery(10)),
        ({"every_seconds": 60}, KeepEverySeconds(60)),
        ({"best": "loss"}, KeepBest("loss")),
        ({"best": {"metric": "f1", "mode": "max"}}, KeepBest("f1", mode="max")),
        ({"best": [{"metric": "f1", "mode": "max"}, "loss"]}, KeepBest("f1", mode="max") | KeepBest("loss")),
        ({"for": 60}, KeepFor(60)),
        ({"thinned": {"hourly": 24, "weekly": 4}}, KeepThinned(hourly=24, weekly=4)),
        ({"within": "2 TB"}, KeepWithin("2 TB")),
        ({"every_fraction": 0.1}, KeepEveryFraction(0.1)),
        ({"every_fraction": {"fraction": 0.1, "total_steps": 9}}, KeepEveryFraction(0.1, total_steps=9)),
        ({"every_epochs": 2}, KeepEveryEpochs(2)),
        ({"weights": {"every": 9, "dtype": "bf16"}}, KeepWeights(KeepEvery(9), dtype="bf16")),
        (
            {"latest": 3, "weights": [{"every": 9}, {"best": "f1"}]},
            KeepLatest(3) | KeepWeights(KeepEvery(9) | KeepBest("f1")),
        ),
        (
            {"latest": 3, "within": "2 TB", "best": "f1"},
            (KeepLatest(3) | KeepBest("f1")) & KeepWithin("2 TB"),
        ),
        ({"steps": [1, 2]}, KeepSteps([1, 2])),
        ({"all": True}, KeepAll()),
        ([{"latest": 3}, KeepEvery(10)], KeepLatest(3) | KeepEvery(10)),
        (
            {"latest": 3, "all_of": [{"every": 10}, {"not": {"steps": [20]}}]},
            KeepLatest(3) | (KeepEvery(10) & ~KeepSteps([20])),
        ),
    ],
)
def test_retention_policies_read_as_they_are_written(value, policy):
    assert policy_from(value, "keep") == policy


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (
            "save",
            {"every_step": 5},
            "unknown 'every_step' \\(did you mean 'every_steps'\\?\\); allowed are all_of",
        ),
        ("save", {"every_steps": 0}, "save.every_steps: EverySteps: n must"),
        ("save", {"every_steps": {"m": 1}}, "save.every_steps: .*unknown 'm'.*; 'n' is missing"),
        ("save", {"every_steps": "500"}, "not '500'"),
        ("save", {"all_of": [{"every_steps": 5}, {"at_steps": []}]}, r"save.all_of\[1\].at_steps"),
        ("keep", {"all": 1}, "true or false"),
        ("save", {"on_preemption": "yes"}, "save.on_preemption: OnPreemption"),
        ("save", {"on_preemption": False}, "names no policy"),
        ("save", {"on_preemption": {"fiel": "x"}}, r"unknown 'fiel' \(did you mean 'file'\?\)"),
        ("save", {"on_preemption": {"when": "spot"}}, "save.on_preemption: OnPreemption: when must be"),
        ("save", {}, "names no policy"),
        ("save", [], "names no policy"),
        ("save", 1.5, "expected a policy, a mapping or a list of them, not 1.5"),
        ("save", True, "expected a policy, a mapping or a list of them, not True"),
        ("keep", 0, "keep: .*n must be"),
        ("save", KeepLatest(3), "expected a policy"),
        ("save", {True: 1}, "unknown True"),
        ("keep", {"best": {"n": 2}}, "'metric' is missing"),
        ("keep", {"best": []}, "metric"),
        ("keep", {"not": {"latest": 3}}, "keep.not: .*more at every prune"),
        ("keep", {"every_steps": 5}, "unknown 'every_steps'"),
        ("restart", {}, "kind must be one of"),
    ],
)
def test_what_is_wrong_in_a_policy_is_named_with_its_place(kind, value, words):
    with pytest.raises(ConfigError, match=words):
        policy_from(value, kind)


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.yml", YAML), ("run.toml", TOML)])
def test_yaml_and_toml_spell_the_same_options(tmp_path, name, text):
    assert CheckpointOptions.from_file(written(tmp_path, name, text)) == EXPECTED


def test_a_file_may_hold_the_options_without_a_section(tmp_path):
    path = written(tmp_path, "options.toml", "verify = false\nsave = {every_steps = 5}\n")
    assert CheckpointOptions.from_file(path) == CheckpointOptions(verify=False, save=EverySteps(5))


@pytest.mark.parametrize("text", ["", "checkpoint: {}", "save: null"])
def test_saying_nothing_means_the_defaults(tmp_path, text):
    assert CheckpointOptions.from_file(written(tmp_path, "empty.yaml", text)) == CheckpointOptions()


def test_policies_in_python_and_plain_values_mix():
    options = CheckpointOptions.from_mapping({"save": EverySteps(5), "keep": {"latest": 1}})
    assert options == CheckpointOptions(save=EverySteps(5), keep=KeepLatest(1))


def test_every_offender_is_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        CheckpointOptions.from_mapping(
            {
                "sav": 1,
                "save": {"every_steps": 0, "x": 1},
                "keep": {"latest": -1},
                "verify": "no",
                "on_error": 1,
            }
        )
    message = str(caught.value)
    expected = [
        "'sav' (did you mean 'save'?)",
        "save.every_steps",
        "'x'",
        "keep.latest",
        "verify must",
        "on_error",
    ]
    assert [words for words in expected if words not in message] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"save": 500}, "save must be a SavePolicy, not 500"),
        ({"save": KeepLatest(3)}, "save must be a SavePolicy"),
        ({"keep": EverySteps(3)}, "keep must be a RetentionPolicy"),
        ({"back_pressure": "block"}, "back_pressure must be one of 'wait', 'skip'"),
        ({"on_error": "ignore"}, "on_error must be one of 'raise', 'warn'"),
        ({"verify": 1}, "verify must be one of"),
        ({"allow_pickle": "yes"}, "allow_pickle"),
        ({"deadline_seconds": 0}, "deadline_seconds must be a finite number above 0"),
        ({"storage_options": {1: 2}}, "string keys"),
        ({"storage_options": None}, "storage_options must be a mapping"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        CheckpointOptions(**options)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.json", "{}", "read from .toml, .yaml, .yml files only"),
        ("run.toml", "save = ", "cannot read the options"),
        ("run.yaml", "a: [", "cannot read the options"),
        ("run.yaml", "- a", "expected a mapping at the top, not list"),
        ("run.yaml", "checkpoint: 5", "must be a mapping, not int"),
        ("run.yaml", "checkpoint: {save: {every_step: 5}}", "run.yaml: save: unknown 'every_step'"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, name, text, words):
    with pytest.raises(ConfigError, match=words):
        CheckpointOptions.from_file(written(tmp_path, name, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot read"):
        CheckpointOptions.from_file(tmp_path / "absent.toml")


def test_yaml_without_pyyaml_says_what_to_install(tmp_path):
    path = written(tmp_path, "run.yaml", YAML)
    code = (
        "import sys; sys.modules['yaml'] = None\n"
        "from ckpt_core.options import CheckpointOptions\n"
        f"CheckpointOptions.from_file({str(path)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "pip install pyyaml" in done.stderr


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        (None, None),
        (4096, 4096),
        ("4096", 4096),
        ("512 MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("1.5 GB", 1_500_000_000),
        ("2TiB", 2 << 40),
    ],
)
def test_memory_is_written_as_a_number_or_as_people_do(written, size_bytes):
    assert CheckpointOptions.from_mapping({"staging_memory": written}).staging_memory_bytes == size_bytes


@pytest.mark.parametrize(
    ("written", "rate"), [("500 MB/s", 500_000_000), ("1 GiB", 1 << 30), (2.5e8, 250_000_000)]
)
def test_a_bandwidth_is_written_as_a_number_or_as_people_do(written, rate):
    assert CheckpointOptions(write_bandwidth=written).write_bytes_per_second == rate


@pytest.mark.parametrize(
    ("written", "total_bytes", "headroom_bytes"),
    [
        (None, 10_000, 100),
        (None, 1 << 50, 1 << 30),
        (None, None, 0),
        (0, 1 << 40, 0),
        ("0", None, 0),
        (5000, 1 << 40, 5000),
        ("2 GiB", None, 2 << 30),
        ("5 %", 10_000, 500),
        ("2.5%", 10_000, 250),
        ("0%", 10_000, 0),
        ("5 %", None, 0),
    ],
)
def test_headroom_is_bytes_or_a_part_of_the_filesystem(written, total_bytes, headroom_bytes):
    options = CheckpointOptions.from_mapping({"headroom": written})
    assert options.free_headroom.of(total_bytes) == headroom_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"headroom": "100 %"},
        {"headroom": "-5 %"},
        {"headroom": -1},
        {"headroom": "some"},
        {"headroom": True},
        {"headroom": float("inf")},
        {"headroom": "5 MB/s"},
        {"staging_memory": "much"},
        {"staging_memory": "5 MB/s"},
        {"staging_memory": 0},
        {"staging_memory": -1},
        {"staging_memory": True},
        {"staging_memory": float("nan")},
        {"write_bandwidth": "5 parsecs"},
        {"write_bandwidth": "0 MB/s"},
        {"arenas": 0},
        {"arenas": 3},
        {"arenas": True},
        {"arenas": "2"},
        {"writers": 0},
        {"writers": 65},
        {"writers": True},
        {"writers": "2"},
        {"priority": -1},
        {"priority": 20},
        {"priority": False},
        {"priority": 2.5},
        {"priority": None},
    ],
)
def test_amounts_that_make_no_sense_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name} must be"):
        CheckpointOptions.from_mapping(wrong)


@pytest.mark.parametrize(
    ("written", "to"),
    [
        ("/mnt/share/run", ["/mnt/share/run"]),
        ({"to": "s3://bucket/run", "every": 10, "keep": {"latest": 3}}, ["s3://bucket/run"]),
        ([Upload("/a"), {"to": "s3://bucket/b"}, "/c"], ["/a", "s3://bucket/b", "/c"]),
        (Upload("/a", keep=KeepLatest(1)), ["/a"]),
        (None, []),
        ([], []),
    ],
)
def test_an_upload_is_written_as_a_place_a_mapping_or_a_list(written, to):
    assert [each.to for each in CheckpointOptions.from_mapping({"upload": written}).uploads] == to


def test_an_upload_in_yaml_has_policies_and_amounts_as_plain_values(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "checkpoint:\n  upload: {to: 's3://b/r', every: 10, keep: {latest: 3, every: 5000},"
        " bandwidth: 500 MB/s, when_busy: queue, on_preemption: leave, deadline_seconds: 60}\n"
    )
    (upload,) = CheckpointOptions.from_file(path).uploads
    assert upload.keep == KeepLatest(3) | KeepEvery(5000)
    assert upload.bytes_per_second == 500_000_000
    assert (upload.every, upload.when_busy, upload.on_preemption) == (10, "queue", "leave")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"every": 10}, "'to' is missing"),
        ("", "to is empty"),
        (7, "to must be a directory"),
        ({"to": "/a", "evry": 3}, "unknown 'evry' (did you mean 'every'?)"),
        ({"to": "/a", "every": 0}, "every must be a whole number"),
        ({"to": "/a", "keep": {"lates": 1}}, "unknown 'lates'"),
        ({"to": "/a", "bandwidth": "fast"}, "bandwidth must be"),
        ({"to": "/a", "when_busy": "panic"}, "when_busy must be one of"),
        ({"to": "/a", "on_preemption": True}, "on_preemption must be one of"),
        ({"to": "/a", "deadline_seconds": 0}, "deadline_seconds must be"),
        ({"to": "/a", "on_error": "ignore"}, "on_error must be one of"),
        ({"to": "s3://a/b", "storage_options": "key"}, "storage_options must be a mapping"),
        (["/a", {"too": "/b"}], "upload[1]: unknown 'too'"),
    ],
)
def test_an_upload_that_makes_no_sense_is_refused_by_name(wrong, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        CheckpointOptions.from_mapping({"upload": wrong})


def test_an_upload_shows_no_secret():
    upload = Upload("s3://me:hidden@bucket/run?key=hidden", storage_options={"secret": "hidden"})
    options = CheckpointOptions(upload=upload)
    assert "hidden" not in f"{upload!r} {options!r} {upload.url}"
    assert "bucket/run" in repr(upload)
    assert "upload" not in options.chosen


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (EverySeconds("15m"), EverySeconds(900)),
        (KeepEverySeconds("6h"), KeepEverySeconds(21600)),
        (KeepFor("7d"), KeepFor(604800)),
        (policy_from({"every_seconds": "90s"}, "save"), EverySeconds(90)),
        (policy_from({"for": "1.5h"}, "keep"), KeepFor(5400)),
    ],
)
def test_every_policy_takes_a_duration_as_text(text, seconds):
    assert text == seconds
    assert hash(text) == hash(seconds)


@pytest.mark.parametrize("policy", [EverySeconds, KeepEverySeconds, KeepFor])
@pytest.mark.parametrize(
    "value", ["15", "m", "15 minutes", "-1s", "0s", 0, -1, True, None, float("inf"), [900]]
)
def test_what_is_no_duration_is_refused(policy, value):
    with pytest.raises(ConfigError, match="seconds must be seconds above 0"):
        policy(value)


WAITS_FOR_A_TIER = Optimal("6h", tier="upload")


@pytest.mark.parametrize(
    "save", [WAITS_FOR_A_TIER, EverySteps(5) | WAITS_FOR_A_TIER, WAITS_FOR_A_TIER & ~EverySteps(5)]
)
def test_a_policy_that_waits_for_a_tier_is_refused_without_one(save):
    for upload in (None, []):
        with pytest.raises(ConfigError, match="give upload="):
            CheckpointOptions(save=save, upload=upload)
    assert CheckpointOptions(save=save, upload=Upload("s3://bucket/run")).save == save
    assert CheckpointOptions(save=~Optimal("6h")).uploads == ()


@pytest.mark.parametrize(
    ("dotted", "policy"),
    [
        ({"optimal.mtbf": "6h"}, Optimal("6h")),
        ({"optimal.mtbf": "6h", "optimal.min_seconds": 60}, Optimal("6h", min_seconds=60)),
        ({"every_steps": 5, "optimal.mtbf": "6h"}, EverySteps(5) | Optimal("6h")),
        ({"any.every_steps": 5, "any.optimal.mtbf": "6h"}, EverySteps(5) | Optimal("6h")),
        ({"optimal": {"mtbf": "6h"}, "optimal.min_seconds": 60}, Optimal("6h", min_seconds=60)),
    ],
)
def test_nested_arguments_of_a_command_line_are_taken(dotted, policy):
    before = str(dotted)
    assert policy_from(dotted, "save") == policy
    assert str(dotted) == before
    place = {"to": "s3://bucket/run", "keep.latest": 3, "keep.best.metric": "val.loss"}
    upload = CheckpointOptions.from_mapping({"upload": place}).upload
    assert upload == Upload("s3://bucket/run", keep=KeepLatest(3) | KeepBest("val.loss"))


@pytest.mark.parametrize("value", [24, "24", [24], True, None])
def test_what_needs_names_is_refused_without_them(value):
    with pytest.raises(ConfigError, match=r"keep\.thinned: .*hourly, daily, weekly"):
        policy_from({"thinned": value}, "keep")


@pytest.mark.parametrize(
    "key", ["optimal.", ".mtbf", ".", "optimal..mtbf", "optimal.mtfb", "every_steps.n.n"]
)
def test_dotted_keys_that_name_nothing_are_refused(key):
    with pytest.raises(ConfigError):
        policy_from({key: 5}, "save")
    with pytest.raises(ConfigError):
        policy_from({"every_steps": 5, "every_steps.offset": 5}, "save")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: CheckpointOptions(save=KeepLatest(1) | KeepAll()), "save must be a SavePolicy"),
        (lambda: CheckpointOptions(keep=EverySteps(5) & EverySeconds(5)), "keep must be a RetentionPolicy"),
        (lambda: CheckpointOptions(save=~KeepAll()), "save must be a SavePolicy"),
        (lambda: policy_from(~EverySteps(5) | EverySteps(7), "keep"), "keep: expected a policy"),
        (lambda: (EverySteps(5) | EverySteps(7)) & (KeepAll() | KeepLatest(1)), "SavePolicy"),
        (lambda: (KeepAll() & KeepLatest(1)) | ~EverySteps(7), "RetentionPolicy"),
    ],
)
def test_combined_policies_are_of_the_kind_of_their_parts(build, words):
    with pytest.raises(ConfigError, match=words):
        build()
