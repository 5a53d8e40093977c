"""Prepares CIFAR-100 for federated distillation: see README.md beside this program.

python datasets/cifar100/prepare.py --source PATH --output data/cifar100
"""

import sys

from fedcodist.commands.prepare.cifar100 import main

if __name__ == "__main__":
    sys.exit(main())
