"""A report as one HTML page without network, fonts or scripts."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import Final

from ckpt_core.disclosure import printable
from ckpt_core.reporting._charts import chart
from ckpt_core.reporting._report_values import Report
from ckpt_core.reporting._sections import Section, headline, sections

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1c1e21;--soft:#6a6f76;--rule:#e2e4e8;--paper:#fff;--main:#2f6db3;
--pale:#b9d0ea;--bad:#c0452c;--warm:#d99a2b}
@media (prefers-color-scheme:dark){:root{--ink:#e6e7e9;--soft:#9aa0a8;--rule:#33373d;--paper:#16181b;
--main:#6ea8e6;--pale:#31527a;--bad:#ec7b62;--warm:#e0b15a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1010px;padding:40px 24px 80px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:24px;font-weight:600;margin:0;overflow-wrap:anywhere}
h2{font-size:16px;font-weight:600;margin:44px 0 8px;padding-top:12px;border-top:1px solid var(--rule)}
p{margin:0 0 8px;max-width:76ch;overflow-wrap:anywhere}
.soft{color:var(--soft)}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:20px;margin:28px 0 0}
dt{color:var(--soft);font-size:13px}
dd{margin:0;font-size:24px;font-variant-numeric:tabular-nums;white-space:nowrap}
.wide{overflow-x:auto;margin-top:12px}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{font-weight:500;font-size:11.5px;letter-spacing:.03em;color:var(--soft);text-align:left}
th,td{padding:4px 18px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top;overflow-wrap:anywhere}
.n{text-align:right;white-space:nowrap}
svg{display:block;width:100%;height:auto;margin:14px 0 4px;overflow:visible}
svg text{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
.rule{stroke:var(--rule)}.range{stroke:var(--pale);stroke-width:2}circle{fill:var(--main)}
.save,.ended,.p0{fill:var(--main)}.open,.load,.p4{fill:var(--soft)}.ended,.open{opacity:.55}
.preempted,.p1{fill:var(--warm)}.unclean,.bad,.p3{fill:var(--bad)}.unclean{opacity:.6}.p2{fill:var(--pale)}
@media print{body{max-width:none;padding:0}}
"""


def page(report: Report) -> str:
    """Return a report as HTML. Every text in it is escaped, wherever it comes from."""
    made = datetime.fromtimestamp(report.made, UTC).strftime("%Y-%m-%d %H:%M")
    figures = "".join(f"<div><dt>{_safe(n)}</dt><dd>{_safe(text)}</dd></div>" for n, text in headline(report))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Checkpoints of {_safe(report.root)}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        f'<h1>{_safe(report.root)}</h1>\n<p class="soft">Checkpoints of this root, as of {made} UTC</p>\n'
        f"<dl>{figures}</dl>\n{''.join(_section(each, report) for each in sections(report))}</body></html>\n"
    )


def _section(each: Section, report: Report) -> str:
    return (
        f'<section id="{each.key}"><h2>{_safe(each.title)}</h2>\n'
        f"{''.join(f'<p>{_safe(line)}</p>' for line in each.lines)}\n{chart(each.key, report)}\n"
        f"{_table(each) if each.rows else ''}</section>\n"
    )


def _table(each: Section) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        kinds = ["" if place < each.figures else ' class="n"' for place in range(len(cells))]
        scope = ' scope="col"' if tag == "th" else ""
        inner = "".join(f"<{tag}{scope}{k}>{_safe(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True))
        return f"<tr>{inner}</tr>\n"

    body = "".join(row(cells, "td") for cells in each.rows)
    head = row(each.columns, "th")
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>\n'


def _safe(text: str) -> str:
    return escape(printable(text))
