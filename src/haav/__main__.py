"""`python -m haav` is the same as `haav`; torchrun starts it this way."""

import sys

from haav.cli.main import main

sys.exit(main())
