"""One fork server of `multiprocessing` for several processes; its imports cost more than most tests.

Any process may ask a fork server for children; `multiprocessing` only offers no way to name it one.
"""

from __future__ import annotations

import os
from multiprocessing import forkserver


def start_fork_server() -> str:
    """Start the one of this process, which ends with it; the address for `use_fork_server`.

    What its children print is lost: it would stand among the lines of whoever else uses the terminal.
    """
    server = forkserver._forkserver
    outputs = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in outputs:
            os.dup2(nowhere, descriptor)
        server.ensure_running()
    finally:
        for descriptor, own in outputs.items():
            os.dup2(own, descriptor)
            os.close(own)
        os.close(nowhere)
    return str(server._forkserver_address)


def use_fork_server(address: str) -> None:
    """Have `multiprocessing` start the children of this process from the server at that address."""
    server = forkserver._forkserver
    server._forkserver_address = address
    # Handed to each child; a real one would keep the server alive when the process that started it has ended.
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = lambda: None
