"""Prepares the standard library's source as text: see README.md beside this program.

python datasets/python_source/prepare.py --output data/python_source
"""

import sys

from fedcodist.commands.prepare.python_source import main

if __name__ == "__main__":
    sys.exit(main())
