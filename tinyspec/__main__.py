"""``python -m tinyspec``."""

import sys

from tinyspec.cli import main

sys.exit(main())
