"""Writers in place of `ckpt_core.export`, whose process imports them by name: what they do is said by files.

A directory `say` beside the place has: `hold`: wait while it is there; `fail`: the text of an error; and
`begun`: a line for each call.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any


def write(place: str, out: str, **words: Any) -> None:
    """Copy a checkpoint by a draft, as an export has, and say with which words."""
    say = Path(out).parent.parent / "say"
    with (say / "begun").open("a") as begun:
        begun.write(f"{os.getpid()} {Path(place).name}\n")
    if (say / "fail").exists():
        raise OSError(28, (say / "fail").read_text())
    draft = Path(out).parent / f".{Path(out).name}.export~"
    shutil.copytree(place, draft, dirs_exist_ok=True)
    while (say / "hold").exists():
        time.sleep(0.01)
    (draft / "words.json").write_text(json.dumps(words))
    draft.rename(out)
