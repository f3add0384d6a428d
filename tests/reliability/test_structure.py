"""Who may import whom: shipped code no test, benchmarks no test, and nobody in a circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = [ROOT / "common" / "ckpt_core", ROOT / "lightning_ckpt", ROOT / "accelerate_ckpt"]
TREES = [ROOT / "benchmarks", ROOT / "tests" / "reliability", ROOT / "tests" / "support"]
MOST_MODULES = 16


def modules_in(folders):
    return [path for folder in folders for path in folder.rglob("*.py")]


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_by(path):
    """Every module, and every name in one, that is imported anywhere in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_neither_shipped_code_nor_a_benchmark_imports_a_test():
    """Benchmarks may start ranks with the kit of the tests, which tests nothing itself."""
    found = [
        f"{name_of(path)} imports {name}"
        for path in modules_in([*SHIPPED, ROOT / "benchmarks", ROOT / "examples"])
        for name in imported_by(path)
        if name.split(".")[0] == "tests"
        and not (name.startswith("tests.kit.") and name_of(path).startswith("benchmarks."))
    ]
    assert found == []


def test_no_module_of_the_rig_or_of_the_benchmarks_imports_itself_by_a_detour():
    paths = {name_of(path): path for path in modules_in(TREES)}
    graph = {name: {each for each in imported_by(path) if each in paths} for name, path in paths.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(paths)


def test_no_package_of_the_rig_has_more_modules_than_a_person_keeps_in_mind():
    folders = {
        path.parent for path in modules_in([ROOT / "tests" / "reliability", ROOT / "tests" / "support"])
    }
    counts = {name_of(folder): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: count for name, count in counts.items() if count > MOST_MODULES} == {}
