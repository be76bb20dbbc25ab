"""``python -m p3o_train``: the same as the console script ``p3o``."""

import sys

from p3o_train.cli import main

sys.exit(main())
