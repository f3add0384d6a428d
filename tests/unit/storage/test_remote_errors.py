"""What cloud libraries raise becomes what the `Storage` contract names."""

from __future__ import annotations

import pytest

from ckpt_core.storage import object_storage
from ckpt_core.storage.object._translation import translated_errors


def test_missing_credentials_are_a_permission_error():
    exceptions = pytest.importorskip("botocore.exceptions")
    with (
        pytest.raises(PermissionError, match=r"credentials.*s3://b/r") as caught,
        translated_errors("s3://b/r"),
    ):
        raise exceptions.NoCredentialsError
    assert isinstance(caught.value.__cause__, exceptions.NoCredentialsError)


def test_refused_by_google_is_a_permission_error():
    requests = pytest.importorskip("requests")
    for status, advice in ((401, "expired"), (403, "what they allow")):
        answer = requests.Response()
        answer.status_code = status
        with pytest.raises(PermissionError, match=advice), translated_errors("gs://b/r"):
            answer.raise_for_status()


def test_no_default_credentials_for_google_is_a_permission_error():
    exceptions = pytest.importorskip("google.auth.exceptions")
    with pytest.raises(PermissionError, match="gs://b/r"), translated_errors("gs://b/r"):
        raise exceptions.DefaultCredentialsError("none found")


def test_an_unreachable_endpoint_is_an_os_error():
    exceptions = pytest.importorskip("botocore.exceptions")
    with pytest.raises(OSError, match="EndpointConnectionError"), translated_errors("s3://b/r"):
        raise exceptions.EndpointConnectionError(endpoint_url="http://x")


@pytest.mark.parametrize("response", [None, object()])
def test_a_lost_connection_is_an_os_error(response):
    exceptions = pytest.importorskip("botocore.exceptions")
    with pytest.raises(OSError, match="ConnectionClosedError"), translated_errors("s3://b/r"):
        raise exceptions.ConnectionClosedError(endpoint_url="http://x", request=None, response=response)


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), OSError(28, "x"), FileNotFoundError(2, "x")])
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, translated_errors("s3://b/r"):
        raise error
    assert caught.value is error


@pytest.mark.emulator
def test_a_job_without_credentials_is_told_so(s3_endpoint, monkeypatch, tmp_path):
    pytest.importorskip("botocore")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(PermissionError, match="check the credentials"):
        object_storage("s3://bucket/run", endpoint_url=s3_endpoint).check_root()
