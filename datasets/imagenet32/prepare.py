"""Prepares ImageNet at 32x32 pixels, as unlabelled images: see README.md beside this program.

python datasets/imagenet32/prepare.py --source PATH --output data/imagenet32
"""

import sys

from fedcodist.commands.prepare.imagenet32 import main

if __name__ == "__main__":
    sys.exit(main())
