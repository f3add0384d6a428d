"""What commands write for programs: every one has a schema, and keeps to it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch

from ckpt_core import CheckpointManager, EverySteps, TrainState, Upload
from ckpt_core.cli import main
from ckpt_core.cli._commands import parser

SCHEMAS = Path(__file__).parents[3] / "docs" / "schemas"


def train(root, steps, **options):
    model = torch.nn.Linear(4, 4)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with CheckpointManager(root, save=EverySteps(2), **options) as checkpoints:
        for step in range(1, steps + 1):
            checkpoints.maybe_save(step, state, metrics={"loss": 1 / step, "nan": float("nan")})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs, one with a tier and a pin, one with damage; a copy."""
    place = tmp_path_factory.mktemp("schemas")
    train(place / "runs" / "a", 6, upload=Upload(str(place / "tier"), every=2))
    train(place / "runs" / "b", 4)
    data = next((place / "runs" / "b" / "step-000000002").glob("*.distcp"))
    data.write_bytes(b"other" + data.read_bytes()[5:])
    torch.save({"model": {"weight": torch.ones(4, 4)}}, place / "weights.pt")
    return place


CALLS = [
    "ls runs/a", "ls runs/a --tiers",
    "ls runs", "ls tier", "show runs/a", "show runs/a --tensors", "show runs/b --step 2",
    "diff runs/a --steps 2 4", "diff runs/a runs/a", "verify runs/a --all", "verify runs/b --all",
    "ls runs/b", "show runs/b --step 2", "du runs/a", "du runs/b", "report runs/a",
    "report runs/b --html page.html",
    "cp runs/a copy", "cp runs/a copy", "cp runs/b bad", "upload runs/a --to tier", "pin runs/a@4 --reason r",
    "ls runs/a", "unpin runs/a@4", "mark runs/a@4 bad --reason r", "ls runs/a", "mark runs/a@4 good",
    "demote copy@2 --dry-run", "demote copy@2 --dtype bf16", "ls copy", "show copy@2", "du copy",
    "prune copy --keep-weights-every 2 --dry-run",
    "prune copy --keep-latest 1 --dry-run", "prune copy --keep-latest 1", "prune runs/b --damaged",
    "annotate runs/a@6 --metric val_loss=0.5", "show runs/a", "watch runs/a --timeout 0.01",
    "watch runs/a --timeout 0.01 --exec true",
    "plan 7B --ranks 8 --storage s3 --compress --days 9",
    "plan 7B --ranks 16 --tp 2 --optimizer sgd --mtbf 6h",
    "import weights.pt imported --step 3", "show weights.pt --tensors", "verify weights.pt",
    "export runs/a exported", "cp runs/a@6 small --compress zstd", "ls small", "show small",
    "average runs/a average.pt --last 2 --to torch",
    "completion bash",
]  # fmt: skip


@pytest.mark.slow
def test_every_command_keeps_to_the_schema_of_its_json(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for call in CALLS:
        main([*call.split(), "--json"])
        written = json.loads(capsys.readouterr().out)
        schema = json.loads((SCHEMAS / f"{call.split()[0]}.json").read_text())
        errors = [
            f"{call}: {e.json_path}: {e.message}"
            for e in jsonschema.Draft202012Validator(schema).iter_errors(written)
        ]
        assert errors == []


def test_every_command_has_a_schema_and_is_called():
    commands = next(action.choices for action in parser()._actions if action.choices)
    assert (
        sorted(commands)
        == sorted(path.stem for path in SCHEMAS.iterdir())
        == sorted({call.split()[0] for call in CALLS})
    )
