"""The choice of a client by URL."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, final

from ckpt_core.disclosure import public_url
from ckpt_core.errors import ConfigError
from ckpt_core.storage.object._client import ObjectClient


@final
class _Native(NamedTuple):
    """The fastest client of a protocol."""

    client: str
    libraries: tuple[str, ...]
    extra: str

    def is_installed(self) -> bool:
        with suppress(ImportError):
            return all(find_spec(library) is not None for library in self.libraries)
        return False


_NATIVE: Final = {
    **dict.fromkeys(("s3", "s3a"), _Native("botocore", ("botocore",), "s3")),
    **dict.fromkeys(("gs", "gcs"), _Native("obstore", ("obstore", "gcsfs"), "gcs")),
    **dict.fromkeys(("az", "abfs", "abfss"), _Native("obstore", ("obstore", "adlfs"), "azure")),
}


def connect(url: str, client: str | None, storage_options: dict[str, Any], **arguments: Any) -> ObjectClient:
    """Make the client of a URL, without using the network.

    Raises:
        ConfigError: there is no such client for the URL, or it does not take an option.
    """
    protocol = url.partition("://")[0]
    native = _NATIVE.get(protocol)
    known = {"fsspec"} if native is None else {native.client, "fsspec"}
    if client not in {None, *known}:
        raise ConfigError(
            f"{public_url(url)}: storage_options client={client!r}: for {protocol}:// it is "
            f"{' or '.join(map(repr, sorted(known)))}; leave it out for the fastest"
        )
    if native is None or client == "fsspec" or (client is None and not native.is_installed()):
        from ckpt_core.storage.object._service import ObjectService

        return ObjectService(url, storage_options, **arguments)
    if not native.is_installed():
        raise ConfigError(
            f'{public_url(url)}: {native.client} is not installed; pip install "ckpt-suite[{native.extra}]"'
        )
    if native.client == "botocore":
        from ckpt_core.storage.object._s3 import S3Client

        return S3Client(url, storage_options, **arguments)
    from ckpt_core.storage.object._obstore import ObstoreClient

    return ObstoreClient(url, storage_options, **arguments)
