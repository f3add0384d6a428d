"""What the house looks like in figures: counted from the sources, by `ast` and `tokenize` alone."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "common" / "ckpt_core"
ADAPTERS = (ROOT / "lightning_ckpt", ROOT / "accelerate_ckpt")
BUDGET = Path(__file__).with_name("budget.toml")
MODULES_IN_A_PACKAGE = 12
TOP = "(top)"
"""The room of the files directly in `ckpt_core`."""

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the budget speaks of: a package of the core, or an adapter."""

    lines: int
    public: int
    others: int


def room_of(path: Path) -> str:
    if not path.is_relative_to(CORE):
        return path.relative_to(ROOT).parts[0]
    inside = path.relative_to(CORE).parts
    return inside[0] if len(inside) > 1 else TOP


@functools.cache
def sources(*folders: Path) -> tuple[Path, ...]:
    """The modules of some folders, of what is shipped if none is given."""
    return tuple(sorted(path for each in folders or (CORE, *ADAPTERS) for path in each.rglob("*.py")))


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def walked(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(text_of(path))))


def lines_of(paths: Iterable[Path]) -> int:
    return sum(len(text_of(path).splitlines()) for path in paths)


def code_of(path: Path) -> int:
    """Lines without blank ones, comments and docstrings."""
    rows: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text_of(path)).readline):
        if token.type not in _NO_CODE:
            rows.update(range(token.start[0], token.end[0] + 1))
    for node in walked(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and ast.get_docstring(node, clean=False) is not None:
                rows.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    blank = {number for number, line in enumerate(text_of(path).splitlines(), 1) if not line.strip()}
    return len(rows - blank)


def count(path: Path, *kinds: type[ast.AST]) -> int:
    return sum(isinstance(node, kinds) for node in walked(path))


def public_names(path: Path) -> set[str]:
    """What `__all__` of a module lists."""
    if "__all__" not in text_of(path):
        return set()
    return {
        each.value
        for node in ast.parse(text_of(path)).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == "__all__"
        for each in ast.walk(node.value)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


def names_of_others() -> dict[str, set[str]]:
    """Room -> the private names of others that it uses, as `tests/test_private_names.py` finds them."""
    from tests import test_private_names as canary

    own = {name for path in canary.modules() for name in canary.defined(canary.nodes(path))}
    found: dict[str, set[str]] = defaultdict(set)
    for path in canary.modules():
        found[room_of(path)] |= set(canary.private_names(canary.nodes(path))) - own
    return found


def pinned() -> int:
    """How many names of others the canary lists."""
    from tests import test_private_names as canary

    return sum(len(table) for name, table in vars(canary).items() if name.isupper() and name not in _NO_TABLE)


_NO_TABLE = {"ROOT", "SOURCES", "OURS", "LIGHTNING_SET"}


def rooms() -> dict[str, Room]:
    """What the budget speaks of, as it is."""
    held: dict[str, list[Path]] = defaultdict(list)
    for path in sources():
        held[room_of(path)].append(path)
    others = names_of_others()
    return {
        room: Room(
            lines=lines_of(paths),
            public=len(set().union(*map(public_names, paths))),
            others=len(others[room]),
        )
        for room, paths in sorted(held.items())
    }


def crowded() -> dict[str, int]:
    """The packages of more modules than a package should have."""
    held: dict[str, int] = defaultdict(int)
    for path in sources():
        held[str(path.parent.relative_to(ROOT))] += 1
    return {package: number for package, number in sorted(held.items()) if number > MODULES_IN_A_PACKAGE}


def budget() -> tuple[dict[str, Room], dict[str, int]]:
    """The most that each room may have, and the modules of the crowded packages."""
    table = tomllib.loads(text_of(BUDGET))
    return {name: Room(**row) for name, row in table["rooms"].items()}, table["modules"]


def lowered(moved: bool) -> str:
    """The text of the budget with today's figures.

    Raises:
        SystemExit: a room is over its budget, or new, and nobody has said that lines were moved; or more came
            than went.
    """
    (most, _), now = budget(), rooms()
    risen = {
        room: name
        for room, each in now.items()
        for name in ("lines", "public", "others")
        if room not in most or getattr(each, name) > getattr(most[room], name)
    }
    if risen and not moved:
        raise SystemExit(f"over the budget, or new: {risen}; --moved if another room gave what they took")
    for name in ("lines", "public", "others"):
        before, after = (sum(getattr(each, name) for each in table.values()) for table in (most, now))
        if after > before:
            raise SystemExit(f"{name} of all rooms: {after}, and the budget is {before}")
    return written(now)


def written(now: dict[str, Room]) -> str:
    """The budget as a file."""
    head = text_of(BUDGET).partition("[rooms]")[0] if BUDGET.exists() else ""
    return "\n".join(
        [
            f"{head}[rooms]",
            *(
                f'"{name}" = {{ lines = {each.lines}, public = {each.public}, others = {each.others} }}'
                for name, each in now.items()
            ),
            "",
            "[modules]",
            *(f'"{package}" = {number}' for package, number in crowded().items()),
            "",
        ]
    )


def threads() -> list[str]:
    """The kinds of thread, by the names that they are given; a number in the name makes no new kind."""

    def named(node: ast.AST) -> Iterator[str]:
        if not isinstance(node, ast.Call):
            return
        for value in (*node.args, *(each.value for each in node.keywords if each.arg in _NAMES)):
            text = value.values[0] if isinstance(value, ast.JoinedStr) and value.values else value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield from re.findall(r"^ckpt-[a-z-]*[a-z]", text.value)

    return sorted({name for path in sources() for node in walked(path) for name in named(node)})


_NAMES = {"name", "thread_name_prefix"}


def callbacks() -> int:
    """Functions that a class is given and holds: fields, and arguments of constructors."""

    def held(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
        for each in node.body:
            if isinstance(each, ast.AnnAssign):
                yield ast.unparse(each.target).strip("_"), each.annotation
            elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
                given = each.args
                for one in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                    yield one.arg, one.annotation

    classes = (node for path in sources() for node in walked(path) if isinstance(node, ast.ClassDef))
    return sum(
        len({name for name, kind in held(node) if kind is not None and "Callable[" in ast.unparse(kind)})
        for node in classes
    )


def fields(name: str) -> int:
    """How many options a class of options has, wherever it is."""
    classes = (node for path in sources() for node in walked(path) if isinstance(node, ast.ClassDef))
    return sum(
        isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_")
        for node in classes
        if node.name == name
        for each in node.body
    )


def listeners() -> int:
    """Places that make a socket listen."""
    return sum(
        isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"listen", "create_server"}
        for path in sources()
        for node in walked(path)
    )


def words(*names: str) -> int:
    pages = [path for name in names for path in sorted(ROOT.glob(name))]
    return sum(len(text_of(path).split()) for path in pages)


def through_privates() -> dict[str, list[str]]:
    """Room -> the files of tests that import its private modules or names."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sources(ROOT / "tests"):
        for node in walked(path):
            for name in _imported(node):
                parts = name.split(".")
                if any(each.startswith("_") and not each.startswith("__") for each in parts):
                    room = parts[0] if parts[0] != "ckpt_core" else parts[1]
                    package = room in parts[:1] or (CORE / room).is_dir()
                    found[room if package else TOP].add(str(path.relative_to(ROOT)))
    return {room: sorted(paths) for room, paths in sorted(found.items())}


def _imported(node: ast.AST) -> list[str]:
    ours = ("ckpt_core", "lightning_ckpt", "accelerate_ckpt")
    if isinstance(node, ast.Import):
        names = [each.name for each in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [f"{node.module}.{each.name}" for each in node.names]
    else:
        names = []
    return [name for name in names if name.split(".")[0] in ours]
