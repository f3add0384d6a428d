"""Azure: credentials, and uploads in blocks that never overwrite."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, cast, final
from urllib.parse import urlsplit

from ckpt_core.errors import ConfigError
from ckpt_core.storage._base import StorageEntry
from ckpt_core.storage.object._translation import refuse_others

if TYPE_CHECKING:
    from azure.storage.blob import BlobClient, BlobServiceClient
    from obstore.store import AzureStore, GCSStore

AZURE_METADATA: Final = "ckptupload"
"""The name of an upload's token in the metadata of its blob, where Azure takes letters and digits only."""

_SECRETS: Final = ("account_key", "connection_string", "sas_token", "client_id", "client_secret", "tenant_id")
_ENVIRONMENT: Final = ("account_name", *_SECRETS)
_OPTIONS: Final = (*_ENVIRONMENT, "account_host", "credential", "anon")
_SCOPE: Final = "https://storage.azure.com/.default"
# That of adlfs and of obstore: all blocks of a blob must have names of one length.
_NAME_LENGTH: Final = 32
_TRIES: Final = 4


@final
class AzureContainer:
    """A container, asked for in the words of adlfs."""

    def __init__(
        self, url: str, container: str, options: Mapping[str, Any], seconds: float, **arguments: Any
    ) -> None:
        """Connect lazily; `arguments` are of obstore, `seconds` the limit of one request.

        Options are `account_name`, `account_key`, `account_host`, `connection_string`, `credential` (one of
        azure.identity that is not asynchronous), `sas_token`, `client_id`, `client_secret`, `tenant_id`,
        `anon`. What is missing is looked for where adlfs does. Another one, or none that names the account,
        is a ConfigError.
        """
        refuse_others(url, options, _OPTIONS)
        given = {name: os.environ.get(f"AZURE_STORAGE_{name.upper()}") for name in _ENVIRONMENT}
        account = _Account.of(url, {**given, **options})
        self.store: GCSStore | AzureStore = account.store(container, **arguments)
        self.service = account.service(seconds)
        self.token_name = AZURE_METADATA
        self._container = container

    def listed(self, prefix: str, delimiter: str) -> Iterator[StorageEntry]:
        from azure.storage.blob import BlobPrefix

        container = self.service.get_container_client(self._container)
        found: Iterable[Any] = container.list_blobs(name_starts_with=prefix)
        if delimiter:
            found = container.walk_blobs(name_starts_with=prefix, delimiter=delimiter)
        for entry in found:
            if isinstance(entry, BlobPrefix):
                yield StorageEntry(entry.name[:-1], is_directory=True, size_bytes=0)
            else:
                yield StorageEntry(entry.name, is_directory=False, size_bytes=entry.size)

    def remove(self, path: str) -> None:
        self.blob(path).delete_blob()

    def begin(self, path: str, token: str, scratch: str) -> AzureParts:
        del scratch
        return AzureParts(self, path, token)

    def blob(self, path: str) -> BlobClient:
        return self.service.get_blob_client(self._container, path)


@final
class AzureParts:
    """A new blob that arrives in blocks; `send` may be called from several threads.

    Azure drops blocks that are in no list within a week.
    """

    def __init__(self, container: AzureContainer, path: str, token: str) -> None:
        self._blob = container.blob(path)
        self._token = token
        self._stem = hashlib.sha256(token.encode()).hexdigest()[:16]

    def name_of(self, number: int, mark: str) -> str:
        return f"{self._stem}{number:05d}{mark:->{_NAME_LENGTH - 21}}"

    def there(self) -> frozenset[str]:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            _, waiting = self._blob.get_block_list("uncommitted")
        except ResourceNotFoundError:
            return frozenset()
        return frozenset(str(block.id) for block in waiting)

    def send(self, name: str, content: Sequence[memoryview]) -> None:
        body = content[0] if len(content) == 1 else b"".join(content)
        self._blob.stage_block(name, cast("bytes", body), length=len(body))

    def complete(self, names: Sequence[str]) -> None:
        from azure.core import MatchConditions
        from azure.core.exceptions import ResourceExistsError, ResourceModifiedError
        from azure.storage.blob import BlobBlock

        try:
            self._blob.commit_block_list(
                [BlobBlock(name) for name in names],
                metadata={AZURE_METADATA: self._token},
                match_condition=MatchConditions.IfMissing,
            )
        except (ResourceExistsError, ResourceModifiedError) as error:
            raise FileExistsError(self._blob.blob_name) from error

    def abandon(self) -> None:
        """Do nothing: Azure drops the blocks."""


@final
@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class _Account:
    endpoint: str
    name: str
    key: str | None
    sas: str | None
    credential: Any
    """Of azure.identity; None if the account is asked with a key, a signature or nothing."""

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> _Account:
        pairs = str(options.get("connection_string") or "").split(";")
        told: dict[str, str] = {}
        for pair in filter(None, pairs):
            word, _, value = pair.partition("=")
            told[word] = value
        name = told.get("AccountName") or options.get("account_name") or _account_of(url)
        if not name:
            raise ConfigError(
                f"{url}: nothing names the account of Azure; give storage_options account_name or "
                "connection_string, or the environment variable AZURE_STORAGE_ACCOUNT_NAME"
            )
        suffix = told.get("EndpointSuffix", "core.windows.net")
        host = options.get("account_host") or f"{name}.blob.{suffix}"
        endpoint = told.get("BlobEndpoint") or f"{told.get('DefaultEndpointsProtocol', 'https')}://{host}"
        key = told.get("AccountKey") or options.get("account_key")
        sas = told.get("SharedAccessSignature") or options.get("sas_token")
        anon = str(options.get("anon", os.environ.get("AZURE_STORAGE_ANON")) or "false").lower()
        plain = key or sas or told or anon not in {"false", "0", "f"}
        credential = options.get("credential") or (None if plain else _identity(options))
        ask = getattr(credential, "get_token", None)
        if credential is not None and (ask is None or inspect.iscoroutinefunction(ask)):
            raise ConfigError(
                f"{url}: storage_options credential must be one of azure.identity that is not asynchronous"
            )
        return cls(endpoint=endpoint.rstrip("/"), name=name, key=key, sas=sas, credential=credential)

    def store(self, container: str, **arguments: Any) -> AzureStore:
        from obstore.store import AzureStore

        config: dict[str, Any] = {"account_name": self.name, "endpoint": self.endpoint}
        if self.credential is not None:
            arguments["credential_provider"] = self._bearer
        elif self.key:
            config["account_key"] = self.key
        elif self.sas:
            config["sas_key"] = self.sas.lstrip("?")
        else:
            config["skip_signature"] = True
        client = dict(arguments.pop("client_options", {}))
        if self.endpoint.startswith("http:"):
            client["allow_http"] = True
        made: Any = AzureStore
        return cast("AzureStore", made(container, config=config, client_options=client, **arguments))

    def service(self, seconds: float) -> BlobServiceClient:
        from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
        from azure.storage.blob import BlobServiceClient, LinearRetry

        credential = self.credential
        if credential is None and self.key:
            credential = AzureNamedKeyCredential(self.name, self.key)
        elif credential is None and self.sas:
            credential = AzureSasCredential(self.sas.lstrip("?"))
        # All tries and the waits between them fit into the limit.
        share, wait = seconds / (_TRIES + 2), min(5.0, seconds / 12)
        retry = cast("Any", LinearRetry)(backoff=wait, retry_total=_TRIES - 1, random_jitter_range=wait / 2)
        return BlobServiceClient(
            self.endpoint,
            credential,
            retry_policy=retry,
            connection_timeout=min(10.0, share),
            read_timeout=share,
        )

    def _bearer(self) -> dict[str, Any]:
        token = self.credential.get_token(_SCOPE)
        return {"token": token.token, "expires_at": datetime.fromtimestamp(token.expires_on, UTC)}


def _identity(options: Mapping[str, Any]) -> Any:
    """Return a service principal if one is named, else what the environment offers."""
    from azure.identity import ClientSecretCredential, DefaultAzureCredential

    if options.get("client_id") is None:
        return DefaultAzureCredential()
    return ClientSecretCredential(options["tenant_id"], options["client_id"], options["client_secret"])


def _account_of(url: str) -> str:
    """Return the account of `abfs://container@account.…/…`; "" without one."""
    place = urlsplit(url).netloc.rpartition("@")
    return place[2].partition(".")[0] if place[1] else ""
