"""`python -m accelerate_ckpt train.py …`, also behind `accelerate launch … -m`."""

import os
import sys

if __name__ == "__main__":
    # `python -m` puts the current directory first, and `python train.py` does not: a file there may have the
    # name of any module that is imported from here on.
    here = {"", os.getcwd()}  # noqa: PTH109 - pathlib would be imported from there
    if not sys.flags.safe_path and sys.path[0] in here:
        del sys.path[0]
    from accelerate_ckpt._runner import main

    main(sys.argv[1:])
