"""`python -m ckpt_core.cli`."""

import sys

from ckpt_core.cli import main

sys.exit(main())
