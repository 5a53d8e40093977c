"""Prepares CIFAR-10: see README.md beside this program.

python datasets/cifar10/prepare.py --source PATH --output data/cifar10
"""

import sys

from fedcodist.commands.prepare.cifar10 import main

if __name__ == "__main__":
    sys.exit(main())
