"""`python -m quantkit`: the command line without an installed script."""

from __future__ import annotations

import sys

from quantkit.cli import main

sys.exit(main())
