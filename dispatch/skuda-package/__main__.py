"""``python -m skuda`` is the command ``skuda``."""

import sys

from skuda.tools.cli import main

sys.exit(main())
