"""The examples are short, run as they are, and run again go on where they left off."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import pytest

from tests.scripts import run_python

pytestmark = pytest.mark.slow  # whole trainings, each in a process of its own

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
SCRIPTS: Final = sorted(EXAMPLES.glob("*.py"))
MAX_LINES: Final = 80


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Twice:
    """Two runs of an example: what is run, and what the second one says where it goes on."""

    goes_on: str
    first: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()
    launch_again: tuple[str, ...] = ()
    ends: int = 0
    lost: str = ""
    """The directory that is gone in between."""


RUNNER: Final = ("-m", "accelerate_ckpt")
TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TWICE: Final = {
    "accelerate_train": Twice(first=("run", "1"), again=("run", "2"), goes_on=r"^at step 60$"),
    "evaluate": Twice(
        first=("run", "10"), again=("run", "20"), goes_on=r"^at step 10$(?s:.*)^exported to .*step-20$"
    ),
    "fabric_train": Twice(first=("run", "1"), again=("run", "2"), goes_on=r"^at step 20$"),
    "lightning_cli": Twice(goes_on=r"Restored step 40 of .*runs/lightning-cli"),
    "lightning_fsdp2": Twice(first=("run", "20", "1"), again=("run", "30", "2"), goes_on="Restored step 20"),
    "optimal_report": Twice(
        first=("run", "40"), again=("run", "60"), goes_on=r"^at step 40$(?s:.*)^Advice:(?s:.*)^  2 ended$"
    ),
    "plain_loop": Twice(
        first=("run",),
        again=("run",),
        launch_again=TORCHRUN,
        lost="run/step-000000040",
        goes_on="rank 1: resumed from step 30",
    ),
    "signed_checkpoints": Twice(goes_on=r"^step 2 has the manifest(?s:.*)^resumed: step 2$"),
    "spot_instance": Twice(ends=75, goes_on=r"^at step [67]\d$"),
    "tiers_to_s3": Twice(
        first=("disk", "s3://examples/run", "40"),
        again=("disk", "s3://examples/run", "50"),
        lost="disk",
        goes_on=r"^at step 40$",
    ),
    "trainer_peft": Twice(first=("run", "20"), again=("run", "30"), goes_on="resuming from checkpoint-20"),
    "unchanged_script": Twice(
        first=("run", "1"), again=("run", "2"), launch=RUNNER, launch_again=RUNNER, goes_on=r"^at step 60$"
    ),
}
SETTINGS: Final = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "CKPT_SUITE_SAVE": "20",
    "RUN_KEY": "5e" * 32,
}

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


@each_script
def test_an_example_fits_on_one_screen(script):
    assert len(script.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.distributed
@each_script
def test_an_example_runs_and_run_again_goes_on_where_it_left_off(script, tmp_path, request):
    twice, settings = TWICE[script.stem], dict(SETTINGS)
    if script.stem == "tiers_to_s3":
        settings |= bucket_of_examples(request.getfixturevalue("s3_endpoint"))
    first = run_python(*twice.launch, script, *twice.first, cwd=tmp_path, variables=settings)
    assert first.returncode == twice.ends, first.stdout + first.stderr
    assert re.search(twice.goes_on, first.stdout + first.stderr, re.MULTILINE) is None
    if twice.lost:
        shutil.rmtree(tmp_path / twice.lost)
    again = run_python(*twice.launch_again, script, *twice.again, cwd=tmp_path, variables=settings)
    shown = again.stdout + again.stderr
    assert again.returncode == 0, shown
    assert re.search(twice.goes_on, shown, re.MULTILINE), shown
    if twice.lost:
        assert (tmp_path / twice.lost).is_dir(), "it is written again"


def bucket_of_examples(endpoint):
    """Make the bucket; return where AWS's own tools look for the endpoint and keys."""
    import boto3

    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}
    names = ("aws_access_key_id", "aws_secret_access_key", "region_name")
    client = boto3.client("s3", endpoint_url=endpoint, **dict(zip(names, keys.values(), strict=True)))
    client.create_bucket(Bucket="examples")
    return keys | {"AWS_ENDPOINT_URL": endpoint}
