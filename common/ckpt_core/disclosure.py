"""Public text: URLs without credentials, texts without secrets, printable names.

Text for messages, logs and events passes through here where it may hold secrets or control codes: URLs
through `public_url`, messages of libraries through `Redaction`, names from storage through `printable`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final
from urllib.parse import parse_qsl, unquote

# An unescaped "/" in a password makes the text after ":" look like a path; no port has letters.
_USERINFO: Final = re.compile(r"(?<=://)(?:[^/?#@]*@|(?!arn:)[^/?#@:]*:(?!\d*(?:[/?#]|$))[^?#@]*@)+")
_QUERY: Final = re.compile(r"[?#].*", re.DOTALL)
# Keys in buckets may have "?", too.
_BUCKET_QUERY: Final = re.compile(r"\?(?=[^/]*=).*", re.DOTALL)
_BUCKETS: Final = re.compile(r"(?:s3a?|gc?s)://", re.IGNORECASE)
# In these URLs the text before "@" is a container, and no secret unless a password follows it.
_CONTAINERS: Final = re.compile(r"(?:abfss?|wasbs?)://[^/?#@:]+@", re.IGNORECASE)
_LINK: Final = "::"
_LONG: Final = 6
"""Shorter secrets are replaced only as whole words."""


def public_url(url: str) -> str:
    """Strip user, password, signature and other query from a path or URL."""
    return url if "://" not in url else _LINK.join(map(_public_link, url.split(_LINK)))


def printable(text: str) -> str:
    """Replace control characters in a text from storage."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Redaction:
    """Replacement of secrets in messages of libraries; `names` is secret -> its name."""

    names: Mapping[str, str]

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> Redaction:
        """Find the secrets of a URL and of the options of its storage."""
        found: dict[str, str] = {}
        for secret, name in (*_of_url(url), *_leaves(options, "")):
            for form in filter(None, (secret, repr(secret)[1:-1])):
                found.setdefault(form, name)
        # The longest first, for one may contain another.
        return cls({secret: found[secret] for secret in sorted(found, key=len, reverse=True)})

    def text(self, text: str) -> str:
        """Replace secrets in a text by names."""
        for secret, name in self.names.items():
            text = re.sub(_pattern(secret), f"<{name}>".replace("\\", r"\\"), text)
        return text

    def quotes(self, error: BaseException | None) -> bool:
        """Return whether an error, or one of its causes, would show a secret."""
        while error is not None:
            text = f"{error} {error!r}"
            if self.text(text) != text:
                return True
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return False


def _pattern(secret: str) -> str:
    if len(secret) < _LONG:
        return rf"(?<!\w){re.escape(secret)}(?!\w)"
    escaped = ["".join(f"%(?i:{byte:02x})" for byte in each.encode(errors="replace")) for each in secret]
    return "".join(rf"(?:{re.escape(each)}|{code})" for each, code in zip(secret, escaped, strict=True))


@final
class PrintableNames(logging.Filter):
    """Filter that makes arguments of log messages printable: names may be hostile."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the arguments of the record, which is always logged."""
        if isinstance(record.args, tuple):
            record.args = tuple(map(_printable_argument, record.args))
        return True


def logger_of(module: str) -> logging.Logger:
    """Return the logger of a module of ours."""
    logger = logging.getLogger(module)
    if not any(isinstance(each, PrintableNames) for each in logger.filters):
        logger.addFilter(PrintableNames())
    return logger


def _printable_argument(value: object) -> object:
    if isinstance(value, int | float):
        return value
    text = str(value)
    return value if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _public_link(link: str) -> str:
    if _CONTAINERS.match(link) is None:
        link = _USERINFO.sub("", link)
    return _query(link).sub("?…", link) if "://" in link else link


def _query(link: str) -> re.Pattern[str]:
    return _BUCKET_QUERY if _BUCKETS.match(link) else _QUERY


def _of_url(url: str) -> Iterator[tuple[str, str]]:
    for link in url.split(_LINK):
        if "://" not in link:
            continue
        userinfo = None if _CONTAINERS.match(link) else _USERINFO.search(link)
        if userinfo is not None:
            text = userinfo[0].removesuffix("@")
            yield text, "user"
            # A parser of a password with "/" quotes a part of it.
            for part in {*text.split(":"), *re.split("[:/@]", text)}:
                yield from ((part, "user"), (unquote(part), "user"))
        query = _query(link).search(link)
        if query is not None:
            yield query[0][1:], "query"
            for name, value in parse_qsl(query[0][1:], keep_blank_values=False):
                yield value, f"query {name}"


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, bytes):
        yield value.decode(errors="replace"), name
    elif isinstance(value, str):
        yield value, name
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _leaves(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool) and len(str(value)) >= _LONG:
        yield str(value), name
