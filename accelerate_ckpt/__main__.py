"""`python -m accelerate_ckpt train.py …`, also behind `accelerate launch … -m`."""

import sys

from accelerate_ckpt._runner import main

if __name__ == "__main__":
    main(sys.argv[1:])
