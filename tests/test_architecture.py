"""The shape of the shipped code: small parts, one vocabulary, one import name per module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("common/ckpt_core", "common/ckpt_suite", "lightning_ckpt", "accelerate_ckpt")
PACKAGES = tuple(ROOT / name for name in NAMES)
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))

MAX_MODULE_LINES = 900
MAX_BODY_LINES = 80
MAX_PARAMETERS = 6
MAX_FIRST_LINE = 80
ROLES = {
    # Modules that play one part in several places: in each adapter, kind of storage, or command.
    *("connector", "evaluation", "hooks", "loading", "metrics", "options", "progress", "resume"),
    *(
        "base",
        "roots",
        "session",
        "settings",
        "state",
        "storage",
        "reader",
        "checkpoints",
        "verify",
        "prune",
        "plan",
    ),
}
TWINS = {
    # One for each Lightning, for each adapter, for each reader of `.metadata`.
    *(
        "ShardedCheckpoint",
        "ShardedCheckpointIO",
        "Roots",
        "Settings",
    ),
    *("Index", "Properties"),
}
DIALECT = re.compile(
    r"\b(is|are|was|were|be) told\b|\bg[eo]ts? on\b|\banew\b|\blest\b|\bstands? still\b|\bso-manyth\b"
    r"|\bin vain\b|\bwhat is left of\b|\bwhoever\b",
    re.IGNORECASE,
)
MODULES_NAMED_AFTER_NOTHING = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "misc",
    "base_classes",
    "dataclasses",
}

NAMES_OF_THE_HOSTS = {
    # Hooks and methods that Lightning, Accelerate, Transformers or DCP call by these names.
    "restore",
    "restore_checkpoint_after_setup",
    "lightning_restore_optimizer",
    "validate_checkpoint_id",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    path: Path
    lines: list[str]
    tree: ast.Module
    walked: list[ast.AST]

    def at(self, node: ast.AST) -> str:
        name = getattr(node, "name", "")
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {name}".rstrip()

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in self.walked if isinstance(node, kinds))


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    found = []
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
        found.append(Module(path=path, lines=text.splitlines(), tree=tree, walked=list(ast.walk(tree))))
    return found


def refuse(offenders: list[str]) -> None:
    assert not offenders, "\n".join(["", *offenders])


def body_lines(function: Function) -> int:
    statements = function.body
    if ast.get_docstring(function, clean=False) is not None:
        statements = statements[1:]
    return (function.end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def parameters(function: Function) -> list[str]:
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def words(identifier: str) -> set[str]:
    """The words of a name in either spelling, and neighbours together: `checkpoint_id` is one, too."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower().strip("_").split("_")
    return {*split, *(f"{one}_{two}" for one, two in pairwise(split))}


def refused_words() -> set[str]:
    """The words in code type in the glossary's last column."""
    rows = [
        line
        for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
        if line[:1] == "|"
    ]
    return {word for row in rows for word in re.findall(r"`(\w+)`", row.rstrip("| ").rsplit("|", 1)[1])}


def test_modules_fit_on_a_few_screens(modules):
    long = [f"{m.at(m.tree)}: {len(m.lines)} lines" for m in modules if len(m.lines) > MAX_MODULE_LINES]
    refuse(long)


def test_functions_fit_on_one_screen(modules):
    found = ((m, f, body_lines(f)) for m in modules for f in m.nodes(ast.FunctionDef, ast.AsyncFunctionDef))
    refuse([f"{m.at(f)}: {size} lines" for m, f, size in found if size > MAX_BODY_LINES])


def test_functions_take_few_parameters(modules):
    """Where a host or the command line dictates a signature, the `noqa` that ruff needs says so."""

    def exempt(module: Module, function: ast.AST) -> bool:
        signature = module.lines[function.lineno - 1 : function.body[0].lineno]
        return any("noqa" in line and "PLR0913" in line for line in signature)

    found = (
        (m, f, len(parameters(f))) for m in modules for f in m.nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    )
    refuse([f"{m.at(f)}: {n} parameters" for m, f, n in found if n > MAX_PARAMETERS and not exempt(m, f)])


def test_modules_are_named_after_their_role():
    named = [path for path in MODULES if path.stem.strip("_") in MODULES_NAMED_AFTER_NOTHING]
    refuse([str(path.relative_to(ROOT)) for path in named])


def test_every_module_says_why_it_exists(modules):
    refuse([m.at(m.tree) for m in modules if not ast.get_docstring(m.tree) and m.lines])


def test_the_source_root_is_never_imported_as_a_package(modules):
    def imported(node: ast.AST) -> list[str]:
        return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]

    tests = [path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    texts = [(path, path.read_text(encoding="utf-8")) for path in tests]
    trees = [
        (path, ast.parse(text))
        for path, text in texts
        if re.search(r"\bimport\b.*\bcommon\b|\bfrom\s+common\b", text)
    ]
    trees += [(m.path, m.tree) for m in modules]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for name in imported(node)
        if name.split(".")[0] == "common"
    ]
    refuse(found)


def test_no_init_file_turns_a_source_root_or_a_test_folder_into_a_package():
    assert not (ROOT / "common" / "__init__.py").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_tests_that_start_ranks_are_marked():
    """The fast tests stay in one process."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    marked = re.compile(r"mark\.(distributed|reliability|slow)")
    refuse(
        [
            str(path)
            for path, text in texts.items()
            if "run_ranks(" in text and path != Path(__file__) and not marked.search(text)
        ]
    )


def test_names_keep_to_the_glossary(modules):
    refused = refused_words()
    defined = ((m, n) for m in modules for n in m.nodes(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    found = [
        f"{m.at(n)}: {', '.join(sorted(bad))}"
        for m, n in defined
        if n.name not in NAMES_OF_THE_HOSTS and (bad := words(n.name) & refused)
    ]
    found += [
        f"{path.relative_to(ROOT)}: {', '.join(bad)}"
        for path in MODULES
        if (bad := words(path.stem) & refused)
    ]
    refuse(found)


def test_the_glossary_refuses_the_words_it_should():
    assert refused_words() >= {
        "snapshot",
        "checkpoint_id",
        "finalize",
        "purge",
        "restore",
        "leader",
        "master",
    }
    assert words("_restoreCheckpointId") >= {"restore", "checkpoint_id"}


def test_every_logger_of_ours_makes_names_from_storage_printable(modules):
    loggers = (
        (m, node)
        for m in modules
        if any("getLogger" in line for line in m.lines)
        for node in m.nodes(ast.Call)
        if isinstance(node, ast.Call) and ast.unparse(node) == "logging.getLogger(__name__)"
    )
    refuse([f"{m.at(node)}: use ckpt_core.disclosure.logger_of" for m, node in loggers])


def test_two_modules_of_one_name_play_one_role():
    """A role is a word of every adapter or of every command: the others have a name of their own."""
    named: dict[str, list[Path]] = {}
    for path in MODULES:
        if path.stem.strip("_") not in ROLES and path.stem not in {"__init__", "__main__"}:
            named.setdefault(path.stem.strip("_"), []).append(path.relative_to(ROOT))
    refuse([f"{name}: {', '.join(map(str, paths))}" for name, paths in named.items() if len(paths) > 1])


def test_two_classes_of_one_name_play_one_role(modules):
    named: dict[str, list[str]] = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and node.name.strip("_") not in TWINS:
                named.setdefault(node.name.strip("_"), []).append(module.at(node))
    refuse([", ".join(places) for places in named.values() if len(places) > 1])


def test_no_decision_is_made_by_the_text_of_an_error(modules):
    """What failed is data: `Failure`, `SavePhase`, `errno`, `in_doubt`, the type."""

    def is_text_of_error(node: ast.AST) -> bool:
        text = ast.unparse(node)
        return bool(re.fullmatch(r"str\((error|caught|failure|cause|exception|\w*error)\)", text)) or (
            text.startswith("os.strerror(") or text.endswith((".strerror", ".message", ".args[0]"))
        )

    def decides(node: ast.AST) -> bool:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=right):
                textual = any(isinstance(op, ast.In | ast.NotIn | ast.Eq | ast.NotEq) for op in ops)
                return textual and any(map(is_text_of_error, [left, *right]))
            case ast.Call(func=ast.Attribute(value=value, attr=method)):
                return method in {"startswith", "endswith", "find", "index"} and is_text_of_error(value)
            case _:
                return False

    refuse([m.at(node) for m in modules for node in m.walked if decides(node)])


def test_the_prose_is_plain(modules):
    """The dialect that an editor's pass took out stays out, of shipped code and of the docs."""
    texts = [(m.path, m.lines) for m in modules]
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    texts += [
        (p, p.read_text(encoding="utf-8").splitlines()) for p in (*pages, *(ROOT / "docs").glob("*.md"))
    ]
    refuse(
        [
            f"{path.relative_to(ROOT)}:{number} {line.strip()}"
            for path, lines in texts
            for number, line in enumerate(lines, 1)
            if DIALECT.search(line) and not any(name in line for name in ("test_", '"anew"'))
        ]
    )


def test_docstrings_begin_with_a_short_line(modules):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = ((m, node, ast.get_docstring(node)) for m in modules for node in m.nodes(*kinds))
    refuse(
        [
            f"{m.at(node)}: {len(first)} characters: {first}"
            for m, node, text in docs
            if text and len(first := text.splitlines()[0]) > MAX_FIRST_LINE
        ]
    )
