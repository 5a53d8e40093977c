"""Prepares a data set: makes a folder of columns with checksums, which configs read.

    fedcodist prepare NAME --source FILES --output data/NAME

`fedcodist prepare NAME --help` lists the options. The card, datasets/NAME/README.md in the project, says
where to get the files, what their licence is and what is done to them. Nothing is downloaded.
`python -m fedcodist.commands.prepare NAME` and `python datasets/NAME/prepare.py` are the same.
"""

import importlib
import sys
from collections.abc import Sequence

from fedcodist.config.command_line import Parser

# name -> what it is; each has a module here.
DATA_SETS = {
    "ade": "the ADE corpus: sentences of medical reports with and without adverse drug effects",
    "c4_mod": "C4: unlabelled text of the web in the vocabulary of another prepared text",
    "cifar10": "CIFAR-10: images of 10 classes",
    "cifar100": "CIFAR-100: images of 100 classes, dealt to 500 clients by Pachinko allocation",
    "emnist": "EMNIST's letters: images by writer",
    "imagenet32": "ImageNet at 32x32 pixels: unlabelled images",
    "mind": "MIND: news and who read them",
    "mnist": "MNIST: images of handwritten digits",
    "python_source": "Python's standard library: prose and code, no download",
    "stackexchange": "sites of Stack Exchange: questions and answers by user",
    "stackoverflow": "Stack Overflow: questions and answers by user, as TensorFlow Federated has them",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{__doc__}\n" + "\n".join(f"    {n:14} {what}" for n, what in DATA_SETS.items()))
        return 0
    name, *of_data_set = arguments
    parser = Parser(add_help=False)
    if name not in DATA_SETS:
        parser.error(f"a data set is one of {', '.join(DATA_SETS)}, got {name!r}")
    return importlib.import_module(f"{__name__}.{name}").main(of_data_set)
