"""`python -m fedcodist.commands.prepare`."""

import sys

from fedcodist.commands.prepare import main

sys.exit(main())
