"""Prepares EMNIST's letters, by writer: see README.md beside this program.

python datasets/emnist/prepare.py --source PATH --output data/emnist
"""

import sys

from fedcodist.commands.prepare.emnist import main

if __name__ == "__main__":
    sys.exit(main())
