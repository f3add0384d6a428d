"""The choice of an object store by URL."""

from __future__ import annotations

from typing import Any, Final

from ckpt_core.disclosure import public_url
from ckpt_core.errors import ConfigError
from ckpt_core.storage.object._storage import ObjectStorage, RequestTerms
from ckpt_core.validation import integer, require

REQUEST_SECONDS: Final = 600.0
"""The default time limit of one request."""

_LEAST_PART_BYTES_OF_S3: Final = 5 * 2**20

_S3: Final = ("s3", "s3a")
_EXTRAS: Final = {
    **dict.fromkeys(_S3, "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "azure"),
}


def object_storage(
    url: str,
    *,
    write_block_bytes: int | None = None,
    request_seconds: float = REQUEST_SECONDS,
    conditional_writes: bool = True,
    **storage_options: Any,
) -> ObjectStorage:
    """Open a prefix in an object store, without using the network.

    Args:
        url: any URL that fsspec knows, with or without a trailing slash.
        write_block_bytes: size of the parts of an upload, on S3 at least 5 MiB; None for the client's.
        request_seconds: the time limit of one request, retries included.
        conditional_writes: whether to create objects only if there is none; a store that speaks S3 but lacks
            `If-None-Match` needs False, and then two jobs must not write to one root.
        storage_options: in the words of the fsspec filesystem (credentials, endpoint…). On S3, time-outs and
            retries are set to fit into `request_seconds` unless `config_kwargs` sets them.

    Raises:
        ConfigError: the protocol is unknown or its extra is not installed, or the client does not take an
            option.
    """
    protocol = url.partition("://")[0]
    if write_block_bytes is not None:
        least = _LEAST_PART_BYTES_OF_S3 if protocol in _S3 else 1
        require(public_url(url), integer("write_block_bytes", write_block_bytes, minimum=least))
    terms = RequestTerms(request_seconds, conditional_writes, write_block_bytes)
    try:
        if protocol in _S3:
            from ckpt_core.storage.object._s3 import S3Storage

            return S3Storage(url, storage_options, terms)
        if protocol in _EXTRAS:
            from ckpt_core.storage.object._obstore import ObstoreStorage

            return ObstoreStorage(url, storage_options, terms)
        from ckpt_core.storage.object._fsspec import FsspecStorage

        return FsspecStorage(url, storage_options, terms)
    except ImportError as error:
        fix = f'pip install "ckpt-suite[{_EXTRAS[protocol]}]"' if protocol in _EXTRAS else "install it"
        raise ConfigError(f"{public_url(url)}: {protocol}:// needs {error.name or error}; {fix}") from None
