"""``python -m tinyspec``."""

import sys

from tinyspec.cli.main import main

sys.exit(main())
