"""Turns what cloud libraries raise into the OS errors that the `Storage` contract names.

Those libraries are optional, so their errors are recognised by name, without importing them.
"""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager

_LIBRARIES = {"aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "requests", "s3fs", "urllib3"}
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
_DENIED = {401, 403, "401", "403"}
# Not EIO, which of a local disk means that a block is lost: here it may be gone at the next try.
_STORE_FAILED = errno.EPROTO


@contextmanager
def translated_errors(url: str) -> Generator[None]:
    """Translate errors of the storage's libraries; everything else, the caller's own errors too, passes."""
    try:
        yield
    # Told to the caller of the storage: the error is raised on, only its type may change.
    except Exception as error:
        translation = _translation(error, url)
        if translation is None:
            raise
        raise translation from error


def _translation(error: Exception, url: str) -> OSError | None:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        # gcsfs reports 403 as a plain OSError.
        return _denied(text, url) if str(error).startswith("Forbidden") else None
    if type(error).__module__.partition(".")[0] not in _LIBRARIES:
        return None
    if _is_denied(error):
        return _denied(text, url)
    return OSError(_STORE_FAILED, f"the object store failed ({text})", url)


def _is_denied(error: Exception) -> bool:
    return (
        type(error).__name__ in _NO_CREDENTIALS
        or type(error).__module__ == "google.auth.exceptions"
        or getattr(error, "code", None) in _DENIED
    )


def _denied(text: str, url: str) -> PermissionError:
    return PermissionError(
        errno.EACCES, f"access refused; check the credentials of this job and what they allow ({text})", url
    )
