"""The choice of a client by URL."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final

from ckpt_core.disclosure import public_url
from ckpt_core.errors import ConfigError
from ckpt_core.storage.object._client import ObjectClient

_FASTEST: Final = {
    "s3": "botocore",
    "s3a": "botocore",
    "gs": "obstore",
    "gcs": "obstore",
    "az": "obstore",
    "abfs": "obstore",
    "abfss": "obstore",
}
_EXTRAS: Final = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def connect(url: str, client: str | None, storage_options: dict[str, Any], **arguments: Any) -> ObjectClient:
    """Make the client of a URL, without using the network.

    Raises:
        ConfigError: there is no such client for the URL, or it does not take an option.
    """
    protocol = url.partition("://")[0]
    fastest = _FASTEST.get(protocol, "fsspec")
    if client not in {None, fastest, "fsspec"}:
        known = " or ".join(sorted({repr(fastest), "'fsspec'"}))
        raise ConfigError(
            f"{public_url(url)}: storage_options client={client!r}: for {protocol}:// it is {known}; "
            "leave it out for the fastest"
        )
    if "fsspec" in {client, fastest} or (client is None and not _is_installed(fastest)):
        from ckpt_core.storage.object._service import ObjectService

        return ObjectService(url, storage_options, **arguments)
    if not _is_installed(fastest):
        extra = _EXTRAS.get(protocol, "azure")
        raise ConfigError(f'{public_url(url)}: {fastest} is not installed; pip install "ckpt-suite[{extra}]"')
    if fastest == "botocore":
        from ckpt_core.storage.object._s3 import S3Client

        return S3Client(url, storage_options, **arguments)
    from ckpt_core.storage.object._obstore import ObstoreClient

    return ObstoreClient(url, storage_options, **arguments)


def _is_installed(library: str) -> bool:
    with suppress(ImportError):
        return find_spec(library) is not None
    return False
