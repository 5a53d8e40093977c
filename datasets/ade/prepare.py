"""Prepares the ADE corpus: see README.md beside this program.

python datasets/ade/prepare.py --source FOLDER --output data/ade
"""

import sys

from fedcodist.commands.prepare.ade import main

if __name__ == "__main__":
    sys.exit(main())
