"""The records of measurements, and the page that is made of them.

    python -m benchmarks.save --gib 2 --record docs/measurements/save-1-2-gib.json    # measure, and record
    python -m benchmarks.records                                                      # write the page

A benchmark writes what it has measured. What people write stays: section, title, what is compared, a note
and a picture.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.report import Report, Table

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "measurements"
PAGE = ROOT / "docs" / "measurements.md"
MACHINE = "2 CPUs, 24 GiB, ext4"
SECTIONS = (
    "Saves", "Beside the training", "Loads", "Many ranks", "Object stores", "Tiers", "Compression",
    "Clients of S3", "Weights into a model", "Export", "When to save", "Failure rate", "Hosts",
    "Kills and faults",
)  # fmt: skip
HEAD = f"""# Measurements

Every figure of ckpt-suite is on this page. `python -m benchmarks.records` writes it from the records in
`docs/measurements/`; a benchmark writes its record with `--record FILE`.
[How to measure](saving.md#measure-it-yourself) says what the words mean.

**The machine**, where an entry names no other: {MACHINE} on a virtual disk, Linux, torch 2.13, no GPU.
CUDA, NCCL, real clouds, shared filesystems and more than one machine have not been measured. Every entry is
a run of its own, and the speed of the disk drifts between runs: compare within a table, and trust ratios
and medians more than seconds. Figures are medians, with minimum and maximum in brackets where they are
known. Buffered writes of the same bytes took 0.7 s and 8 s within minutes; direct writes repeat to about
10 %.
"""


def write(path: Path, report: Report, *, machine: str, command: str, load: float) -> None:
    """Write the record of a run; keep what people have written in the one that is there."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"section": "Saves"}
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    record = {
        "title": report.title,
        "compares": "",
        **{name: kept[name] for name in ("section", "title", "compares", "note", "picture") if name in kept},
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip(),
        "machine": machine,
        "beside": f"a load of {load:.1f} at the start",
        "conditions": list(report.conditions),
        "tables": [part._asdict() for part in report.table if isinstance(part, Table)],
        "remarks": [part for part in report.table if isinstance(part, str) and part],
    }
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def page() -> str:
    """The page, from all records."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))]
    found.sort(key=lambda record: SECTIONS.index(record["section"]))
    parts = [HEAD]
    for section, records in groupby(found, key=lambda record: record["section"]):
        parts += [f"## {section}\n", *(_entry(record) for record in records)]
    return "\n".join(parts)


def _entry(record: Mapping[str, Any]) -> str:
    paragraphs = [
        f"### {record['title']}",
        record["compares"],
        *(_table(each["header"], each["rows"]) for each in record["tables"]),
        "\n".join(f"- {remark}" for remark in record.get("remarks", ())),
        record.get("note", ""),
        f"![{record['title']}]({record['picture']})" if "picture" in record else "",
        " ".join(_origin(record)),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def _origin(record: Mapping[str, Any]) -> Iterator[str]:
    """Where the figures come from, and under what conditions."""
    commit = f"commit {record['commit']}, " if record["commit"] else ""
    by = f"`{record['command']}`" if record["command"] else "hand"
    yield f"*Measured* by {by}, {commit}{record['date']}; beside it: {record['beside']}."
    if not record.get("machine", MACHINE).startswith(MACHINE):
        yield f"On {record['machine']}."
    yield from record["conditions"]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the cells that a short row lacks stay empty."""
    lines = [header, ["---"] * len(header), *([*row, *[""] * (len(header) - len(row))] for row in rows)]
    return "\n".join(
        "| " + " | ".join(cell.strip().replace("|", "\\|") for cell in line) + " |" for line in lines
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
