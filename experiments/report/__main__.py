"""`python -m experiments.report`."""

import sys

from experiments.report import main

sys.exit(main())
