"""`python -m fedcodist.report`."""

import sys

from fedcodist.report import main

sys.exit(main())
