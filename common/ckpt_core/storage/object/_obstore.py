"""GCS and Azure through obstore: objects go from and to where they lie in memory.

obstore transfers contents. Names are listed and deleted by the services' own interfaces, because obstore
lists nothing where one key cannot be a path.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, final
from urllib.parse import quote, urlsplit

from ckpt_core.crew import run_all
from ckpt_core.errors import ConfigError
from ckpt_core.storage._base import StorageEntry, file_key
from ckpt_core.storage.object._parts import CONNECTIONS, PartedObject, PartStorage
from ckpt_core.storage.object._storage import RequestTerms
from ckpt_core.storage.object._translation import refuse_others, translated_errors, unanswered

if TYPE_CHECKING:
    from azure.storage.blob import BlobClient, BlobServiceClient
    from obstore.store import AzureStore, GCSStore
    from requests import Response, Session

GCS_METADATA: Final = "ckpt-upload"
"""The name of an upload's token in the metadata of its object."""

_GCS_OPTIONS: Final = ("token", "project", "access", "endpoint_url", "requester_pays")
_SERVICE: Final = "https://storage.googleapis.com"
# Google composes no more at a time.
_COMPONENTS: Final = 32
_TRIES: Final = 4
_DELETE_THREADS: Final = 8
_RETRIED: Final = (408, 429, 500, 502, 503, 504)
_LISTED: Final = "nextPageToken,prefixes,items(name,size)"
_AS_OS_ERRORS: Final = {404: FileNotFoundError, 412: FileExistsError}


@final
class GcsBucket:
    """A bucket, asked for in the words of gcsfs, whose library reads the credentials."""

    def __init__(
        self, url: str, bucket: str, options: Mapping[str, Any], seconds: float, **arguments: Any
    ) -> None:
        """Connect lazily; `arguments` are of obstore, `seconds` the limit of one request.

        Options are `token` in all forms of gcsfs, `project`, `access`, `endpoint_url`, `requester_pays`;
        another one is a ConfigError.
        """
        from gcsfs.credentials import GoogleCredentials
        from obstore.store import GCSStore

        refuse_others(url, options, _GCS_OPTIONS)
        self.token_name = GCS_METADATA
        self._bucket = bucket
        self._seconds = seconds
        self._endpoint = str(options.get("endpoint_url") or _SERVICE).rstrip("/")
        project, pays = options.get("project"), options.get("requester_pays")
        self._headers = {"x-goog-user-project": str(project if pays is True else pays)} if pays else {}
        account: Any = GoogleCredentials
        self._account = account(project, options.get("access", "full_control"), options.get("token"))
        client = {**arguments.pop("client_options", {}), "default_headers": self._headers}
        if self._endpoint.startswith("http:"):
            client["allow_http"] = True
        made: Any = GCSStore
        self.store: AzureStore | GCSStore = made(
            bucket,
            config={"base_url": self._endpoint},
            client_options=client,
            credential_provider=self._credential,
            **arguments,
        )

    def listed(self, prefix: str, delimiter: str) -> Iterator[StorageEntry]:
        wanted = {"prefix": prefix, "delimiter": delimiter, "fields": _LISTED}
        page: dict[str, Any] = {"nextPageToken": ""}
        while "nextPageToken" in page:
            page = self._ask("GET", "o", params={**wanted, "pageToken": page["nextPageToken"]}).json()
            for name in page.get("prefixes", []):
                yield StorageEntry(name[:-1], is_directory=True, size_bytes=0)
            for item in page.get("items", []):
                yield StorageEntry(item["name"], is_directory=False, size_bytes=int(item["size"]))

    def remove(self, path: str) -> None:
        self._ask("DELETE", f"o/{quote(path, safe='')}")

    def begin(self, path: str, token: str, scratch: str) -> GcsParts:
        return GcsParts(self, path, token, scratch)

    def compose(self, target: str, sources: Sequence[str], token: str, *, create: bool) -> None:
        """Make one of at most 32 objects; FileExistsError if it is there and `create`."""
        resource = {"contentType": "application/octet-stream", "metadata": {GCS_METADATA: token}}
        self._ask(
            "POST",
            f"o/{quote(target, safe='')}/compose",
            params={"ifGenerationMatch": "0"} if create else {},
            json={"sourceObjects": [{"name": name} for name in sources], "destination": resource},
        )

    def _ask(self, method: str, place: str, **arguments: Any) -> Response:
        answer = self._session.request(
            method,
            f"{self._endpoint}/storage/v1/b/{self._bucket}/{place}",
            headers={**self._headers, "Authorization": f"Bearer {self._credential()['token']}"},
            timeout=self._seconds / (_TRIES + 2),
            **arguments,
        )
        if answer.status_code in _AS_OS_ERRORS:
            raise _AS_OS_ERRORS[answer.status_code](place)
        answer.raise_for_status()
        return answer

    def _credential(self) -> dict[str, Any]:
        if self._account.credentials is None:
            return {"token": "anonymous", "expires_at": None}
        self._account.maybe_refresh()
        expiry = self._account.credentials.expiry
        return {
            "token": self._account.credentials.token,
            "expires_at": None if expiry is None else expiry.replace(tzinfo=UTC),
        }

    @cached_property
    def _session(self) -> Session:
        from requests import Session
        from requests.adapters import HTTPAdapter
        from urllib3 import Retry

        retry = Retry(
            total=_TRIES - 1,
            backoff_factor=min(0.5, self._seconds / 40),
            status_forcelist=_RETRIED,
            allowed_methods=None,
            raise_on_status=False,
        )
        session = Session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        return session


@final
class GcsParts:
    """A new object of GCS that arrives as several and is composed of them.

    Multipart uploads of GCS know no conditions; compositions do. Until it is complete, the parts are objects
    below a prefix of their own. `send` may be called from several threads.
    """

    def __init__(self, bucket: GcsBucket, path: str, token: str, prefix: str) -> None:
        self._bucket = bucket
        self._path = path
        self._token = token
        self._prefix = prefix

    def name_of(self, number: int, mark: str) -> str:
        return f"{number:05d}-{mark}"

    def there(self) -> frozenset[str]:
        return frozenset(path.rpartition("/")[2] for path in self._found())

    def send(self, name: str, content: Sequence[memoryview]) -> None:
        import obstore

        obstore.put(self._bucket.store, f"{self._prefix}/{name}", list(content), use_multipart=False)

    def complete(self, names: Sequence[str]) -> None:
        sources = [f"{self._prefix}/{name}" for name in names]
        level = 0
        while len(sources) > _COMPONENTS:
            groups = [sources[at : at + _COMPONENTS] for at in range(0, len(sources), _COMPONENTS)]
            sources = [f"{self._prefix}/level-{level}-{place:05d}" for place in range(len(groups))]
            for target, group in zip(sources, groups, strict=True):
                self._bucket.compose(target, group, self._token, create=False)
            level += 1
        self._bucket.compose(self._path, sources, self._token, create=True)

    def abandon(self) -> None:
        run_all(self._bucket.remove, self._found(), _DELETE_THREADS, name="ckpt-delete")

    def _found(self) -> list[str]:
        return [entry.name for entry in self._bucket.listed(f"{self._prefix}/", "")]


AZURE_METADATA: Final = "ckptupload"
"""The name of an upload's token in the metadata of its blob, where Azure takes letters and digits only."""

_SECRETS: Final = ("account_key", "connection_string", "sas_token", "client_id", "client_secret", "tenant_id")
_ENVIRONMENT: Final = ("account_name", *_SECRETS)
_AZURE_OPTIONS: Final = (*_ENVIRONMENT, "account_host", "credential", "anon")
_SCOPE: Final = "https://storage.azure.com/.default"
# That of adlfs and of obstore: all blocks of a blob must have names of one length.
_NAME_LENGTH: Final = 32


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
        refuse_others(url, options, _AZURE_OPTIONS)
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
        # Or that of `abfs://container@account.…/…`.
        _, at, place = urlsplit(url).netloc.rpartition("@")
        in_url = place.partition(".")[0] if at else ""
        name = told.get("AccountName") or options.get("account_name") or in_url
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
    from azure.identity import ClientSecretCredential, DefaultAzureCredential

    if options.get("client_id") is None:
        return DefaultAzureCredential()
    return ClientSecretCredential(options["tenant_id"], options["client_id"], options["client_secret"])


_MOST_TRIES: Final = 6
_UNFINISHED: Final = ".ckpt-uploads"
"""Where the parts of unfinished objects lie on GCS, in the root; listings leave it out."""


class Container(Protocol):
    """A bucket or container: what obstore does not do, or not as it must be done."""

    store: AzureStore | GCSStore
    token_name: str
    """The name of an upload's token in the metadata of its object."""

    def listed(self, prefix: str, delimiter: str) -> Iterator[StorageEntry]:
        """List objects by their prefix, up to the next delimiter; names are whole."""
        ...

    def remove(self, path: str) -> None:
        """Delete an object; FileNotFoundError if there is none."""

    def begin(self, path: str, token: str, scratch: str) -> PartedObject:
        """Begin or continue an upload; parts that are objects lie below `scratch`."""
        ...


@final
class ObstoreStorage(PartStorage):
    """A bucket of GCS or a container of Azure, in the words of gcsfs and adlfs."""

    def __init__(self, url: str, storage_options: Mapping[str, Any], terms: RequestTerms) -> None:
        seconds = terms.request_seconds
        super().__init__(url, storage_options, block_bytes=terms.block_bytes, connections=CONNECTIONS)
        if not terms.conditional_writes:
            raise ConfigError(
                f"{self.url}: leave out storage_options conditional_writes=False, which is for stores like S3"
            )
        kind = GcsBucket if url.partition("://")[0] in {"gs", "gcs"} else AzureContainer
        self._try_seconds = seconds / 2
        # A try that begins late still ends in time.
        half = timedelta(seconds=self._try_seconds)
        backoff = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5)}
        limits: dict[str, Any] = {
            "client_options": {"timeout": half, "connect_timeout": min(half, timedelta(seconds=10))},
            "retry_config": {"max_retries": _MOST_TRIES - 1, "retry_timeout": half, "backoff": backoff},
        }
        with translated_errors(self.url, self.redaction):
            self._place: Container = kind(url, self.bucket, storage_options, seconds, **limits)

    def size_and_token(self, path: str) -> tuple[int, str | None]:
        import obstore

        with self._asking(path):
            found = obstore.get(self._place.store, path, options={"head": True})
            token = found.attributes.get(self._place.token_name)
            return found.meta["size"], None if token is None else str(token)

    def children(self, path: str) -> Sequence[StorageEntry]:
        found = super().children(path)
        return [each for each in found if each.name != _UNFINISHED] if path == self.path("") else found

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError), self._asking(path):
            self._place.remove(path)

    def replace(self, key: str, content: bytes) -> None:
        import obstore

        path = self.path(file_key(key))
        with self._asking(path):
            obstore.put(self._place.store, path, content, use_multipart=False)

    def put_new(self, path: str, content: Sequence[memoryview], token: str) -> None:
        """Create an object in one request.

        Blocks that an upload to Azure has left are taken for an object there; they stop no other blocks.
        """
        import obstore

        settings: dict[str, Any] = {"mode": "create", "use_multipart": False}
        try:
            with self._asking(path):
                marked = {self._place.token_name: token}
                obstore.put(self._place.store, path, list(content), attributes=marked, **settings)
        except FileExistsError:
            with suppress(FileNotFoundError):
                self.size_of(path)
                raise
            parts = self.begin(path, token, again=False)
            names = [parts.name_of(0, "")]
            with self._asking(path):
                parts.send(names[0], content)
                parts.complete(names)
                parts.abandon()

    def read_start(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        import obstore

        try:
            with self._asking(path):
                found = obstore.get(self._place.store, path, options={"range": (0, most_bytes)})
                return found.meta["size"], bytes(found.bytes())
        except FileNotFoundError:
            raise
        except OSError:
            if self.size_of(path):
                raise
            return 0, b""  # an empty object has no first byte

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        import obstore

        with self._asking(path):
            content = obstore.get_range(self._place.store, path, start=offset, length=len(buffer))
        buffer[: len(content)] = memoryview(content)
        return len(content)

    def begin(self, path: str, token: str, *, again: bool) -> PartedObject:
        del again
        scratch = self.path(f"{_UNFINISHED}/{token}")
        return self._place.begin(path, token, f"{scratch}/{path[len(self.path('')) :].lstrip('/')}")

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> list[str]:
        """Delete parts of objects that were never made; Azure drops its blocks itself."""
        root = f"{self.path(_UNFINISHED)}/"
        abandoned: set[str] = set()
        for entry in self.listed(root, ""):
            key = entry.name[len(root) :].partition("/")[2].rpartition("/")[0]
            if unwanted(key):
                self.remove(entry.name)
                abandoned.add(key)
        return sorted(abandoned)

    def listed(self, prefix: str, delimiter: str) -> Sequence[StorageEntry]:
        try:
            with self._asking(prefix):
                return list(self._place.listed(prefix, delimiter))
        except FileNotFoundError:
            return []  # no such bucket

    @contextmanager
    def _asking(self, path: str) -> Generator[None]:
        began = time.monotonic()
        with translated_errors(self.url, self.redaction):
            try:
                yield
            except FileNotFoundError:
                # That of obstore carries the whole exchange.
                place = f"{self.bucket}/{path}"
                raise FileNotFoundError(errno.ENOENT, "no such object", self.shown(place)) from None
            except Exception as error:
                # That of a time-out has no type of its own; only how long it took tells it.
                waited = time.monotonic() - began
                if type(error).__name__ != "GenericError" or waited < self._try_seconds:
                    raise
                raise unanswered(error, self.url, waited, self.redaction) from None
