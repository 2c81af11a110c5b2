"""``python -m replayssm``: the command line."""

import sys

from replayssm.cli import main

sys.exit(main())
