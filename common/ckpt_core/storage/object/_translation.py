"""Errors of cloud libraries as OS errors, and refusal of options that none takes.

Those libraries are optional, so their errors are recognised by name, without importing them.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, TypeAlias, cast

from ckpt_core.disclosure import Redaction
from ckpt_core.errors import ArchivedError, ConfigError

_LIBRARIES = {"aiohttp", "azure", "botocore", "ftplib", "google", "obstore", "requests", "urllib3"}
_NO_CREDENTIALS = {
    "CredentialRetrievalError",
    "NoAuthTokenError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "SSOTokenLoadError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
}
_NO_ANSWER = {
    "ConnectTimeoutError",
    "FSTimeoutError",
    "ReadTimeoutError",
    "ServiceRequestTimeoutError",
    "ServiceResponseTimeoutError",
}
_DENIED = {401, 403, "401", "403"}
# Not EIO, which means a lost block on a local disk: here the next try may succeed.
_STORE_FAILED = errno.EPROTO
_NOTHING_SECRET = Redaction({})
_IN_OUR_WORDS = "_in_our_words"
"""Attribute of translated errors: a short secret, such as "job", may be a word of ours."""


@contextmanager
def translated_errors(url: str, redaction: Redaction = _NOTHING_SECRET) -> Generator[None]:
    """Translate errors of the storage's libraries; other errors pass unchanged.

    An error that quotes a secret, itself or in an error behind it, is raised without the secret.

    Raises:
        PermissionError: access was refused; the message says what to do.
        ArchivedError: the object must be restored first.
        TimeoutError: no answer in time.
        OSError: the store failed. Never with EIO, which would mean lost bytes.
    """
    began = time.monotonic()
    try:
        yield
    # Every error is raised to the caller of the storage; only its type and text may change.
    except Exception as error:
        if hasattr(error, _IN_OUR_WORDS):
            raise  # one of these within another
        secret = redaction.quotes(error)
        text = redaction.text(f"{type(error).__name__}: {_brief(error)}")
        translation = _late(error, time.monotonic() - began, url, text)
        of_system = isinstance(error, OSError) and type(error).__module__ != "requests.exceptions"
        if translation is None and not of_system and _library(error) in _LIBRARIES:
            translation = _of_library(error, text, url)
        if translation is None and secret:
            translation = _plain(error, redaction)
        if translation is None:
            raise
        setattr(translation, _IN_OUR_WORDS, True)
        if secret or _library(error) == "obstore":
            raise translation from None  # obstore shows whole requests
        raise translation from error


def _late(error: Exception, seconds: float, url: str, text: str) -> OSError | None:
    """Translate a library's error that no answer came; None for others."""
    # requests wraps what its tries met.
    wrapped = getattr(error.args[0], "reason", None) if error.args else None
    if not {type(error).__name__, type(wrapped).__name__} & _NO_ANSWER:
        return None
    return late(url, seconds, text)


def _plain(error: Exception, redaction: Redaction) -> OSError | None:
    """Return an OS error as Python itself would raise it; None for other errors."""
    if not isinstance(error, OSError):
        return None
    kind = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
    if error.errno is None:
        return cast("OSError", kind(redaction.text(str(error))))
    where = None if error.filename is None else redaction.text(str(error.filename))
    return cast("OSError", kind(error.errno, redaction.text(str(error.strerror)), where))


def _brief(error: Exception) -> str:
    """Return the text of an error; of obstore the first line, without signatures."""
    if _library(error) != "obstore":
        return str(error)
    return re.sub(r"\?\S*", "", str(error).partition("\n")[0])


def late(url: str, seconds: float, text: str = "") -> TimeoutError:
    return TimeoutError(
        errno.ETIMEDOUT,
        f"no answer from the object store within {seconds:.3g} s, further tries included; check the "
        f"network, or allow more with storage_options={{'request_seconds': …}}{text and f' ({text})'}",
        url,
    )


def unanswered(error: Exception, url: str, seconds: float, redaction: Redaction) -> TimeoutError:
    """Build the error of a library that does not say that it was a time-out."""
    return late(url, seconds, f"or none that could be used: {redaction.text(_brief(error))}")


def answer_ended(url: str) -> OSError:
    return OSError(_STORE_FAILED, "the object store's answers end too early, further tries included", url)


def _library(error: object) -> str:
    return type(error).__module__.partition(".")[0]


def _of_library(error: Exception, text: str, url: str) -> OSError:
    if _library(error) == "botocore" and (found := _of_s3(error, text, url)):
        return found
    if type(error).__name__ in _AS_OS_ERRORS:
        return _AS_OS_ERRORS[type(error).__name__](text, url)
    if _status(error) == HTTPStatus.UNAUTHORIZED:
        return _expired(text, url)
    denied = (
        type(error).__name__ in _NO_CREDENTIALS
        or type(error).__module__ == "google.auth.exceptions"
        or not {getattr(error, "code", None), _status(error)}.isdisjoint(_DENIED)
    )
    return (_denied if denied else _failed)(text, url)


def _status(error: Exception) -> int | None:
    answer = error if hasattr(error, "status_code") else getattr(error, "response", None)
    return getattr(answer, "status_code", None)


def _of_s3(error: Exception, text: str, url: str) -> OSError | None:
    # Of a lost connection botocore has the attribute, too: None, or a response without a body.
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return None
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = str(response.get("Error", {}).get("Code", ""))
    if make := _OF_S3.get(code) or _OF_STATUS.get(status):
        return make(text, url)
    if code == "400" and getattr(error, "operation_name", "").startswith("Head"):
        # An answer to HEAD has no body with the reason; with a correct client it is this one.
        return _expired(f"{text}; this answer comes without a reason", url)
    return _failed(text, url)


def _archived(text: str, url: str) -> ArchivedError:
    return ArchivedError(
        f"{url}: the object is archived and must be restored before it can be read; restore it "
        f"(on S3: RestoreObject), or keep lifecycle rules away from the root ({text})"
    )


_Make: TypeAlias = Callable[[str, str], OSError]


def _saying(kind: type[OSError], number: int, words: str = "{}") -> _Make:
    return lambda text, url: kind(number, words.format(text), url)


_absent: Final = _saying(FileNotFoundError, errno.ENOENT)
_taken: Final = _saying(FileExistsError, errno.EEXIST)
_failed: Final = _saying(OSError, _STORE_FAILED, "the object store failed ({})")
_denied: Final = _saying(
    PermissionError,
    errno.EACCES,
    "access refused; check the credentials of this job and what they allow ({})",
)
_expired: Final = _saying(
    PermissionError,
    errno.EACCES,
    "the credentials of this job have expired; renew them, or better use a role or profile that renews "
    "itself instead of a fixed session token ({})",
)
_unknown: Final = _saying(
    OSError,
    errno.ENOSYS,
    "the object store cannot do that ({}); if it does not know conditional writes: storage_options="
    "{{'conditional_writes': False}}; if it does not know x-amz-checksum-crc32: {{'checksums': False}}",
)
# By S3's code.
_OF_S3: Final[dict[str, _Make]] = {
    "ConditionalRequestConflict": _taken,
    "ExpiredToken": _expired,
    "ExpiredTokenException": _expired,
    "InvalidObjectState": _archived,
    "NotImplemented": _unknown,
    "501": _unknown,
    "PreconditionFailed": _taken,
    "RequestExpired": _expired,
    "TokenRefreshRequired": _expired,
}
_OF_STATUS: Final[dict[int, _Make]] = {
    HTTPStatus.NOT_FOUND: _absent,
    HTTPStatus.PRECONDITION_FAILED: _taken,
    HTTPStatus.UNAUTHORIZED: _denied,
    HTTPStatus.FORBIDDEN: _denied,
}
# By type: of Azure's library, of obstore.
_AS_OS_ERRORS: Final[dict[str, _Make]] = {
    "ResourceNotFoundError": _absent,
    "ResourceExistsError": _taken,
    "AlreadyExistsError": _taken,
    "PreconditionError": _taken,
    "PermissionDeniedError": _denied,
    "UnauthenticatedError": _expired,
}


def refused(
    url: str, library: str, options: Iterable[str], *, error: Exception, redaction: Redaction
) -> ConfigError:
    names = ", ".join(sorted(options))
    given = f", and storage_options ({names})" if names else ""
    text = redaction.text(f"{type(error).__name__}: {error}")
    return ConfigError(f"{url}: {library} cannot open this ({text}); check the URL{given}")


def refuse_others(
    url: str, options: Mapping[str, Any], known: Collection[str], library: str = "obstore"
) -> None:
    """Refuse options without a translation, by a ConfigError that names them."""
    others = sorted(name for name in options if name not in known)
    if others:
        raise ConfigError(
            f"{url}: {library} has nothing like storage_options {', '.join(others)}; leave them out"
        )
