"""Every command of `ckpt` that a message, a docstring or a page names can be given as it is named."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.cli._commands import parser
from tests.judges.figures import ROOT, sources, walked

PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")} - {ROOT / "CHANGELOG.md"}
)  # that is of the past
STAND_INS = {"N": "1", "A": "1", "B": "2", "{}": "1", "%s": "1", "%d": "1", "GOOD": "good"}
SPAN = re.compile(r"`ckpt ([^`]+)`")


@pytest.fixture(scope="module")
def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (each.choices for each in parser()._actions if isinstance(each.choices, dict))
    return dict(found)


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def in_code() -> Iterator[tuple[Path, str]]:
    for path in sources():
        parts = {part for node in walked(path) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in walked(path):
            if node not in parts:
                yield from ((path, each) for each in SPAN.findall(text_of(node)))


def in_pages() -> Iterator[tuple[Path, str]]:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        yield from ((path, each) for each in SPAN.findall(text))
        yield from ((path, each) for each in re.findall(r"^(?:\$ )?ckpt ([^`\n]+)$", text, re.MULTILINE))


def forms_of(named: str) -> Iterator[list[str]]:
    """The command without comment and pipe, once with each alternative of what is optional."""
    plain = re.split(r"\s#\s|\s\\?\|\s(?![^[]*\])|\s>\s", " ".join(named.split()))[0]
    optional = re.search(r"\[([^]]*)\]", plain)
    if optional is None:
        yield [STAND_INS.get(word, word) for word in shlex.split(plain)]
        return
    for each in ("", *re.split(r"\s*\\?\|\s*", optional[1])):
        yield from forms_of(plain[: optional.start()] + each + plain[optional.end() :])


def wrong(named: str, commands: dict[str, argparse.ArgumentParser]) -> str | None:
    """What is wrong with a command as it is named; None for nothing."""
    for words in forms_of(named):
        if words[0] in {"--help", "--version", "help"}:
            continue
        if words[0] not in commands:
            return f"no command {words[0]}"
        parser, told = commands[words[0]], []
        for word in words[1:]:
            if word.startswith("--") and word.partition("=")[0] not in parser._option_string_actions:
                return f"no option {word}"
        if "…" in named or all(word.startswith("-") for word in words[1:]):
            continue  # a part of a command: its name, or one with an option
        parser.error = told.append  # type: ignore[method-assign,assignment]
        try:
            _, unknown = parser.parse_known_args(words[1:])
        except (TypeError, AttributeError, ValueError) as error:  # behind an error that was only noted
            unknown, told = [], [*told, str(error)]
        finally:
            del parser.error
        if told or unknown:
            return f"{words}: {told or unknown}"
    return None


@pytest.mark.parametrize("place", [in_code, in_pages])
def test_every_command_that_is_named_can_be_given_so(place, commands):
    named = sorted(set(place()))
    assert len(named) > 30, "where have they gone?"
    found = [(path.name, each, wrong(each, commands)) for path, each in named]
    assert [each for each in found if each[2]] == []


@pytest.mark.parametrize(
    "named",
    [
        *("lst ROOT", "verify ROOT --al", "pin CHECKPOINT --because TEXT", "mark ROOT@STEP fine"),
        *(
            "pin ROOT STEP",
            "diff A B C D",
            "cp SRC",
            "show ROOT --step X",
            "ls ROOT [--tier URL | --tier-all]",
        ),
    ],
)
def test_a_command_that_cannot_be_given_is_found(named, commands):
    assert wrong(named, commands) is not None
