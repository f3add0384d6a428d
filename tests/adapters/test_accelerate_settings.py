"""Where settings come from, and the seams of accelerate that the adapter stands on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_ckpt._roots import Settings
from accelerate_ckpt._runner import main
from ckpt_core import ConfigError, EverySteps, KeepLatest
from tests.scripts import run_python

_SCRIPT = """
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, batch in enumerate(loader):
    accelerator.backward(model(batch).pow(2).mean())
    optimizer.step()
    accelerator.save_state(f"{sys.argv[1]}/checkpoint_{number}")
"""
_YAML = """
save: {every_steps: 2}
keep: {latest: 1}
"""


def test_explicit_arguments_win_over_the_environment_and_that_over_a_file(tmp_path: Path) -> None:
    side_file = tmp_path / "checkpoints.yaml"
    side_file.write_text(
        "ckpt: {save: {every_steps: 1}, keep: {latest: 1}, staging_memory: 1 GiB, arenas: 2}"
    )
    environment = {
        "CKPT_SUITE_CONFIG": str(side_file),
        "CKPT_SUITE_KEEP": "{latest: 2}",
        "CKPT_SUITE_ROOT": "r",
        "CKPT_SUITE_STAGING_MEMORY": "512 MiB",
        "CKPT_SUITE_WRITE_BANDWIDTH": "500 MB/s",
    }
    settings = Settings.resolve({"save": EverySteps(7), "keep": None}, environment)
    assert settings.options.save == EverySteps(7)
    assert settings.options.keep == KeepLatest(2)
    assert (settings.options.arenas, settings.options.staging_memory_bytes) == (2, 512 << 20)
    assert settings.options.write_bytes_per_second == 500_000_000
    assert settings.root == "r"
    assert settings.stock_files is None


def test_variables_of_the_core_are_no_settings() -> None:
    named = {"CKPT_SUITE_CODE_VERSION": "image-7"}
    assert Settings.resolve({}, named) == Settings.resolve({}, {})


def test_a_toml_side_file_is_read_too(tmp_path: Path) -> None:
    side_file = tmp_path / "checkpoints.toml"
    side_file.write_text("stock_files = false\n[save]\nevery_steps = 5\n")
    settings = Settings.resolve({}, {"CKPT_SUITE_CONFIG": str(side_file)})
    assert settings.options.save == EverySteps(5)
    assert not settings.stock_files


@pytest.mark.parametrize(
    ("explicit", "environment", "told"),
    [
        ({"kep": 1}, {}, "kep"),
        ({}, {"CKPT_SUITE_KEP": "1"}, "CKPT_SUITE_KEP"),
        ({}, {"CKPT_SUITE_KEEP": "{"}, "CKPT_SUITE_KEEP"),
        ({}, {"CKPT_SUITE_CONFIG": "nowhere.yaml"}, "nowhere.yaml"),
        ({"stock_files": "no"}, {}, "stock_files"),
        ({"root": 7}, {}, "root must be a directory"),
        ({}, {"CKPT_SUITE_SVAE": "5"}, "did you mean 'CKPT_SUITE_SAVE'"),
        ({}, {"CKPT_SUITE_STOCK_FILES": "2"}, "stock_files"),
    ],
)
def test_what_is_wrong_is_named(explicit: dict[str, object], environment: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Settings.resolve(explicit, environment)


@pytest.mark.parametrize("arguments", [[], ["-m"], ["nowhere.py"]])
def test_the_runner_says_how_it_is_used(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage"):
        main(arguments)


def test_the_runner_helps(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert "CKPT_SUITE_SAVE" in capsys.readouterr().out


def test_without_accelerate_the_extra_is_named(tmp_path: Path) -> None:
    # Without its site-packages, so that only what is on the path of this project can be imported.
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import accelerate_ckpt"],
        check=False, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "ckpt-suite[accelerate]" in done.stderr


def test_what_is_meant_is_understood(tmp_path: Path) -> None:
    environment = {
        "CKPT_SUITE_SAVE": "500",
        "CKPT_SUITE_KEEP": "3",
        "CKPT_SUITE_STOCK_FILES": "1",
        "CKPT_SUITE_JOURNAL": "0",
        "CKPT_SUITE_VERIFY": "0",
        "CKPT_SUITE_ROOT": "1234",
    }
    settings = Settings.resolve({}, environment)
    assert settings.root == "1234", "the id of a job"
    assert settings.stock_files
    options = settings.options
    assert (options.save, options.keep) == (EverySteps(500), KeepLatest(3))
    assert (options.journal, options.verification) == (False, "off")
    assert Settings.resolve({"save": 5, "keep": 3}, {}).options.save == EverySteps(5)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("total_limit", "KeepLatest"),
        ("max_to_keep", "KeepLatest"),
        ("save_steps", "EverySteps"),
        ("dirpath", "root"),
    ],
)
def test_options_of_other_libraries_are_answered_with_ours(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} \(write .*{told}"):
        Settings.resolve({name: 3}, {})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ckpt: {kep: {latest: 3}}", "options.yaml: ckpt: no such option: kep .did you mean 'keep'.."),
        ("ckpt: {stock_file: true}", "options.yaml.*did you mean 'stock_files'"),
        ("ckpt: {keep: {latets: 3}}", "options.yaml: ckpt: .*latest"),
        ("ckpt: {arenas: 7}", "options.yaml: ckpt: .*arenas"),
        ("ckpt: 3", "options.yaml: ckpt must be a mapping"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_file_and_section(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "options.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        Settings.resolve({}, {"CKPT_SUITE_CONFIG": str(tmp_path / "options.yaml")})


def prepared(folder: Path) -> dict[str, str]:
    """Write script and configuration; what the environment needs besides."""
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "run.yaml").write_text(_YAML)
    return {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def committed(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("*/COMMITTED"))


@pytest.mark.slow
def test_an_unchanged_script_gets_it_from_the_runner_and_the_environment(tmp_path: Path) -> None:
    variables = {**prepared(tmp_path), "CKPT_SUITE_KEEP": "{latest: 2}"}
    done = run_python("-m", "accelerate_ckpt", "train.py", "out", cwd=tmp_path, variables=variables)
    assert done.returncode == 0, done.stderr
    assert committed(tmp_path / "out") == ["checkpoint_6", "checkpoint_7"]
    assert not (tmp_path / "out" / ".ckpt-suite/writer.json").exists(), (
        "given back at exit, without end_training"
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_an_unchanged_script_gets_it_from_accelerate_launch_and_a_file(tmp_path: Path) -> None:
    inherited = {"PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR"}
    kept = {name: value for name, value in os.environ.items() if name in inherited}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--multi_gpu"]
    kept["CKPT_SUITE_CONFIG"] = "run.yaml"
    done = subprocess.run(
        [*launch, "-m", "accelerate_ckpt", "train.py", "out"],
        check=False, cwd=tmp_path, env=kept | prepared(tmp_path), capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert committed(tmp_path / "out") == ["checkpoint_3"]
    assert len(list((tmp_path / "out" / "checkpoint_3").glob("random_states_*.pkl"))) == 2
