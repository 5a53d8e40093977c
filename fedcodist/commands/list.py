"""Names that commands and configs take: configs, methods, networks, data sets.

    fedcodist list [configs | methods | networks | data]

`python -m fedcodist.commands.list` is the same.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence

from fedcodist.config.command_line import Parser

_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parts = {"configs": _configs, "methods": _methods, "networks": _networks, "data": _data_sets}
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=list(parts), help="only one of the lists")
    settings = parser.parse_args(arguments)
    chosen = [settings.part] if settings.part else list(parts)
    print("\n\n".join("\n".join(parts[part]()) for part in chosen))
    return 0


def _configs() -> Iterator[str]:
    from fedcodist.config.config_file import load_config_file, runs_of, shipped_configs

    yield "configs that need no download, with their runs (fedcodist run CONFIG:RUN):"
    for name in shipped_configs():
        module = load_config_file(name)
        title = (module.__doc__ or "").strip().splitlines()[0]
        runs = runs_of(module, name) if hasattr(module, "get_runs") else ["a single run"]
        yield from (f"  {name}", f"      {title}")
        yield from textwrap.wrap(
            "   ".join(runs),
            _WIDTH,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _methods() -> Iterator[str]:
    from fedcodist.config.registry import CLIENTS, ENTRIES

    yield f"methods: `training.method` of kind {CLIENTS}, `algorithm.name` of other kinds:"
    yield from _table(
        [(entry.name, entry.title, entry.kind, entry.paper) for entry in ENTRIES.values()]
    )


def _networks() -> Iterator[str]:
    from fedcodist.config.data_bert import ENCODERS, SMALL_ENCODERS
    from fedcodist.config.data_text import TEXT_MODELS
    from fedcodist.config.networks import MODELS, WITH_EXITS
    from fedcodist.config.party_methods import GROUPS, NETWORKS
    from fedcodist.models.htfl import BACKBONES

    yield "networks: `pools.NAME.model`:"
    rows = [(name, f"images {list(shape)}") for name, (_, shape) in MODELS.items()]
    for name, (_, shape) in WITH_EXITS.items():
        rows.append((name, f"images {list(shape)}, with exits, for depth_fl"))
    rows += [(name, "sentences of words") for name in TEXT_MODELS]
    rows += [(name, "sentences or news of word pieces") for name in ENCODERS]
    rows += [(name, "sentences of word pieces") for name in SMALL_ENCODERS]
    yield from _table(rows)
    yield f"  Parties have one each: `parties.networks` is one of {', '.join(NETWORKS)}, a group of"
    yield f"  networks in turn, {', '.join(GROUPS)}, or a list of"
    yield f"  {', '.join(BACKBONES)}."


def _data_sets() -> Iterator[str]:
    from fedcodist.commands.prepare import DATA_SETS

    yield "data sets: `fedcodist prepare NAME` makes the folder that `data.folder` names:"
    yield from _table(list(DATA_SETS.items()))
    yield "  scikit-learn's digits need no preparation: `data.name` of the configs above says how."


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield ("  " + "  ".join(cells)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
