"""The command `ckpt` on a bucket: copies there and back, and all that looks at the copy."""

from __future__ import annotations

import json
import secrets

import pytest

from ckpt_core import CheckpointManager
from ckpt_core.cli import main
from ckpt_core.commit import Catalog, verify
from ckpt_core.names import DAMAGED, NOTES, OWN, PINS
from ckpt_core.storage import LocalStorage
from ckpt_core.tiers import TierRecord, write_tiers
from tests.unit.commit.checkpoints import save

pytestmark = [pytest.mark.reliability, pytest.mark.emulator]


def test_every_command_takes_a_bucket_with_its_options(s3_endpoint, tmp_path, capsys):
    boto3 = pytest.importorskip("boto3")
    keys = {"aws_access_key_id": "job", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    bucket = f"bucket-{secrets.token_hex(8)}"
    client = boto3.client("s3", endpoint_url=s3_endpoint, **keys)
    client.create_bucket(Bucket=bucket)
    url, local = f"s3://{bucket}/run", LocalStorage(tmp_path / "run")
    for step in (1, 2):
        save(local, step)
    write_tiers(local, [TierRecord(url=url)])
    options = {"key": "job", "secret": "testing", "endpoint_url": s3_endpoint}
    words = [word for key, value in options.items() for word in ("--storage-option", f"{key}={value}")]

    def ckpt(*arguments):
        code = main([*map(str, arguments), *words, "--json"])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, ""), captured
        return json.loads(captured.out)

    def states():
        (tier,) = ckpt("ls", tmp_path / "run", "--tier", url)["tiers"]
        return [each["state"] for each in tier["checkpoints"]]

    assert states() == ["missing", "missing"]
    sent = ckpt("upload", tmp_path / "run", "--to", url)["tiers"][0]["checkpoints"]
    assert [each["name"] for each in sent] == ["step-000000002"]
    assert states() == ["missing", "committed"]
    assert [each["state"] for each in ckpt("cp", tmp_path / "run", url)["checkpoints"]] == ["there", "copied"]
    assert [each["step"] for each in ckpt("ls", url)["checkpoints"]] == [1, 2]
    assert ckpt("show", f"{url}/step-000000001")["checkpoint"] == f"{url}/step-000000001"
    assert [each["ok"] for each in ckpt("verify", url, "--all")["checkpoints"]] == [True, True]
    ckpt("pin", f"{url}@2", "--reason", "paper")
    ckpt("mark", f"{url}@1", "bad", "--reason", "diverged")
    assert ckpt("annotate", f"{url}@2", "--metric", "accuracy=0.5")["metrics"] == {"accuracy": 0.5}
    (seen,) = ckpt("watch", url, "--each", "--timeout", "0.01", "--exec", "true")["checkpoints"]
    assert (seen["step"], seen["path"], seen["exit_code"]) == (2, f"{url}/step-000000002", 0)
    ckpt("cp", url, tmp_path / "back")
    back = Catalog(LocalStorage(tmp_path / "back"))
    assert back.find(step=2).metrics["accuracy"] == 0.5
    assert [(info.step, info.pinned, info.bad) for info in back.committed()] == [
        (1, None, "diverged"),
        (2, "paper", None),
    ]
    assert [verify(LocalStorage(tmp_path / "back"), info.name) for info in back.committed()] == [[], []]
    assert [each["step"] for each in ckpt("prune", url, "--bad")["drop"]] == [1]
    left = [each["Key"] for each in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert {key.split("/")[1] for key in left} == {"step-000000002", OWN}
    own = {key.partition("/")[2] for key in left if OWN in key}
    assert {key for key in own if not key.startswith(f"{NOTES}/measured-")} == {PINS, DAMAGED}


def test_an_export_goes_from_bucket_to_bucket(s3_endpoint, tmp_path, capsys):
    """The index comes last, and what a kill left there is continued."""
    boto3, torch = pytest.importorskip("boto3"), pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    keys = {"aws_access_key_id": "job", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    bucket = f"bucket-{secrets.token_hex(8)}"
    client = boto3.client("s3", endpoint_url=s3_endpoint, **keys)
    client.create_bucket(Bucket=bucket)
    options = {"key": "job", "secret": "testing", "endpoint_url": s3_endpoint}
    words = [word for key, value in options.items() for word in ("--storage-option", f"{key}={value}")]
    state = {name: torch.randn(600, 500) for name in ("first", "second")}
    with CheckpointManager(f"s3://{bucket}/run", storage_options=options) as manager:
        manager.save(7, {"model": state})

    def ckpt(*arguments):
        code = main([*map(str, arguments), *words])
        return code, capsys.readouterr().err

    def there():
        return [
            each["Key"] for each in client.list_objects_v2(Bucket=bucket, Prefix="hf/").get("Contents", ())
        ]

    given = ["export", f"s3://{bucket}/run@7", f"s3://{bucket}/hf", "--shard-size", "1 MB"]
    shards = [f"hf/model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert ckpt(*given)[0] == 0
    assert there() == [*shards, "hf/model.safetensors.index.json"]
    code, told = ckpt(*given)
    assert code != 0
    assert "is not empty" in told
    for name, key in zip(state, shards, strict=True):
        content = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        assert torch.equal(safetensors.load(content)[name], state[name])
