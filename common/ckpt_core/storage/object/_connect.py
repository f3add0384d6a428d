"""The choice of a client by URL."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final

from ckpt_core.disclosure import public_url
from ckpt_core.errors import ConfigError
from ckpt_core.storage.object._client import ObjectClient

_FASTEST: Final = {"s3": "botocore", "s3a": "botocore"}


_EXTRAS: Final = {"botocore": "s3"}


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
    if client in _EXTRAS and not _is_installed(client):
        raise ConfigError(
            f'{public_url(url)}: {client} is not installed; pip install "ckpt-suite[{_EXTRAS[client]}]"'
        )
    if client == "botocore" or (client is None and fastest == "botocore" and _is_installed("botocore")):
        from ckpt_core.storage.object._s3 import S3Client

        return S3Client(url, storage_options, **arguments)
    from ckpt_core.storage.object._service import ObjectService

    return ObjectService(url, storage_options, **arguments)


def _is_installed(library: str) -> bool:
    with suppress(ImportError):
        return find_spec(library) is not None
    return False
