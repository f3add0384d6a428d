"""The commands of `ckpt` and their arguments, as one table."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from ckpt_core._version import __version__
from ckpt_core.cli import _completion, _cp, _export, _plan
from ckpt_core.cli._arguments import OPTIONS_VARIABLE
from ckpt_core.cli._outcome import Outcome
from ckpt_core.cli.inspection import _diff, _du, _ls, _report, _show
from ckpt_core.cli.upkeep import _mark, _prune, _verify, _watch

_EXIT_CODES: Final = (
    "Exit codes: 0 all is well; 1 something is wrong with a checkpoint, or the storage failed; 2 wrong usage "
    "or option; 3 nothing there; 130 interrupted."
)
_OF_A_COMPARISON: Final = (
    "Exit codes: 0 the states are equal; 1 they differ; 2 they could not be compared; 130 interrupted."
)
_Argument: TypeAlias = tuple[str, Mapping[str, Any]]


@final
@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    run: Callable[[Namespace], Outcome]
    help: str
    arguments: Sequence[_Argument]
    description: str | None = None
    trouble: int | None = None
    """The exit code of every failure, if it is one for all."""


def _one(
    name: str, metavar: str | tuple[str, str] | None, text: str | None = None, **settings: Any
) -> _Argument:
    return name, {"metavar": metavar, "help": text, **settings}


def _many(name: str, metavar: str, text: str) -> _Argument:
    return _one(name, metavar, text, action="append", default=[])


def _flag(name: str, text: str) -> _Argument:
    return name, {"action": "store_true", "help": text}


_SHARED: Final = (
    _flag("--json", "write JSON to standard output"),
    _many(
        "--storage-option",
        "KEY=VALUE",
        "option of the filesystem behind a URL, such as an endpoint; may be repeated. KEY=@NAME takes "
        f"the value from the variable NAME, so that it shows in no list of processes; {OPTIONS_VARIABLE} may "
        "hold all of them, as a mapping in YAML or JSON",
    ),
)
_ROOT: Final = _one("root", "ROOT", "path or URL of a run")
_CHECKPOINT: Final = _one("checkpoint", "CHECKPOINT", "ROOT@STEP, or the path or URL of a checkpoint")
_PLACE: Final = _one("place", "ROOT_OR_CHECKPOINT", "path or URL of a run or of a checkpoint, or ROOT@STEP")
_OTHER_OPTIONS: Final = _many(
    "--to-storage-option",
    "KEY=VALUE",
    "option of the filesystem behind the target, if others than for SRC are needed; may be repeated",
)
_OF_COPIES: Final = (
    _one("--bandwidth", "RATE", 'the most bytes per second to send, such as "100 MB/s"'),
    _flag(
        "--take-over", "copy although writer.json names a job there, where no lock shows whether it is alive"
    ),
)
_MAP: Final = _one(
    "--map", "FILE", "JSON, YAML or TOML: names of modules there -> ours; a part '*' is any one"
)
_OF_EXPORTS: Final = (
    _one("place", "SRC", "ROOT@STEP, a CHECKPOINT, a ROOT (its newest), or what others wrote"),
    _one("target", "OUT", "path or URL to write: a name that is free, or an empty directory"),
    _one(
        "--to",
        "FORMAT",
        "hf (the default), a folder that from_pretrained reads; or the whole state: torch, one file of "
        "torch.save; lightning, a .ckpt; dcp, a directory of stock DCP; universal, for "
        "DeepSpeed; torch_dist, for Megatron-Core",
        default="hf",
    ),
    _one("--step", None, "of the root, instead of the newest", type=int),
    _one("--like", "DIR", "folder with config.json and tokenizer; for adapters, with their base"),
    _one("--dtype", None, "of all floating weights: bf16, fp16 or fp32"),
    _flag("--merge-adapters", "write the model with the adapters of PEFT in it"),
    _flag("--adapters", "write the adapters of PEFT alone, as PeftModel.from_pretrained reads them"),
    _many("--include", "PATTERN", "only tensors of such names, e.g. 'model.*'; may be repeated"),
    _MAP,
    _one("--shard-size", "SIZE", "of the files of weights (5 GB)", default="5 GB"),
    _OTHER_OPTIONS,
)
_LOOKING: Final = (
    _Command(
        "ls",
        _ls.run,
        "list the committed checkpoints of a root",
        (
            _ROOT,
            _flag("--tiers", "ask every place that tiers.json names, too"),
            _many("--tier", "URL", "ask this place, with the storage options given; may be repeated"),
        ),
    ),
    _Command(
        "show",
        _show.run,
        "show what one checkpoint holds",
        (
            _PLACE,
            _one("--step", None, "show this step of the root", type=int),
            _flag(
                "--tensors",
                "list every tensor: name, shape, dtype, elements, size; also of what others wrote",
            ),
        ),
        "Shows a checkpoint: the one named, or of a root the newest that can be used, for which all markers "
        "are read.",
    ),
    _Command(
        "diff",
        _diff.run,
        "show what of two checkpoints differs",
        (
            _one("place", "A", "ROOT@STEP, or a place as of `show`; of a root its newest"),
            _one("other", "B", "the same", nargs="?"),
            _one("--steps", ("A", "B"), "compare these steps of the root A", nargs=2, type=int),
            _many("--only", "PATTERN", "compare only what has such a name, e.g. 'model.*'; may be repeated"),
            _flag(
                "--quick", "compute no figures: where checksums tell that a tensor differs, it is not read"
            ),
        ),
        "Compares two checkpoints, of ours or of others, however many ranks saved them: facts in their "
        "manifests, tensors and values. Tensors of equal checksums are not read, and nothing is unpickled "
        "but plain values. Facts alone, such as the step, do not make them different.",
        _diff.TROUBLE,
    ),
    _Command(
        "du",
        _du.run,
        "show what takes the space of a root, or of one checkpoint",
        (_PLACE,),
        "Sums sizes by lineage (an unbroken line of saves) and by item (model, optimizer, …), "
        "with what is damaged, bad, abandoned or pinned, and what crashes and prunes have left.",
    ),
    _Command(
        "report",
        _report.run,
        "report what saves have cost, what failures took, and what would cost less",
        (_ROOT, _one("--html", "FILE", "write the page to this file")),
        "Reports on a root from its journal and its manifests: goodput and its parts, stalls, "
        "lost work, retention, and the interval that would have cost least. As text, JSON, or one HTML page "
        "that needs no network.",
    ),
    _Command(
        "verify",
        _verify.run,
        "read checkpoints back and compare them with what was committed",
        (
            _PLACE,
            _one("--step", None, "verify this step of the root", type=int),
            _flag("--all", "verify every checkpoint that lies there; not with --step"),
            _flag("--strict", "fail also if a checkpoint holds what its manifest does not name"),
            _one(
                "--manifest-sha256", "HEX", "fail unless its manifest has this SHA-256, which `show` prints"
            ),
        ),
        "Verifies a checkpoint, the newest of a root, a directory written by stock DCP, or what "
        "lies below a directory: the newest of each run, and all that stock DCP wrote. One that is damaged "
        "is marked, so that no resume relies on it; one that verifies loses its mark.",
    ),
)
_COPYING: Final = (
    _Command(
        "cp",
        _cp.run,
        "copy checkpoints or a run to another root",
        (
            _one(
                "sources",
                "SRC",
                "ROOT@STEP, a CHECKPOINT, or a ROOT: all committed ones of its present lineage",
                nargs="+",
            ),
            _one("target", "DST", "path or URL of the root to copy to"),
            _flag("--all", "of a root also the abandoned checkpoints"),
            _OTHER_OPTIONS,
            _flag("--mixed", "copy into a root that holds another run; nothing resumes there"),
            _one(
                "--compress",
                None,
                "zstd, which stock DCP reads; planes, smaller and for us alone; auto: what is there soonest; "
                "none: plain again",
                choices=("zstd", "planes", "auto", "none"),
            ),
            *_OF_COPIES,
        ),
        "Copies checkpoints as they are, unless told to compress them, between any two places, and compares "
        "every byte with their manifests before it commits them. After an interruption the same command "
        "continues: what is there is not sent again. Files that a manifest does not list are not copied.",
    ),
    _Command(
        "import",
        _export.import_,
        "make a checkpoint of ours out of what another program wrote",
        (
            _one("place", "PLACE", "path or URL of the folder or file"),
            _one("root", "ROOT", "path or URL of the run that gets it"),
            _one("--step", None, "its step, where it does not say it", type=int),
            _MAP,
            _flag("--take-over", "import although writer.json names a job in ROOT"),
        ),
        "Reads, verifies, writes and commits 128 MiB at a time, without loading the model. A load from the "
        "checkpoint gives what a load from PLACE gives. Interrupted, it leaves nothing that counts.",
    ),
    _Command(
        "upload",
        _cp.upload,
        "upload what a job that ended has left in its local root",
        (
            _one("root", "ROOT", "path of a run"),
            _one("--to", "URL", "the place to upload to; tiers.json need not name it"),
            _flag("--all", "everything of the present lineage"),
            *_OF_COPIES,
        ),
        "Uploads what was due for a place and is not there, and the newest. Verified and "
        "resumable as `cp`. A live job uploads by itself.",
    ),
    _Command(
        "export",
        _export.run,
        "write a checkpoint as Hugging Face, torch, Lightning or DCP read it",
        (*_OF_EXPORTS, _one("--ema", "NAME", "the item that holds the weights, e.g. averaged ones")),
        "Writes a checkpoint in a format of others, in bounded memory. What has checksums is "
        "verified on the way; OUT holds all of it in the end, or nothing. After an interruption the same "
        "command continues.",
    ),
    _Command(
        "average",
        _export.average,
        "export the average of the last checkpoints of a run",
        (
            *_OF_EXPORTS,
            _one("--last", "N", "how many, up to the newest or to --step (5)", type=int, default=5),
            _one("--ema", "DECAY", "exponential: what stays with each, e.g. 0.9", type=float, dest="decay"),
        ),
        "Averages the weights in fp32, from the oldest to the newest, window by window, and writes them as "
        "`export` does. Everything else is the newest's.",
    ),
)
_KEEPING: Final = (
    _Command(
        "prune",
        _prune.run,
        "remove checkpoints that no policy keeps",
        (
            _ROOT,
            _one("--keep-latest", "N", "keep the N highest steps", type=int),
            _one("--keep-every", "STEPS", "keep one in that many steps", type=int),
            _one(
                "--keep-every-fraction",
                "F[:STEPS]",
                "keep one in such a fraction of the training, such as 0.1, by the length that the "
                "checkpoints know, or of STEPS",
            ),
            _one("--keep-every-epochs", "N", "keep one in that many epochs", type=int),
            _one(
                "--keep-weights-every",
                "STEPS[:DTYPE]",
                "keep the weights alone of one in that many steps, in bf16, fp16 or fp32 if that is given",
            ),
            _one("--keep-for", "AGE", 'keep what is younger, such as "7d", or a number of seconds'),
            _one("--keep-within", "SIZE", 'of what the others keep, what has room, such as "2 TB"'),
            _many(
                "--keep-best",
                "METRIC[:N][:MODE]",
                "keep the N best (1) by a metric, by MODE min or max (min); may be repeated",
            ),
            _one("--policy", "FILE", "YAML or TOML file of options with a `keep`"),
            _flag(
                "--damaged",
                "instead of a policy: delete what is marked as damaged and not pinned, and nothing else; "
                "verify first, which takes the mark from what is whole",
            ),
            _flag("--bad", "the same for what is marked as bad"),
            _flag("--abandoned", "the same for what the present lineage does not continue from"),
            _flag("--dry-run", "only show what would be removed"),
            _flag(
                "--take-over",
                "prune although writer.json names a job, where no lock shows whether it is alive",
            ),
        ),
        "Keeps what at least one policy keeps, what is pinned, and always the newest. What is "
        "marked or abandoned counts for none of that and stays: remove it with --damaged, --bad or "
        "--abandoned. Before anything goes, one checkpoint that stays is verified; one that is damaged is "
        "marked, and what is older stays in its place.",
    ),
    _Command(
        "demote",
        _prune.demote,
        "keep of a checkpoint only the weights",
        (
            _CHECKPOINT,
            _one(
                "--dtype",
                None,
                "of all floating weights: bf16, fp16 or fp32",
                choices=("bf16", "fp16", "fp32"),
            ),
            _flag("--dry-run", "only show what it would save"),
            _flag("--take-over", "demote although writer.json names a job in ROOT"),
        ),
        "Commits the models and their averages as a checkpoint of their own, which names the whole one, then "
        "removes that. No resume takes weights; init_from=, load(source=) and `export` do. Refused are "
        "what is pinned or marked, and what a resume would load.",
    ),
    _Command(
        "pin",
        _mark.pin,
        "protect a step from pruning",
        (_CHECKPOINT, _one("--reason", None, "why it must stay", required=True)),
    ),
    _Command("unpin", _mark.unpin, "let a step be pruned again", (_CHECKPOINT,)),
    _Command(
        "mark",
        _mark.run,
        "mark a step as bad, or as good again",
        (
            _CHECKPOINT,
            _one("verdict", None, choices=("bad", "good")),
            _one("--reason", None, "why it is bad"),
            _flag("--and-later", "also every later step of the present lineage"),
        ),
        "A bad checkpoint is passed over by every resume and counts for nothing in retention, so "
        "that to roll back past it is one command. It is not deleted; see `prune --bad`.",
    ),
)
_OTHERS: Final = (
    _Command(
        "watch",
        _watch.run,
        "wait for checkpoints of a run, and run a command for each",
        (
            _ROOT,
            _one("--after", "STEP", "only what is after this step", type=int),
            _flag("--each", "every checkpoint, in turn, instead of the newest alone"),
            _one(
                "--exec",
                "CMD",
                "run this, without a shell, with {path} and {step} replaced, and CKPT_PATH and CKPT_STEP set",
            ),
            _flag("--fail-fast", "end when CMD fails; else the exit code tells at the end"),
            _one("--poll", "SECONDS", "look that often (5)", type=float, default=5.0),
            _one("--timeout", "SECONDS", "end when no other has come for so long", type=float),
        ),
        "Each is committed, of the present lineage and verified, and is pinned until CMD has ended, by a pin "
        "that ends by itself if this process dies. Without CMD their paths are printed.",
    ),
    _Command(
        "annotate",
        _watch.write_back,
        "write numbers measured of a checkpoint back, for retention and listings",
        (_CHECKPOINT, _many("--metric", "NAME=NUMBER", "a finite number; may be repeated")),
    ),
    _Command(
        "plan",
        _plan.run,
        "plan what checkpoints will cost: bytes, stall, interval, overhead, money",
        (
            _one(
                "model",
                "MODEL",
                "number of parameters (70B), a config.json of Hugging Face or its directory, or "
                "package.module:function, whose model is built on the meta device",
            ),
            _one(
                "--keep",
                "POLICY",
                "retention policy as in options: '{latest: 3, every: 1000}'; may be repeated, to compare",
                action="append",
            ),
            *_plan.options(),
        ),
        "Plans the checkpoints of a training that need not run yet: bytes by component and by "
        "rank, times of a save and a restore, the interval that loses least, expected goodput, and bytes and "
        "money in a month of 30 days. All that is assumed is printed, with its source and its option.",
    ),
    _Command(
        "completion",
        _completion.run,
        "write a script with which a shell completes this command",
        (_one("shell", None, choices=("bash", "zsh", "fish")),),
        'Writes a script for the shell: eval "$(ckpt completion bash)", the same for zsh, and '
        "`ckpt completion fish | source`.",
    ),
)


def parser() -> ArgumentParser:
    top = ArgumentParser(
        prog="ckpt",
        description="Look at, compare, verify, copy, pin and prune checkpoints.",
        epilog=_EXIT_CODES,
    )
    top.add_argument("--version", action="version", version=f"ckpt-suite {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    shared = ArgumentParser(add_help=False)
    for name, settings in _SHARED:
        shared.add_argument(name, **settings)
    for each in (*_LOOKING, *_COPYING, *_KEEPING, *_OTHERS):
        command = commands.add_parser(
            each.name,
            parents=[shared],
            help=each.help,
            description=each.description,
            epilog=_EXIT_CODES if each.trouble is None else _OF_A_COMPARISON,
        )
        for name, settings in each.arguments:
            command.add_argument(name, **settings)
        command.set_defaults(command=each.run, commands=commands.choices, trouble=each.trouble)
    return top
