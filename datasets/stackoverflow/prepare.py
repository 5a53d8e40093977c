"""Prepares Stack Overflow for federated language models: see README.md beside this program.

python datasets/stackoverflow/prepare.py --source stackoverflow.sqlite.lzma --output data/stackoverflow
"""

import sys

from fedcodist.commands.prepare.stackoverflow import main

if __name__ == "__main__":
    sys.exit(main())
