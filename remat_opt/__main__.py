"""``python -m remat_opt``: see ``command_line``."""

from __future__ import annotations

import sys

from remat_opt.command_line import main

if __name__ == "__main__":
    sys.exit(main())
