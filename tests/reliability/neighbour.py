"""A neighbour: a process that exchanges directories and files of a root for links, as fast as it can.

Run as `python -m tests.reliability.neighbour ROOT UID`, with the user id that it takes when it is ready, or
that it has. It reads a bait, a line of JSON, from stdin; answers when the bait is there; exchanges until the
next line comes; and answers how often. An empty line, or the end of stdin, ends it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_EXCHANGE: Final = 2
_BETWEEN_LOOKS: Final = 16
"""Exchanges between two looks at stdin."""


def lay(bait: dict[str, Any]) -> list[tuple[int, bytes, bytes]]:
    """Make what the bait asks for; returns what is to be exchanged: a directory and two names in it."""
    for path in bait["directories"]:
        Path(path).mkdir(exist_ok=True)
        Path(path).chmod(0o777)
    for path in bait["files"]:
        Path(path).write_bytes(b"a neighbour's")
        Path(path).chmod(0o666)
    for path, target in bait["links"].items():
        Path(path).symlink_to(target)
    return [
        # The descriptor leads there whatever the directory is called later.
        (os.open(folder, os.O_RDONLY | os.O_DIRECTORY), os.fsencode(one), os.fsencode(other))
        for folder, one, other in bait["swaps"]
    ]


def swap(swaps: list[tuple[int, bytes, bytes]]) -> int:
    """Exchange until stdin has something to say; returns how often it was done."""
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    done = 0
    while not select.select([0], [], [], 0)[0]:
        for _ in range(_BETWEEN_LOOKS):
            for folder, one, other in swaps:
                done += renameat2(folder, one, folder, other, _EXCHANGE) == 0
    return done


def main(root: str, uid: int) -> None:
    """Be the neighbour until stdin ends."""
    os.chdir(root)
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    os.umask(0)
    while line := _line():
        swaps = lay(json.loads(line))
        _say("ready")
        done = swap(swaps)
        _line()
        for folder, _, _ in swaps:
            with suppress(OSError):
                os.close(folder)
        _say(str(done))


def _line() -> bytes:
    """A line of stdin, byte for byte: a buffer would hide from `select` what it has taken."""
    line = b""
    while (byte := os.read(0, 1)) not in {b"", b"\n"}:
        line += byte
    return line


def _say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
