"""`python -m tests.outside suites|projects`: what others wrote, run through ours."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.outside", description=__doc__)
    parser.add_argument("what", choices=["suites", "projects"])
    parser.add_argument("names", nargs="*", help="of suites or projects; all if none is given")
    parser.add_argument(
        "--sources", type=Path, required=True, help="a folder of checkouts, named as on GitHub"
    )
    parser.add_argument("-k", dest="expression", default="", help="which tests of the suites")
    given = parser.parse_intermixed_args()
    if (given.sources / "site-packages" / "tests").exists():
        raise SystemExit(
            f"{given.sources}/site-packages/tests hides ours: remove it; some package installs its tests"
        )
    if given.what == "suites":
        from tests.outside import suites

        extra = ["-k", given.expression] if given.expression else []
        return int(suites.run(given.names, given.sources.resolve(), extra) > 0)
    from tests.outside import projects

    return int(projects.run(given.names, given.sources.resolve()) > 0)


if __name__ == "__main__":
    sys.exit(main())
