"""The hosts' own tests, run without ours and through ours: what passes alone must pass with us.

Their sources are not ours to keep: `--sources DIR` holds checkouts, named as on GitHub, and in its folder
`site-packages` what they import beyond our own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A host's tests, and how ours gets into them.

    Attributes:
        folder: where pytest starts, below the folder of sources.
        door: of `injection`.
        paths: files or folders of tests, below it.
        expression: which of them, as pytest's `-k`.
    """

    folder: str
    door: str
    paths: Sequence[str]
    expression: str = ""


_CHECKPOINTING = (
    "checkpointing",
    "callbacks/test_model_checkpoint_additional_cases.py",
    "callbacks/test_model_checkpoint_edge_cases.py",
    "callbacks/test_model_checkpoint_manual_opt.py",
    "callbacks/test_model_checkpoint_step_interval_val_metric.py",
    "trainer/connectors/test_checkpoint_connector.py",
    "models/test_restore.py",
    "plugins/test_checkpoint_io_plugin.py",
)
_STATE = tuple(
    f"callbacks/test_{name}.py"
    for name in (
        *("callbacks", "early_stopping", "finetuning_callback", "gradient_accumulation_scheduler"),
        *("lambda_function", "pruning", "stochastic_weight_avg", "timer", "weight_averaging"),
    )
)
_LOOPS = ("loops", "trainer/optimization", "models/test_hooks.py")
_LIGHTNING = "pytorch-lightning/tests"


def _lightning(door: str, paths: Sequence[str]) -> Suite:
    # Files of former versions' checkpoints are not in the repository.
    return Suite(
        folder=_LIGHTNING,
        door=door,
        paths=[f"tests_pytorch/{path}" for path in paths],
        expression="not legacy",
    )


SUITES: Mapping[str, Suite] = {
    "lightning-checkpointing": _lightning("plugin", _CHECKPOINTING),
    "lightning-state": _lightning("plugin", _STATE),
    "lightning-loops": _lightning("plugin", _LOOPS),
    "lightning-callback": _lightning("callback", (*_CHECKPOINTING, *_STATE)),
    "accelerate": Suite(
        folder="accelerate",
        door="accelerate",
        paths=[
            f"tests/test_{name}.py"
            for name in (
                *("state_checkpointing", "accelerator", "scheduler", "optimizer", "data_loader"),
                *("grad_sync", "kwargs_handlers", "memory_utils", "tracking", "utils"),
            )
        ],
    ),
    "trainer": Suite(
        folder="transformers",
        door="trainer",
        paths=[f"tests/trainer/test_trainer{name}.py" for name in ("", "_callback", "_seq2seq")],
    ),
    "dcp": Suite(
        folder="pytorch",
        door="dcp",
        paths=["test/distributed/checkpoint"],
    ),
}

DOCUMENTED: Mapping[str, str] = {
    "a checkpoint is a directory": r"IsADirectoryError|os\.path\.isfile|is_file\(\)|\.st_size|is a directory"
    r"|invalid load key, '<'",  # what a server makes of one
    "files of ours in listings": r"\.ckpt-suite"
    r"|in tmp_path\.iterdir\(\)"
    r"|len\(os\.listdir\(tmp_path\)\) == 14\nE +AssertionError: assert 15 == 14$",
    "hooks may save any object": r"item 'lightning\.callbacks' holds Python objects that only pickle",
    "torch.save is not called as without us": r"torch\.save\.call_count"
    r"|<(Magic)?Mock name='(save|torch\.save)'|torch_save|Expected 'save'",
    "our callback is in the Trainer of a plugin": r"ShardedCheckpoint object at",
    "storage_options belong to the callback": r"give storage_options= to ShardedCheckpoint",
    "names that load_state_dict returns are compared": r"'Mock' object is not iterable",
    "a resume within an epoch is exact": r"resuming from a checkpoint that ended",
    "a Trainer takes one CheckpointIO": r"checkpoint_io set through both strategy class and plugins",
    "attributes of the best: those that loggers read": r"has no 'kth_",
}
"""What the docs say is different, and how it shows in a test of theirs that does not know it."""

DOCUMENTED_OF_THE_CALLBACK: Mapping[str, str] = {
    "it is one more ModelCheckpoint of the Trainer": r"(is|one more item:) <lightning_ckpt\.lightning\.Shard",
    "it takes the place of the default one": r"ckpt_version == expected|save_mock\.assert_has_calls"
    r"|No such file or directory: '[^']*/checkpoints'|\"checkpoints\" /",
    "it saves, too": r"state_dict_count == self\.expected_count",
    "it has no private attributes of a ModelCheckpoint": r"'ShardedCheckpoint' has no '_",
    "it is refused without checkpointing": r"`enable_checkpointing=False` but found `ModelCheckpoint`",
    "a CheckpointIO of others is refused": r"the CheckpointIO of this run, would write nothing",
    "another root begins a lineage of its own": r"AssertionError: best_model_path$",
}
"""The same, where ours is given as the callback: what a user who gives it chooses."""

DOCUMENTED_OF_HUGGING_FACE: Mapping[str, str] = {
    "an optimizer of parameters that nothing saves is refused": r"holds parameters that the model does not",
    "a save is committed in the background": r"Directory not empty: '(checkpoints|\.incomplete-)"
    r'|^> +assert os\.path\.exists\(.*"checkpoint_10"',
    "an accelerator is freed by the garbage collector": r"assert accelerator_ref\(\) is None",
    "the optimizer is in shards": r"self\.check_saved_checkpoints\([\s\S]*False is not true",
    "True starts afresh if there is none": r"assertRaises\(Exception\) as context:"
    r"\nE +AssertionError: Exception not raised",
    "a committed file that is gone is damage": r"model\.safetensors: missing\. Nothing was loaded",
    "files of ours in listings": r"len\(os\.listdir\(tmpdir\)\), 2\)\nE +AssertionError: 3 != 2",
    "our callback is in the Trainer's list": r"First extra element \d:\n(E +)?'TrainerEvents'",
    "a search keeps the stock checkpoints": r"disable_trainer\(\) before hyperparameter_search",
}
"""The same, of docs/accelerate.md and docs/trainer.md: "What differs from stock"."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A test that passes without ours and fails with it."""

    test: str
    message: str
    door: str = ""

    @property
    def documented(self) -> str | None:
        told = DOCUMENTED_OF_HUGGING_FACE if self.door in {"accelerate", "trainer"} else DOCUMENTED
        if self.door == "callback":
            told = {**told, **DOCUMENTED_OF_THE_CALLBACK}
        found = (what for what, pattern in told.items() if re.search(pattern, self.cause, re.MULTILINE))
        return next(found, None)

    @property
    def cause(self) -> str:
        """The statements that failed and how: what else a test of theirs does explains nothing."""
        lines = [line for line in self.message.splitlines() if line.startswith(("E ", ">"))]
        return "\n".join(lines) or self.message


def outcomes(suite: Suite, sources: Path, *, door: str, extra: Sequence[str] = ()) -> dict[str, str | None]:
    """Run a suite; the message of each test that failed, None of each that passed, nothing of the skipped."""
    folder = sources / suite.folder
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "--color=no",  # the causes are read
                "-p",
                "injection",  # not below `tests`, which is a package of some hosts, too
            ),
            *(
                "--continue-on-collection-errors",
                "-W",
                "ignore",
                f"--junitxml={report}",
                "-o",
                "junit_logging=no",
            ),
            *(["-k", suite.expression] if suite.expression else []),
            *extra,
            *suite.paths,
        ]
        ours = (ROOT / "tests" / "outside", ROOT, ROOT / "common")
        paths = [str(folder), *map(str, ours), str(sources / "site-packages")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            "CKPT_OUTSIDE": door,
        }
        environment |= {"OMP_NUM_THREADS": "1", "CKPT_SUITE_CODE_VERSION": "", "HF_HUB_OFFLINE": "1"}
        with (Path(scratch) / "output").open("w+") as output:
            subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=False)
            output.seek(0)
            if not report.exists():
                raise SystemExit(output.read()[-4000:])
        return dict(_read(report))


def _read(report: Path) -> Iterator[tuple[str, str | None]]:
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        failed = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        text = None if failed is None else f"{failed.get('message')}\n{failed.text}"
        yield f"{case.get('classname')}::{case.get('name')}", text


def compare(suite: Suite, sources: Path, extra: Sequence[str] = ()) -> tuple[int, list[Difference]]:
    """Run a suite without and with ours; how many pass without, and what fails only with ours."""
    alone = outcomes(suite, sources, door="", extra=extra)
    passing = {test for test, message in alone.items() if message is None}
    with_ours = outcomes(suite, sources, door=suite.door, extra=extra)
    lost = passing - with_ours.keys()
    differ = [Difference(test=test, message="did not run", door=suite.door) for test in sorted(lost)]
    for test, message in with_ours.items():
        if test in passing and message is not None:
            differ.append(Difference(test=test, message=message, door=suite.door))
    return len(passing), differ


def run(names: Sequence[str], sources: Path, extra: Sequence[str] = ()) -> int:
    """Compare several suites and print a table; the number of differences that no page documents."""
    undocumented = 0
    print(f"{'suite':26} {'pass alone':>10} {'pass with us':>12} {'documented':>10} {'to mend':>8}")
    for name in names or list(SUITES):
        passing, differ = compare(SUITES[name], sources, extra)
        ours = [each for each in differ if each.documented is None]
        undocumented += len(ours)
        print(
            f"{name:26} {passing:10} {passing - len(differ):12} {len(differ) - len(ours):10} {len(ours):8}",
            flush=True,
        )
        for each in ours:
            lines = [line for line in each.message.splitlines() if line.startswith("E ")] or [each.message]
            print(f"    {each.test}\n        {lines[-1][:200]}", flush=True)
    return undocumented
