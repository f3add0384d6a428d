"""Versioned, encrypted and archived buckets, and odd keys in them, as docs/disks-and-buckets.md tells it."""

from __future__ import annotations

import secrets
from collections import Counter

import pytest
import torch

from ckpt_core import CheckpointManager, KeepLatest
from ckpt_core.cli import main
from ckpt_core.commit import verify
from ckpt_core.errors import ArchivedError
from ckpt_core.names import OWN
from ckpt_core.storage import object_storage

pytestmark = pytest.mark.emulator

OWNER = "123456789012"


def weights(step=0):
    return {"w": torch.full((4,), float(step))}


class Bucket:
    """A bucket of the emulator."""

    def __init__(self, endpoint):
        boto3 = pytest.importorskip("boto3")
        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
        self.client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
        self.name = f"bucket-{secrets.token_hex(8)}"
        self.client.create_bucket(Bucket=self.name)
        self.url = f"s3://{self.name}/run"
        self.options = {"key": "testing", "secret": "testing", "endpoint_url": endpoint}

    def manager(self, **options):
        return CheckpointManager(object_storage(self.url, **self.options), **options)

    def put(self, key, body=b"x", **details):
        self.client.put_object(Bucket=self.name, Key=f"run/{key}", Body=body, **details)

    def archive(self, key):
        body = self.client.get_object(Bucket=self.name, Key=f"run/{key}")["Body"].read()
        self.put(key, body, StorageClass="GLACIER")

    def keys(self):
        found = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return [each["Key"] for each in found]


@pytest.fixture
def bucket(s3_endpoint):
    return Bucket(s3_endpoint)


def test_a_versioned_bucket_keeps_what_is_pruned_and_encrypts_every_object(bucket):
    client, name = bucket.client, bucket.name
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    bucket.options["s3_additional_kwargs"] = {"ServerSideEncryption": "aws:kms", "ExpectedBucketOwner": OWNER}
    # What follows is as odd as keys can be; none of it is ours, and none of it may matter.
    for key in ("../COMMITTED", "./x", "/y", "step-000000001/../z"):
        bucket.put(key)
    strangers = set(bucket.keys())
    with bucket.manager(keep=KeepLatest(1)) as manager:
        for step in (1, 2, 3):
            manager.save(step, weights(step)).result()
        manager.wait()
        state = weights()
        assert manager.resume(state) == 3
        assert verify(manager.storage, "step-000000003") == []
    live = bucket.keys()
    assert strangers <= set(live), "what is not ours is left"
    ours = [key for key in live if key not in strangers]
    assert {key.split("/")[1] for key in ours} == {"step-000000003", OWN}
    assert {client.head_object(Bucket=name, Key=key)["ServerSideEncryption"] for key in ours} == {"aws:kms"}
    versions = client.list_object_versions(Bucket=name)
    pruned = Counter(each["Key"].split("/")[1] for each in versions["DeleteMarkers"])
    assert {"step-000000001", "step-000000002", OWN} <= set(pruned)
    old = [each for each in versions["Versions"] if each["Key"].startswith("run/step-000000001/")]
    assert len(old) >= 6, "only a lifecycle rule frees what was pruned"


def test_an_archived_checkpoint_is_refused_if_it_is_the_newest_and_else_passed_over(
    bucket, capsys, monkeypatch
):
    with bucket.manager() as manager:
        for step in (1, 2):
            manager.save(step, weights(step)).result()
    bucket.archive("step-000000001/__0_0.distcp")
    bucket.archive("step-000000001/COMMITTED")
    with bucket.manager() as manager:
        assert manager.resume(weights()) == 2
    bucket.archive("step-000000002/__0_0.distcp")
    with bucket.manager() as manager, pytest.raises(ArchivedError, match=r"step-000000002.*RestoreObject"):
        manager.resume(weights())
    endpoint = bucket.options["endpoint_url"]
    monkeypatch.setenv(
        "CKPT_SUITE_STORAGE_OPTIONS", f"{{key: testing, secret: testing, endpoint_url: '{endpoint}'}}"
    )
    assert main(["ls", bucket.url]) == 0
    assert main(["verify", bucket.url, "--all"]) == 1
    said = capsys.readouterr()
    assert "restore it" in said.out
    assert "Traceback" not in said.err
    assert ".ckpt-suite/damaged.json" not in str(bucket.keys()), "what is archived is whole"
