"""The Lightning adapter is configured from YAML and from the command line alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from examples import lightning_cli
from lightning_ckpt import ShardedCheckpoint
from tests.adapters.lightning_jobs import committed

# Lightning warns of small data sets and few workers, and torchdata of torch.
pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLE = Path(lightning_cli.__file__).with_name("lightning_cli.yaml")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return str(EXAMPLE)


@pytest.mark.slow
def test_the_callback_comes_from_yaml_and_the_config_survives_its_own_dump(config, tmp_path):
    lightning_cli.main(["fit", "--config", config])

    assert "step-000000040" in committed(tmp_path / "runs" / "lightning-cli")
    again = yaml.safe_load(Path("config.yaml").read_text())["trainer"]["callbacks"][0]
    assert again["class_path"].endswith("ShardedCheckpoint")
    assert again["init_args"]["save"] == {"every_steps": 10, "on_preemption": True}
    assert again["init_args"]["keep"] == {"latest": 2, "best": {"metric": "loss"}}


@pytest.mark.slow
def test_the_command_line_adds_the_callback_and_resumes(config, tmp_path):
    added = [
        "--trainer.callbacks+=lightning_ckpt.ShardedCheckpoint",
        "--trainer.callbacks.dirpath=runs/added",
        "--trainer.callbacks.save.every_steps=5",
        "--trainer.callbacks.save_last=false",
        "--trainer.callbacks.arenas=2",
        "--trainer.callbacks.back_pressure=skip",
        "--trainer.callbacks.staging_memory=64 MiB",
        "--trainer.callbacks.write_bandwidth=500 MB/s",
        "--trainer.callbacks.headroom=2 %",
        '--trainer.callbacks.upload={"to": "runs/tier", "every": 2, "keep": {"latest": 3}}',
    ]
    plain = yaml.safe_load(EXAMPLE.read_text())
    del plain["trainer"]["callbacks"]
    Path("plain.yaml").write_text(yaml.safe_dump(plain))
    first = ["fit", "--config", "plain.yaml", *added, "--trainer.max_steps=7"]
    lightning_cli.main(first)
    cli = lightning_cli.main([*first[:-1], "--trainer.max_steps=12", "--ckpt_path=last"])

    (checkpoint,) = [each for each in cli.trainer.callbacks if isinstance(each, ShardedCheckpoint)]
    options = checkpoint.settings.options
    assert (options.arenas, options.back_pressure) == (2, "skip")
    assert options.staging_memory_bytes == 64 << 20
    assert options.write_bytes_per_second == 500_000_000
    assert options.free_headroom.share == 0.02
    assert committed(tmp_path / "runs" / "added") == ["step-000000005", "step-000000010"]
    assert committed(tmp_path / "runs" / "tier") == ["step-000000005", "step-000000010"]
    assert cli.trainer.global_step == 12


@pytest.mark.slow
def test_the_plugin_comes_from_yaml(config, tmp_path):
    plain = yaml.safe_load(EXAMPLE.read_text())
    plugin = plain["trainer"].pop("callbacks")[0]
    plugin["class_path"] = "lightning_ckpt.ShardedCheckpointIO"
    plain["trainer"] |= {"plugins": [plugin], "enable_checkpointing": False, "max_steps": 20}
    Path("plugin.yaml").write_text(yaml.safe_dump(plain))

    lightning_cli.main(["fit", "--config", "plugin.yaml"])

    assert "step-000000020" in committed(tmp_path / "runs" / "lightning-cli")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["callbacks", "plugins"])
def test_the_words_of_a_model_checkpoint_in_yaml_get_the_advice_that_python_gets(config, kind):
    plain = yaml.safe_load(EXAMPLE.read_text())
    given = plain["trainer"].pop("callbacks")[0]
    given["init_args"] |= {"monitor": "loss", "save_top_k": 2, "every_n_train_steps": 10}
    given["class_path"] += "IO" if kind == "plugins" else ""
    plain["trainer"][kind] = [given]
    Path("old.yaml").write_text(yaml.safe_dump(plain))

    with pytest.raises(Exception, match=r'save=EverySteps\(10\); .*keep=KeepBest\("loss", n=2\)'):
        lightning_cli.main(["fit", "--config", "old.yaml"])
