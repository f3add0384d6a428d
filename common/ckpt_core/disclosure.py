"""What people may be shown: URLs without credentials, texts without secrets, names without control codes.

Whatever is written for people, into a message, a log or an event, goes through here where it may hold more
than it should: a URL by `public_url`, what a library says by `Redaction`, names from storage by `printable`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final
from urllib.parse import parse_qsl, unquote

# An unescaped "/" in a password makes what follows ":" look like a path; no port has letters.
_USERINFO: Final = re.compile(r"(?<=://)(?:[^/?#@]*@|(?!arn:)[^/?#@:]*:(?!\d*(?:[/?#]|$))[^?#@]*@)+")
_QUERY: Final = re.compile(r"[?#].*", re.DOTALL)
# Here names may have "?", too.
_BUCKET_QUERY: Final = re.compile(r"\?(?=[^/]*=).*", re.DOTALL)
_BUCKETS: Final = re.compile(r"(?:s3a?|gc?s)://", re.IGNORECASE)
# Here what stands before "@" is a container, and no secret unless a password follows it.
_CONTAINERS: Final = re.compile(r"(?:abfss?|wasbs?)://[^/?#@:]+@", re.IGNORECASE)
_LINK: Final = "::"
_LONG: Final = 6
"""What is shorter is replaced only where it is a word of its own."""


def public_url(url: str) -> str:
    """A path or URL for people: without user, password, signature or other query."""
    return url if "://" not in url else _LINK.join(map(_public_link, url.split(_LINK)))


def printable(text: str) -> str:
    """Text from storage, without what could steer a terminal or forge a line of a log."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Redaction:
    """Takes what only the job may know out of what libraries say, and puts its name there.

    Attributes:
        names: secret -> what it is called.
    """

    names: Mapping[str, str]

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> Redaction:
        """What is not to be shown of a URL and of the options of the storage behind it."""
        found: dict[str, str] = {}
        for secret, name in (*_of_url(url), *_leaves(options, "")):
            for form in filter(None, (secret, repr(secret)[1:-1])):
                found.setdefault(form, name)
        # The longest first: one may be a part of another.
        return cls({secret: found[secret] for secret in sorted(found, key=len, reverse=True)})

    def text(self, text: str) -> str:
        """The text, with names in the place of secrets."""
        for secret, name in self.names.items():
            text = re.sub(_anyhow(secret), f"<{name}>".replace("\\", r"\\"), text)
        return text

    def quotes(self, error: BaseException | None) -> bool:
        """Whether an error, or what it came from, would show a secret."""
        while error is not None:
            text = f"{error} {error!r}"
            if self.text(text) != text:
                return True
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return False


def _anyhow(secret: str) -> str:
    """A pattern for a text as it is, or as URLs have it, whatever they escape."""
    if len(secret) < _LONG:
        return rf"(?<!\w){re.escape(secret)}(?!\w)"
    return "".join(rf"(?:{re.escape(each)}|{_escaped(each)})" for each in secret)


def _escaped(character: str) -> str:
    return "".join(f"%(?i:{byte:02x})" for byte in character.encode(errors="replace"))


@final
class PrintableNames(logging.Filter):
    """Makes what is put into the messages of a logger printable: names in a storage are anybody's."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; it is always logged."""
        if isinstance(record.args, tuple):
            record.args = tuple(map(_printable_argument, record.args))
        return True


def logger_of(module: str) -> logging.Logger:
    """The logger of a module of ours."""
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
            # Whoever parses a password with "/" in it quotes a piece.
            for part in {*text.split(":"), *re.split("[:/@]", text)}:
                yield from ((part, "user"), (unquote(part), "user"))
        query = _query(link).search(link)
        if query is not None:
            yield query[0][1:], "query"
            for name, value in parse_qsl(query[0][1:], keep_blank_values=False):
                yield value, f"query {name}"


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every text and number in nested options, with its name."""
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
