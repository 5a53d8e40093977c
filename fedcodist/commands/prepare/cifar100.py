"""Prepares CIFAR-100 for federated distillation.

    fedcodist prepare cifar100 --source PATH --output data/cifar100

The data set's card is datasets/cifar100/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedcodist.config.command_line import Parser
from fedcodist.data.client_pools import split_clients
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.partition import pachinko
from fedcodist.data.tff import from_sqlite
from fedcodist.datasets import cifar, preparation

ORIGIN = "CIFAR-100, https://www.cs.toronto.edu/~kriz/cifar.html"
# TFF publishes no checksum of its file; these are FedJAX's (fedjax/datasets/cifar100.py).
TFF_FILE = "cifar100.sqlite.lzma"
TFF_BYTES = 153_019_920
TFF_SHA256 = "23d3916c9caa33395737ee560cc7cb77bbd05fc7b73647ee7be3a7e764172939"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = Parser(
        prog="fedcodist prepare cifar100",
        description="Prepares CIFAR-100 as a folder that fedcodist reads.",
    )
    cifar.add_arguments(
        parser,
        "cifar-100-python.tar.gz, its unpacked folder or that folder's parent; or 'tfds'; or TFF's "
        "cifar100.sqlite or cifar100.sqlite.lzma",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the deal (default: 0)")
    for name, default in (
        ("clients", 500),
        ("examples-per-client", 100),
        ("train-clients", 315),
        ("distillation-clients", 135),
        ("held-out-clients", 50),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    settings = parser.parse_args(arguments)
    return cifar.run_preparation(cifar.CIFAR100, settings, ORIGIN, open_source)


def open_source(arguments: argparse.Namespace, show: preparation.Show) -> preparation.Source:
    """Checks the arguments and the source, and says what the manifest records of both."""
    groups = groups_of(arguments)

    def build(tables: cifar.Tables) -> Mapping[str, FederatedData]:
        return splits_of(dealt(tables["train"], arguments), tables["test"], arguments)

    if arguments.source == "tfds":
        opened = cifar.tfds_source(cifar.CIFAR100, "cifar100", arguments, build)
    elif arguments.source.endswith((".sqlite", ".sqlite.lzma")):
        opened = tff_source(arguments, show)
    else:
        opened = cifar.file_source(cifar.CIFAR100, arguments, show, build)
    dealing = {
        "seed": arguments.seed,
        "clients": arguments.clients,
        "examples_per_client": arguments.examples_per_client,
        "split_clients": groups,
    }
    return opened._replace(arguments={**opened.arguments, **dealing})


def groups_of(arguments: argparse.Namespace) -> dict[str, int]:
    """Split -> number of clients. Raises ValueError for numbers that do not fit together."""
    groups = {
        "train": arguments.train_clients,
        "distillation": arguments.distillation_clients,
        "held_out": arguments.held_out_clients,
    }
    if arguments.seed < 0:
        raise ValueError(f"--seed must not be negative, got {arguments.seed}")
    for name, low in (
        ("clients", 1),
        ("examples_per_client", 1),
        ("train_clients", 1),
        ("distillation_clients", 0),
        ("held_out_clients", 0),
    ):
        if getattr(arguments, name) < low:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} must be at least {low}, got {getattr(arguments, name)}")
    if sum(groups.values()) != arguments.clients:
        raise ValueError(
            "--train-clients, --distillation-clients and --held-out-clients must sum to "
            f"--clients {arguments.clients}, got {' + '.join(map(str, groups.values()))}"
        )
    return groups


def tff_source(arguments: argparse.Namespace, show: preparation.Show) -> preparation.Source:
    """TFF's own clients; its test clients become one.

    The compressed file has a known checksum. For the database in it, only the numbers of images are
    known.
    """
    path = Path(arguments.source)
    features = {
        "image": (np.uint8, cifar.IMAGE_SHAPE),
        "label": (np.int32, ()),
        "coarse_label": (np.int32, ()),
    }
    preparation.check_is_file(path)
    show(path.name, 0.0)
    sha256 = preparation.file_checksum(path, "sha256")
    difference = None
    unverified = arguments.accept_unverified
    if path.name.endswith(".lzma"):
        difference = tff_difference(path, sha256)
        unverified = difference is not None
    if difference and not arguments.accept_unverified:
        raise ValueError(f"{difference}; --accept-unverified reads it all the same")

    def build(show: preparation.Show) -> Mapping[str, FederatedData]:
        tables = {}
        for split, fraction in (("train", 0.0), ("test", 0.8)):
            show(f"reading {split} of {path.name}", fraction)
            data = from_sqlite(path, split, features)
            if split == "train":
                check_clients(path, data, arguments)
                train = data
            tables[split] = cifar.checked_columns(
                cifar.CIFAR100, split, data.all_examples(), unverified
            )
        clients = FederatedData(tables["train"], train.offsets, train.client_ids)
        return splits_of(clients, tables["test"], arguments)

    recorded = {"source": "tff", "sha256": sha256, "unverified": unverified}
    notices: tuple[str, ...] = (f"UNVERIFIED: {difference}",) if difference else ()
    if unverified:
        notices += cifar.unchecked_notices(arguments)
    return preparation.Source(recorded, build, notices)


def tff_difference(path: Path, sha256: str) -> str | None:
    """How a compressed file differs from TFF's; None if it is the same."""
    size = path.stat().st_size
    if size != TFF_BYTES:
        return f"{path} has {size:,} bytes, TFF's {TFF_FILE} {TFF_BYTES:,}"
    if sha256 != TFF_SHA256:
        return f"{path} has sha256 {sha256}, TFF's {TFF_FILE} {TFF_SHA256}"
    return None


def check_clients(path: Path, data: FederatedData, arguments: argparse.Namespace) -> None:
    """Raises ValueError unless there are as many clients, all of the size, as arguments say."""
    if data.num_clients != arguments.clients:
        raise ValueError(
            f"{path} has {data.num_clients} clients, --clients says {arguments.clients}"
        )
    sizes = np.unique(data.client_sizes).tolist()
    if sizes != [arguments.examples_per_client]:
        raise ValueError(
            f"{path} has clients of {', '.join(map(str, sizes))} examples, "
            f"--examples-per-client says {arguments.examples_per_client}"
        )


def dealt(table: Mapping[str, np.ndarray], arguments: argparse.Namespace) -> FederatedData:
    """Deals training images to clients by Pachinko allocation, with TFF's concentrations."""
    deal_seed, _ = seeds(arguments)
    partition = pachinko(
        table["label"],
        table["coarse_label"],
        arguments.clients,
        arguments.examples_per_client,
        deal_seed,
        root_concentration=0.1,
        leaf_concentration=10.0,
    )
    return FederatedData.from_arrays(table, partition=partition)


def splits_of(
    clients: FederatedData, test: Mapping[str, np.ndarray], arguments: argparse.Namespace
) -> dict[str, FederatedData]:
    """Whole clients go to one split each; the clients of `distillation` lose their labels.

    Splits that would have no clients are left out.
    """
    _, split_seed = seeds(arguments)
    counts = {name: count for name, count in groups_of(arguments).items() if count}
    groups = split_clients(clients.num_clients, counts, split_seed)
    splits = {name: clients.select(indices) for name, indices in groups.items()}
    if "distillation" in splits:
        splits["distillation"] = splits["distillation"].keep("image")
    splits["test"] = FederatedData.of_one_client(test, "test")
    return splits


def seeds(arguments: argparse.Namespace) -> list[int]:
    # With one seed for both draws, images would be dealt and clients chosen by the same permutation.
    return np.random.SeedSequence(arguments.seed).generate_state(2).tolist()
