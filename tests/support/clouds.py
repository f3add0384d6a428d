"""A fresh bucket in an emulator of each service, as tests see it: past our storage, and with faults."""

from __future__ import annotations

import json
import urllib.request
import uuid
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final
from urllib.parse import quote

from ckpt_core.storage import ObjectStorage, object_storage
from tests.support.emulators import AZURE_ACCOUNT, AZURE_KEY
from tests.support.service_faults import ServiceControl, ServiceFault


@final
@dataclass(frozen=True, kw_only=True)
class Cloud:
    """A bucket.

    Attributes:
        kind: `s3`, `gcs` or `azure`.
        endpoint: URL of the emulator.
        bucket: its name.
    """

    kind: str
    endpoint: str
    bucket: str = ""

    @classmethod
    def fresh(cls, kind: str, endpoint: str) -> Cloud:
        """Make an empty bucket."""
        made = cls(kind=kind, endpoint=endpoint, bucket=f"bucket-{uuid.uuid4().hex}")
        made.make()
        return made

    def make(self) -> None:
        """Make the bucket."""
        if self.kind == "gcs":
            body = json.dumps({"name": self.bucket}).encode()
            request = urllib.request.Request(f"{self.endpoint}/storage/v1/b?project=test", body)
            urllib.request.urlopen(request).close()
        elif self.kind == "azure":
            self._azure.create_container(self.bucket)
        else:
            self._s3.create_bucket(Bucket=self.bucket)

    @property
    def scheme(self) -> str:
        """Of URLs."""
        return {"s3": "s3", "gcs": "gs", "azure": "az"}[self.kind]

    @property
    def control(self) -> ServiceControl:
        """Of its faults."""
        return ServiceControl(self.endpoint)

    @property
    def options(self) -> dict[str, Any]:
        """What `storage_options` must say to get there, in fsspec's words."""
        if self.kind == "gcs":
            return {"token": "anon", "project": "test", "endpoint_url": self.endpoint}
        if self.kind == "azure":
            told = {"AccountName": AZURE_ACCOUNT, "AccountKey": AZURE_KEY, "BlobEndpoint": self._account}
            return {"connection_string": ";".join(f"{key}={value}" for key, value in told.items())}
        return {"key": "testing", "secret": "testing", "endpoint_url": self.endpoint}

    def storage(self, root: str, *, url: str = "", **options: Any) -> ObjectStorage:
        """A root in the bucket, as a user opens it."""
        return object_storage(url or f"{self.scheme}://{self.bucket}/{root}", **self.options, **options)

    def read(self, name: str) -> bytes:
        """The content of an object, past our storage.

        Raises:
            FileNotFoundError: there is none.
        """
        try:
            if self.kind == "gcs":
                url = f"{self.endpoint}/storage/v1/b/{self.bucket}/o/{quote(name)}?alt=media"
                return bytes(urllib.request.urlopen(url).read())
            if self.kind == "azure":
                return bytes(self._azure.get_blob_client(self.bucket, name).download_blob().readall())
            return bytes(self._s3.get_object(Bucket=self.bucket, Key=name)["Body"].read())
        except Exception as error:
            if type(error).__name__ in {"HTTPError", "ResourceNotFoundError", "NoSuchKey"}:
                raise FileNotFoundError(name) from None
            raise

    def write(self, name: str, content: bytes) -> None:
        """Write an object, whatever is there, past our storage."""
        if self.kind == "gcs":
            url = f"{self.endpoint}/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={quote(name)}"
            urllib.request.urlopen(urllib.request.Request(url, content)).close()
        elif self.kind == "azure":
            self._azure.get_blob_client(self.bucket, name).upload_blob(content, overwrite=True)
        else:
            self._s3.put_object(Bucket=self.bucket, Key=name, Body=content)

    def names(self) -> list[str]:
        """All objects, sorted."""
        if self.kind == "gcs":
            with urllib.request.urlopen(f"{self.endpoint}/storage/v1/b/{self.bucket}/o") as answer:
                return sorted(item["name"] for item in json.load(answer).get("items", []))
        if self.kind == "azure":
            return sorted(self._azure.get_container_client(self.bucket).list_blob_names())
        found = self._s3.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        return sorted(str(entry["Key"]) for entry in found)

    def begun(self) -> list[str]:
        """The objects of which uploads in parts have begun and not ended; on S3 alone."""
        if self.kind != "s3":
            return []
        return [
            str(each["Key"])
            for each in self._s3.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        ]

    def empty(self) -> None:
        """Delete all objects, past our storage."""
        for name in self.names():
            if self.kind == "gcs":
                url = f"{self.endpoint}/storage/v1/b/{self.bucket}/o/{quote(name, safe='')}"
                urllib.request.urlopen(urllib.request.Request(url, method="DELETE")).close()
            elif self.kind == "azure":
                self._azure.get_blob_client(self.bucket, name).delete_blob()
            else:
                self._s3.delete_object(Bucket=self.bucket, Key=name)

    def fault(self, action: Any, method: str, target: str, **details: Any) -> None:
        """Set one fault; `target` is a pattern of path and query, and may begin with `*`."""
        self.control.set(ServiceFault(action=action, method=method, target=target, **details))

    @property
    def _account(self) -> str:
        return f"{self.endpoint}/{AZURE_ACCOUNT}"

    @cached_property
    def _azure(self) -> Any:
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient(self._account, credential=AZURE_KEY)

    @cached_property
    def _s3(self) -> Any:
        import boto3

        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
        return boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1", **keys)
