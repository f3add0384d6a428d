"""`python -m tests.judges form|features|all`: the table to run before and after each step.

`form` counts (lines, functions, classes, names, threads, hops, starts; `--write` lowers the budget);
`features` runs a few tests of each thing that must still be there; `all` does both, and more of each sweep.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.judges import features, figures, form

# As under pytest: nothing looks for a git commit here.
os.environ.setdefault("CKPT_SUITE_CODE_VERSION", "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges", description=__doc__)
    parser.add_argument("what", choices=["form", "features", "all"])
    parser.add_argument("--write", action="store_true", help="lower the budget to what there is")
    parser.add_argument("--moved", action="store_true", help="with --write: a room took what others gave")
    parser.add_argument("--only", default="", metavar="WORD", help="rows of `features` with this word")
    parser.add_argument("--workers", type=int, default=2, help="of `features`; 2 unless told")
    given = parser.parse_args()
    if given.write:
        figures.BUDGET.write_text(figures.lowered(given.moved), encoding="utf-8")
        figures.text_of.cache_clear()
    if given.what != "features":
        form.show(measured=not given.write)
    if given.what == "form":
        return 0
    return features.run(given.only, workers=given.workers, thorough=given.what == "all")


if __name__ == "__main__":
    sys.exit(main())
