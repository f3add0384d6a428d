"""The maps, the table of threads and the drawing in docs/architecture.md, compared with the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "common" / "ckpt_core"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Return the text below a heading, up to the next one."""
    return re.split(r"^#+ ", PAGE.partition(f"# {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def first_column(table: str) -> list[str]:
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return [row.split("|")[1].strip() for row in rows[2:]]


def defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yield functions and classes of a module, and those inside its classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from defined(node.body, f"{prefix}{node.name}.")


def is_there(file: str, name: str) -> bool:
    path = next((folder / file for folder in (CORE, ROOT) if (folder / file).exists()), None)
    if path is None or not name:
        return path is not None
    return name in set(defined(ast.parse(path.read_text(encoding="utf-8")).body))


def test_every_file_and_function_on_the_page_exists():
    named = set(re.findall(r"`([\w/]+\.py)(?::([A-Za-z_][\w.]*))?`", PAGE))
    assert len(named) > 40
    assert sorted(f"{file}:{name}" for file, name in named if not is_there(file, name)) == []


@pytest.mark.parametrize("title", ["Map of a save", "Map of a load"])
def test_every_row_of_a_map_names_one_function(title):
    rows = first_column(section(title))
    assert rows
    assert [row for row in rows if not re.fullmatch(r"`[\w/]+\.py:[\w.]+`", row)] == []


def test_the_table_of_threads_lists_every_thread_of_the_core():
    names = " ".join(first_column(section("Threads")))
    listed = {name.rstrip("-0123456789") for name in re.findall(r"`(ckpt-[\w-]+)`", names)}
    source = "\n".join(path.read_text(encoding="utf-8") for path in CORE.rglob("*.py"))
    started = re.findall(r'name(?:_prefix)?(?:: str)? ?= ?f?"(ckpt-[a-z-]+)', source)
    assert listed == {name.rstrip("-") for name in started}


def test_the_drawing_has_every_layer_that_is_enforced():
    drawing = section("The house").split("```")[1]
    layers = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("layers = [")[2]
    enforced = re.findall(r'"([\w| ]+)"', layers.partition("]")[0])
    drawn = [line.strip().partition("  ")[0] for line in drawing.splitlines()]
    assert [line for line in drawn if line in enforced] == enforced
