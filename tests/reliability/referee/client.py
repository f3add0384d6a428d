"""The command that the referee starts: `client.py SOCKET KIND FOLDER` has a warm process do the training."""

from __future__ import annotations

import json
import os
import socket
import sys


def main() -> int:
    """Ask for the training; its output goes to ours, its exit code is ours."""
    address, kind, folder = sys.argv[1:]
    referees = {name: value for name, value in os.environ.items() if name.startswith("CKPT_CHAOS")}
    referees.pop("CKPT_CHAOS_ARMED", None)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = json.dumps({"kind": kind, "folder": folder, "environment": referees})
        socket.send_fds(connection, [request.encode()], [1])
        return abs(int(connection.recv(16)))


if __name__ == "__main__":
    sys.exit(main())
