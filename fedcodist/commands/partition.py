r"""Shows who has which examples, before anything is trained.

    fedcodist partition digits_methods --plot partition.png --config.data.concentration=0.3

Prints the sizes of a config's clients and how many labels they have. `--plot` also draws clients by
labels, for a paper (`fc.plot_partition`).

    --plot FILE    the picture; .png, .pdf, .svg or another ending that matplotlib knows
    --kind KIND    "bubbles" (by default), or "bars" for at most 20 labels
    --column NAME  the column of labels; "label" by default
    --split NAME   the split whose clients are shown; "train" by default
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags
from ml_collections import ConfigDict, config_flags

from fedcodist.config import command_line
from fedcodist.data.federated_data import FederatedData
from fedcodist.report.partition_plot import KINDS, label_counts, plot_partition

LABEL = "label"


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = command_line.Parser(
        prog="fedcodist partition",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="FILE or FILE:RUN")
    parser.add_argument("--plot", type=Path, help="write the picture here")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--column", help=f"column of labels (default: {LABEL})")
    parser.add_argument("--split", default="train", help="whose clients (default: train)")
    options, settings = parser.parse_known_args(arguments)
    values = flags.FlagValues()
    of_config = [parser.prog, f"--config={options.config}", *settings]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=of_config)
    try:
        command_line.parse(of_config, values, required=("config",))
        data = _split(values.config, options.split)
        print(_description(data, options.column))
        if options.plot is not None:
            options.plot.parent.mkdir(parents=True, exist_ok=True)
            plot_partition(data, options.plot, options.column or LABEL, options.kind)
            print(f"wrote {options.plot}")
    except command_line.PARSE_ERRORS as error:
        return command_line.refuse(error)
    return 0


def _split(config: ConfigDict, split: str) -> FederatedData:
    from fedcodist.config.data import load_data
    from fedcodist.config.division import divided

    if "data" not in config:
        raise ValueError("the config lacks 'data'.")
    splits = load_data(divided(config).data).splits
    if split not in splits:
        raise ValueError(f"--split must be one of {sorted(splits)}, got {split!r}.")
    return splits[split]


def _description(data: FederatedData, column: str | None) -> str:
    """Clients, examples and, where there is such a column, labels; a line each.

    Raises:
      ValueError: the column was named, and does not exist.
    """
    lines = [
        f"clients              {data.num_clients:,}",
        f"examples             {data.num_examples:,}",
        f"examples per client  {_range(data.client_sizes)}",
    ]
    if column not in (None, *data.columns):
        raise ValueError(f"--column must be one of {sorted(data.columns)}, got {column!r}.")
    # A column of that name may hold something else, such as a label for each candidate or a number.
    label = data.columns.get(LABEL)
    if column is not None or (label is not None and label.ndim == 1 and label.dtype.kind in "biu"):
        labels, counts = label_counts(data, column or LABEL)
        lines += [
            f"labels               {len(labels):,}",
            f"labels per client    {_range((counts > 0).sum(axis=1))}",
        ]
    return "\n".join(lines)


def _range(values: np.ndarray) -> str:
    return f"{values.min():,} to {values.max():,}, median {np.median(values):,g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
