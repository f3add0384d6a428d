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
PACKAGES = (ROOT / "common" / "ckpt_core", ROOT / "lightning_ckpt", ROOT / "accelerate_ckpt")
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))

MAX_MODULE_LINES = 500
MAX_BODY_LINES = 50
MAX_METHODS = 15
# What a storage must do is one contract: split, every backend would have to be put together again.
WIDE = {"Storage", "LocalStorage", "MemoryStorage", "FaultyStorage", "CheckpointManager"}
MAX_PARAMETERS = 6
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

    def at(self, node: ast.AST) -> str:
        name = getattr(node, "name", "")
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {name}".rstrip()

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    sources = [(path, path.read_text(encoding="utf-8")) for path in MODULES]
    return [Module(path=p, lines=s.splitlines(), tree=ast.parse(s, filename=str(p))) for p, s in sources]


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


def test_classes_do_one_thing(modules):
    def methods(node: ast.AST) -> set[str]:
        """Without dunders, properties (they read as data) and the tests of a shipped suite."""
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, Function)]
        defined = {
            c.name for c in children if not any("property" in ast.unparse(d) for d in c.decorator_list)
        }
        return {name for name in defined if not name.startswith(("__", "test_"))}

    found = ((m, c, len(methods(c))) for m in modules for c in m.nodes(ast.ClassDef))
    refuse(
        [f"{m.at(c)}: {count} methods" for m, c, count in found if count > MAX_METHODS and c.name not in WIDE]
    )


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
