"""Prepares MNIST: see README.md beside this program.

python datasets/mnist/prepare.py --source PATH --output data/mnist
"""

import sys

from fedcodist.commands.prepare.mnist import main

if __name__ == "__main__":
    sys.exit(main())
