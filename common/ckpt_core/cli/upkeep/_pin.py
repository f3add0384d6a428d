"""`pin` and `unpin`: protect checkpoints from pruning."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ckpt_core.cli._arguments import CHECKPOINT, Commands, find_step
from ckpt_core.cli._outcome import Outcome
from ckpt_core.commit import Catalog
from ckpt_core.errors import ConfigError


def add(commands: Commands, shared: ArgumentParser) -> None:
    """Add the commands to those of `ckpt`."""
    command = commands.add_parser("pin", parents=[shared], help="protect a step from pruning")
    command.add_argument("checkpoint", **CHECKPOINT)
    command.add_argument("--reason", required=True, help="why it must stay")
    command.set_defaults(command=pin)

    command = commands.add_parser("unpin", parents=[shared], help="let a step be pruned again")
    command.add_argument("checkpoint", **CHECKPOINT)
    command.set_defaults(command=unpin)


def pin(arguments: Namespace) -> Outcome:
    """Protect a step from pruning."""
    if not arguments.reason.strip():
        raise ConfigError("give the reason why it must stay: --reason TEXT")
    storage, step, _ = find_step(arguments.checkpoint, arguments.storage_options)
    Catalog(storage).pin(step, arguments.reason)
    return Outcome(
        fields={"root": storage.url, "step": step, "pinned": arguments.reason},
        parts=[f"step {step} is pinned: {arguments.reason}"],
    )


def unpin(arguments: Namespace) -> Outcome:
    """Remove the protection of a step."""
    storage, step, _ = find_step(arguments.checkpoint, arguments.storage_options)
    Catalog(storage).unpin(step)
    return Outcome(
        fields={"root": storage.url, "step": step, "pinned": None},
        parts=[f"step {step} is not pinned"],
    )
