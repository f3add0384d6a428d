"""The command line: parses arguments, runs a command, returns an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from ckpt_core.cli import _commands
from ckpt_core.cli._arguments import is_local, place_of, storage_options
from ckpt_core.cli._outcome import Outcome, say, show
from ckpt_core.disclosure import printable
from ckpt_core.errors import CheckpointError, ConfigError
from ckpt_core.vocabulary import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` are those of the process if None."""
    parser = _commands.parser()
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
        try:
            return _run(parsed)
        except KeyboardInterrupt:
            return 130


def _run(parsed: argparse.Namespace) -> int:
    trouble: int | None = parsed.trouble
    try:
        place = place_of(parsed)
        options = storage_options(parsed.storage_option, place)
        parsed.storage_options = {} if is_local(place) else options  # a path takes none
        outcome: Outcome = parsed.command(parsed)
    except (CheckpointError, OSError) as error:
        _complain(str(error))
        usual = 2 if isinstance(error, ConfigError) else 3 if isinstance(error, FileNotFoundError) else 1
        return usual if trouble is None else trouble
    try:
        _write_out(outcome, as_json=parsed.json)
    except OSError as error:
        _complain(f"the command is done, but its result could not be written to standard output: {error}")
        return 1 if trouble is None else trouble
    return outcome.exit_code


def _write_out(outcome: Outcome, *, as_json: bool) -> None:
    """Write an outcome to standard output; a reader that has gone is no error."""
    # Python has no stream for a standard output that was closed by the caller (`>&-`): nobody reads.
    if not sys.stdout:
        return
    try:
        show(outcome, as_json=as_json)
        sys.stdout.flush()
    except OSError as error:
        # Python must not complain again when it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader, such as `head`, has seen enough
            raise


def _complain(text: str) -> None:
    say(f"ckpt: {printable(' '.join(text.split()))}\n")


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _complain(record.getMessage())


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
