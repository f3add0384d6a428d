"""Google Cloud Storage: credentials, and uploads in parts that never overwrite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, final
from urllib.parse import quote

from ckpt_core.crew import run_all
from ckpt_core.storage._base import StorageEntry
from ckpt_core.storage.object._translation import refuse_others

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore
    from requests import Response, Session

GCS_METADATA: Final = "ckpt-upload"
"""The name of an upload's token in the metadata of its object."""

_OPTIONS: Final = ("token", "project", "access", "endpoint_url", "requester_pays")
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

        refuse_others(url, options, _OPTIONS)
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
