"""`pin` and `unpin`: protect checkpoints from pruning."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ckpt_core.cli._arguments import Commands, open_root
from ckpt_core.cli._outcome import Outcome
from ckpt_core.commit import Catalog
from ckpt_core.errors import ConfigError


def add(commands: Commands, shared: ArgumentParser) -> None:
    """Add the commands to those of `ckpt`."""
    command = commands.add_parser("pin", parents=[shared], help="protect a step from pruning")
    command.add_argument("root", metavar="ROOT", help="path or URL of a run")
    command.add_argument("step", metavar="STEP", type=int)
    command.add_argument("--reason", required=True, help="why it must stay")
    command.set_defaults(command=pin)

    command = commands.add_parser("unpin", parents=[shared], help="let a step be pruned again")
    command.add_argument("root", metavar="ROOT", help="path or URL of a run")
    command.add_argument("step", metavar="STEP", type=int)
    command.set_defaults(command=unpin)


def pin(arguments: Namespace) -> Outcome:
    """Protect a step from pruning."""
    if not arguments.reason.strip():
        raise ConfigError("give the reason why it must stay: --reason TEXT")
    storage = open_root(arguments.root, arguments.storage_options)
    Catalog(storage).pin(arguments.step, arguments.reason)
    return Outcome(
        fields={"root": storage.url, "step": arguments.step, "pinned": arguments.reason},
        parts=[f"step {arguments.step} is pinned: {arguments.reason}"],
    )


def unpin(arguments: Namespace) -> Outcome:
    """Remove the protection of a step."""
    storage = open_root(arguments.root, arguments.storage_options)
    Catalog(storage).unpin(arguments.step)
    return Outcome(
        fields={"root": storage.url, "step": arguments.step, "pinned": None},
        parts=[f"step {arguments.step} is not pinned"],
    )
