"""Prepares the Microsoft News Dataset: see README.md beside this program.

python datasets/mind/prepare.py --source MINDsmall_train --evaluation MINDsmall_dev --output data/mind
"""

import sys

from fedcodist.commands.prepare.mind import main

if __name__ == "__main__":
    sys.exit(main())
