"""Prepares sites of the Stack Exchange data dump as text: see README.md beside this program.

python datasets/stackexchange/prepare.py --source FOLDER --output data/stackexchange
"""

import sys

from fedcodist.commands.prepare.stackexchange import main

if __name__ == "__main__":
    sys.exit(main())
