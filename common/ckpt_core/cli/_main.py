"""The command line: parses arguments, runs a command, returns an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from ckpt_core._version import __version__
from ckpt_core.cli import _completion, _cp, _missing, _plan
from ckpt_core.cli._arguments import OPTIONS_VARIABLE, Commands, is_local, place_of, storage_options
from ckpt_core.cli._outcome import Outcome
from ckpt_core.cli._outcome import show as show_outcome
from ckpt_core.cli._progress_line import say
from ckpt_core.cli.inspection import diff, du, ls, report, show
from ckpt_core.cli.upkeep import mark, pin, prune, verify
from ckpt_core.disclosure import printable
from ckpt_core.errors import CheckpointError, ConfigError
from ckpt_core.vocabulary import COMMANDS

_EXIT_CODES: Final = (
    "Exit codes: 0 all is well; 1 something is wrong with a checkpoint, or the storage failed; 2 wrong usage "
    "or option; 3 nothing there; 130 interrupted."
)


class CommandModule(Protocol):
    """A module of one command: its arguments, and what runs it."""

    def add(self, commands: Commands, shared: argparse.ArgumentParser) -> None:
        """Add its parser, whose default `command` returns an `Outcome`."""


_COMMANDS: Final[tuple[CommandModule, ...]] = (
    *(ls, show, diff, du, report),
    *(verify, _cp, _missing),
    *(prune, pin, mark),
    *(_plan, _completion),
)
"""In the order of `ckpt --help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` are those of the process if None."""
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if words and words[0] in COMMANDS:
        _complain(f"there is no command {words[0]!r}: {COMMANDS[words[0]]}")
        return 2
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        # By their names: a mistyped --storage-option may hold a password.
        named = ", ".join(word.partition("=")[0] if word.startswith("-") else "a word" for word in unknown)
        parser.error(f"there is more than this command takes: {named}")
    with _quiet_libraries():
        return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    try:
        place = place_of(parsed)
        options = storage_options(parsed.storage_option, place)
        parsed.storage_options = {} if is_local(place) else options  # a path takes none
        outcome: Outcome = parsed.command(parsed)
    except KeyboardInterrupt:
        return 130
    except (CheckpointError, OSError) as error:
        _complain(str(error))
        return int(getattr(parsed, "trouble", _exit_code(error)))
    try:
        _write_out(outcome, as_json=parsed.json)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        _complain(f"the command is done, but its result could not be written to standard output: {error}")
        return int(getattr(parsed, "trouble", 1))
    return outcome.exit_code


def _write_out(outcome: Outcome, *, as_json: bool) -> None:
    """Write an outcome to standard output; a reader that has gone is no error."""
    # Python has no stream for a standard output that was closed by the caller (`>&-`): nobody reads.
    if not sys.stdout:
        return
    try:
        show_outcome(outcome, as_json=as_json)
        sys.stdout.flush()
    except OSError as error:
        # Python must not complain again when it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader, such as `head`, has seen enough
            raise


class _Warnings(logging.Handler):
    """Writes warnings of this package to standard error, a line each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        _complain(record.getMessage())


def _complain(text: str) -> None:
    """Write a line to standard error."""
    say(f"ckpt: {printable(' '.join(text.split()))}\n")


@contextmanager
def _quiet_libraries() -> Generator[None]:
    """Silence the loggers of libraries: errors are reported in one line anyway."""
    root, own = logging.getLogger(), logging.getLogger("ckpt_core")
    nowhere, warnings = logging.NullHandler(), _Warnings(logging.WARNING)
    root.addHandler(nowhere)
    own.addHandler(warnings)
    try:
        yield
    finally:
        root.removeHandler(nowhere)
        own.removeHandler(warnings)


def _exit_code(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return 2
    return 3 if isinstance(error, FileNotFoundError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt",
        description="Look at, compare, verify, copy, pin and prune checkpoints.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"ckpt-suite {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = _shared_options()
    for module in _COMMANDS:
        module.add(commands, shared)
    for command in commands.choices.values():
        command.epilog = command.epilog or _EXIT_CODES
    return parser


def _shared_options() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="write JSON to standard output")
    shared.add_argument(
        "--storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the filesystem behind a URL, such as an endpoint; may be repeated. KEY=@NAME takes "
        f"the value from the variable NAME, so that it shows in no list of processes; {OPTIONS_VARIABLE} may "
        "hold all of them, as a mapping in YAML or JSON",
    )
    return shared
