"""Python programs as `python …` runs them, in processes forked from one that has imported the frameworks.

Most of a short training is the import of torch and of a framework; a fork has them already. To show something
of a cold start, of the interpreter's own end, or of a launcher's processes, use `subprocess`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path


def run_python(
    *arguments: str | Path, cwd: Path, variables: Mapping[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`, a script or a module, with further environment variables."""
    command = [str(each) for each in arguments]
    environment = {**os.environ, **(variables or {})}
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        # Not a daemon: loaders with workers and launchers have children of their own.
        process = multiprocessing.get_context("forkserver").Process(
            target=_child, args=(command, str(cwd), environment, folder), daemon=False
        )
        process.start()
        process.join(timeout)
        ended = process.exitcode
        process.kill()
        process.join()
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    if ended is None:
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    return subprocess.CompletedProcess(command, ended, out, err)


def _child(command: list[str], cwd: str, environment: dict[str, str], folder: str) -> None:
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if "PYTHONWARNINGS" in environment:
        warnings.simplefilter(environment["PYTHONWARNINGS"])
    if "torch" in sys.modules and "OMP_NUM_THREADS" in environment:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    multiprocessing.set_start_method(None, force=True)  # as in any script, not as in this child
    code = _code_of(command)
    # In the order of the interpreter; `os._exit` in place of its end, at which gloo's threads may abort.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code_of(command: list[str]) -> int:
    try:
        _run(command)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _run(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv, sys.path[:0] = command[1:], [str(Path.cwd())]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = command, [str(Path(command[0]).resolve().parent)]
        runpy.run_path(command[0], run_name="__main__")
