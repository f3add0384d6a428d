"""Exports from a root in a bucket into a bucket, by a process that is given the options of both."""

from __future__ import annotations

import secrets
import threading

import pytest
import torch
from safetensors.torch import load

from ckpt_core import CheckpointManager, Export
from ckpt_core.storage import open_storage
from ckpt_core.tiers import read_exports

pytestmark = [
    pytest.mark.reliability,
    pytest.mark.emulator,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def test_weights_go_from_bucket_to_bucket_and_only_so_many_stay(s3_endpoint):
    boto3 = pytest.importorskip("boto3")
    keys = {"aws_access_key_id": "job", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    bucket = f"bucket-{secrets.token_hex(8)}"
    boto3.client("s3", endpoint_url=s3_endpoint, **keys).create_bucket(Bucket=bucket)
    options = {"key": "job", "secret": "testing", "endpoint_url": s3_endpoint}
    url = f"s3://{bucket}/weights"
    export = Export(to="hf", place=url, when={"every": 1}, dtype="bf16", keep=1, storage_options=options)
    model, place = torch.nn.Linear(30, 30), open_storage(url, options)
    with CheckpointManager(f"s3://{bucket}/run", storage_options=options, export=export) as manager:
        manager.save(1, {"model": model}).result(60)
        while not read_exports(place)[0]:
            threading.Event().wait(0.1)
        manager.save(2, {"model": model}).result(60)
    assert sorted(each.name for each in place.list("")) == ["exports.json", "step-000000002"]
    found = load(place.read_bytes("step-000000002/model.safetensors"))
    expected = {name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
