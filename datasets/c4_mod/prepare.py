"""Prepares C4 as unlabelled text in another data set's vocabulary: see README.md beside this program.

python datasets/c4_mod/prepare.py --source FOLDER --vocabulary-of data/stackoverflow --output data/c4_mod
"""

import sys

from fedcodist.commands.prepare.c4_mod import main

if __name__ == "__main__":
    sys.exit(main())
