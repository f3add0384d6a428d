"""The choice of a client by URL."""

from __future__ import annotations

from typing import Any, Final

from ckpt_core.disclosure import public_url
from ckpt_core.errors import ConfigError
from ckpt_core.storage.object._client import ObjectClient

_S3: Final = ("s3", "s3a")
_EXTRAS: Final = {
    **dict.fromkeys(_S3, "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "azure"),
}


def connect(url: str, storage_options: dict[str, Any], **arguments: Any) -> ObjectClient:
    """Make the client of a URL, without using the network.

    Raises:
        ConfigError: its library is not installed, or does not take an option.
    """
    protocol = url.partition("://")[0]
    try:
        if protocol in _S3:
            from ckpt_core.storage.object._s3 import S3Client

            return S3Client(url, storage_options, **arguments)
        if protocol in _EXTRAS:
            from ckpt_core.storage.object._obstore import ObstoreClient

            return ObstoreClient(url, storage_options, **arguments)
        from ckpt_core.storage.object._fsspec import FsspecClient

        return FsspecClient(url, storage_options, **arguments)
    except ImportError as error:
        fix = f'pip install "ckpt-suite[{_EXTRAS[protocol]}]"' if protocol in _EXTRAS else "install it"
        raise ConfigError(f"{public_url(url)}: {protocol}:// needs {error.name or error}; {fix}") from None
