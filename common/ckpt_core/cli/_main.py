"""The command line: parses arguments, runs a command, returns an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

from ckpt_core._version import __version__
from ckpt_core.cli import _cp, _diff, _inspect, _mark, _missing, _prune, _show, _verify, costs
from ckpt_core.cli._arguments import OPTIONS_VARIABLE, place_of, storage_options
from ckpt_core.cli._outcome import Outcome, show
from ckpt_core.disclosure import printable
from ckpt_core.errors import CheckpointError, ConfigError

_EXIT_CODES: Final = (
    "Exit codes: 0 all is well; 1 something is wrong with a checkpoint, or the storage failed; 2 wrong usage "
    "or option; 3 nothing there; 130 interrupted."
)
_CHAIN: Final = 10
_TROUBLE: Final = 2
"""What `diff` returns, as the program of that name does, if it cannot compare."""
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` are those of the process if None."""
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        # By their names: a mistyped --storage-option may hold a password.
        named = ", ".join(word.partition("=")[0] if word.startswith("-") else "a word" for word in unknown)
        parser.error(f"there is more than this command takes: {named}")
    with _quiet_libraries():
        return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    try:
        parsed.storage_options = storage_options(parsed.storage_option, place_of(parsed))
        outcome: Outcome = parsed.command(parsed)
        show(outcome, as_json=parsed.json)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; Python must not complain again when it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (CheckpointError, OSError) as error:
        _complain(str(error))
        return _TROUBLE if parsed.command is _diff.run else _exit_code(error)
    return outcome.exit_code


class _Warnings(logging.Handler):
    """Writes warnings of this package to standard error, a line each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        _complain(record.getMessage())


def _complain(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"ckpt: {printable(' '.join(text.split()))}\n")


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
    for add in (_add_ls, _add_show, _add_diff, _add_verify, _add_cp, _add_upload):
        add(commands, shared)
    for add in (_add_prune, _add_pin, _add_unpin, _add_mark, costs.plan.add, costs.bench.add):
        add(commands, shared)
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


def _add_ls(commands: _Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser("ls", parents=[shared], help="list the committed checkpoints of a root")
    command.add_argument("root", metavar="ROOT", help="path or URL of a run")
    command.set_defaults(command=_inspect.ls)


def _add_show(commands: _Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "show",
        parents=[shared],
        help="show what one checkpoint holds",
        description="Shows a checkpoint: the one named, or of a root the newest that can be used.",
    )
    command.add_argument("place", metavar="ROOT_OR_CHECKPOINT", help="path or URL")
    command.add_argument("--step", type=int, help="show this step of the root")
    command.add_argument(
        "--tensors",
        action="store_true",
        help="list every tensor: name, shape, dtype, elements, size; of stock DCP directories, too",
    )
    command.add_argument(
        "--chain",
        type=_count,
        default=_CHAIN,
        metavar="N",
        help=f"follow at most N parents, the checkpoints that this one continues ({_CHAIN})",
    )
    command.set_defaults(command=_show.show)


def _add_diff(commands: _Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "diff",
        parents=[shared],
        help="show what of two checkpoints differs",
        description="Compares two checkpoints, of ours or of stock DCP, however many ranks saved them: facts "
        "in their manifests, tensors and values. Tensors of equal checksums are not read, and nothing is "
        "unpickled but plain values. Facts alone, such as the step, do not make them different.",
        epilog="Exit codes: 0 the states are equal; 1 they differ; 2 they could not be compared; "
        "130 interrupted.",
    )
    command.add_argument("place", metavar="A", help="path or URL of a checkpoint; of a root its newest")
    command.add_argument("other", metavar="B", nargs="?", help="the same")
    command.add_argument(
        "--steps", nargs=2, type=int, metavar=("A", "B"), help="compare these steps of the root A"
    )
    command.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="compare only what has such a name, e.g. 'model.*'; may be repeated",
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="compute no figures: where checksums tell that a tensor differs, it is not read",
    )
    command.set_defaults(command=_diff.run)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return int(text)


def _add_verify(commands: _Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "verify",
        parents=[shared],
        help="read checkpoints back and compare them with what was committed",
        description="Verifies a checkpoint, the newest of a root, or a directory written by stock DCP. One "
        "that is damaged is marked, so that no resume relies on it; one that verifies loses its mark.",
    )
    command.add_argument("place", metavar="ROOT_OR_CHECKPOINT", help="path or URL")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="verify this step of the root")
    which.add_argument("--all", action="store_true", help="verify every checkpoint of the root")
    command.add_argument(
        "--strict",
        action="store_true",
        help="fail also if a checkpoint holds what its manifest does not name",
    )
    command.add_argument(
        "--manifest-sha256",
        metavar="HEX",
        help="fail unless this is the SHA-256 of its manifest, which `show` prints",
    )
    command.set_defaults(command=_verify.run)


def _add_cp(commands: _Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "cp",
        parents=[shared],
        help="copy checkpoints or a run to another root",
        description="Copies checkpoints as they are, between any two places, and compares every byte with "
        "their manifests before it commits them. After an interruption the same command continues: what is "
        "there is not sent again. Files that a manifest does not list are not copied.",
    )
    command.add_argument(
        "sources",
        nargs="+",
        metavar="SRC",
        help="ROOT@STEP, a CHECKPOINT, or a ROOT: all committed ones of its present lineage",
    )
    command.add_argument("target", metavar="DST", help="path or URL of the root to copy to")
    command.add_argument("--all", action="store_true", help="of a root also the abandoned checkpoints")
    command.add_argument(
        "--to-storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the filesystem behind DST, if others than for SRC are needed; may be repeated",
    )
    command.add_argument(
        "--mixed", action="store_true", help="copy into a root that holds another run; nothing resumes there"
    )
    _add_copy_options(command)
    command.set_defaults(command=_cp.run)


def _add_upload(commands: _Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "upload",
        parents=[shared],
        help="upload what a job that ended has left in its local root",
        description="Uploads to the tiers that the root's tiers.json names: what was due and is not there, "
        "and the newest. Verified and resumable as `cp`. A live job uploads by itself.",
    )
    command.add_argument("root", metavar="ROOT", help="path of a run")
    command.add_argument("--to", metavar="URL", help="only to this place, which tiers.json need not name")
    command.add_argument("--all", action="store_true", help="everything of the present lineage")
    _add_copy_options(command)
    command.set_defaults(command=_missing.run)


def _add_copy_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--bandwidth", metavar="RATE", help='the most bytes per second to send, such as "100 MB/s"'
    )
    command.add_argument(
        "--take-over",
        action="store_true",
        help="copy although writer.json names a job there, where no lock shows whether it is alive",
    )


def _add_prune(commands: _Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "prune",
        parents=[shared],
        help="remove checkpoints that no policy keeps",
        description="Keeps what at least one policy keeps, what is pinned, and always the newest. What is "
        "marked or abandoned counts for none of that and stays: remove it with --damaged, --bad or "
        "--abandoned. Before anything goes, one checkpoint that stays is verified; one that is damaged is "
        "marked, and what is older stays in its place.",
    )
    command.add_argument("root", metavar="ROOT", help="path or URL of a run")
    command.add_argument("--keep-latest", type=int, metavar="N", help="keep the N highest steps")
    command.add_argument("--keep-every", type=int, metavar="STEPS", help="keep one in that many steps")
    command.add_argument("--keep-newer-than", type=float, metavar="SECONDS", help="keep what is younger")
    command.add_argument(
        "--keep-best",
        action="append",
        default=[],
        metavar="METRIC[:N][:min|max]",
        help="keep the N best by a metric (1, min); may be repeated",
    )
    command.add_argument("--policy", metavar="FILE", help="YAML or TOML file of options with a `keep`")
    command.add_argument(
        "--damaged",
        action="store_true",
        help="instead of a policy: delete what is marked as damaged and not pinned, and nothing else; verify "
        "first, which takes the mark from what is whole",
    )
    command.add_argument("--bad", action="store_true", help="the same for what is marked as bad")
    command.add_argument(
        "--abandoned",
        action="store_true",
        help="the same for what the present lineage does not continue from",
    )
    command.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    command.add_argument(
        "--take-over",
        action="store_true",
        help="prune although writer.json names a job, where no lock shows whether it is alive",
    )
    command.set_defaults(command=_prune.run)


def _add_pin(commands: _Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser("pin", parents=[shared], help="protect a step from pruning")
    command.add_argument("root", metavar="ROOT", help="path or URL of a run")
    command.add_argument("step", metavar="STEP", type=int)
    command.add_argument("--reason", required=True, help="why it must stay")
    command.set_defaults(command=_inspect.pin)


def _add_unpin(commands: _Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser("unpin", parents=[shared], help="let a step be pruned again")
    command.add_argument("root", metavar="ROOT", help="path or URL of a run")
    command.add_argument("step", metavar="STEP", type=int)
    command.set_defaults(command=_inspect.unpin)


def _add_mark(commands: _Commands, shared: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "mark",
        parents=[shared],
        help="mark a step as bad, or as good again",
        description="A bad checkpoint is passed over by every resume and counts for nothing in retention, so "
        "that to roll back past it is one command. It is not deleted; see `prune --bad`.",
    )
    command.add_argument("checkpoint", metavar="ROOT@STEP", help="path or URL of a run, and a step of it")
    command.add_argument("verdict", choices=("bad", "good"))
    command.add_argument("--reason", help="why it is bad")
    command.add_argument(
        "--and-later", action="store_true", help="also every later step of the present lineage"
    )
    command.set_defaults(command=_mark.run)
