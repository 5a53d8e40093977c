"""Prepares ImageNet at 32x32 pixels, as unlabelled images.

    fedcodist prepare imagenet32 --source PATH --output data/imagenet32

The data set's card is datasets/imagenet32/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedcodist.config.command_line import Parser
from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets import imagenet32, preparation

ORIGIN = "Downsampled ImageNet 32x32, https://image-net.org/download-images"
LICENCE = "ImageNet's terms of access: research and education that are not commercial"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = Parser(
        prog="fedcodist prepare imagenet32",
        description="Prepares ImageNet 32x32 as a folder that fedcodist reads.",
    )
    parser.add_argument(
        "--source",
        required=True,
        help="Imagenet32_train.zip, Imagenet32_train_npz.zip, or a folder with their files",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--images", type=int, help="random images to keep (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: 0)")
    parser.add_argument(
        "--accept-unverified",
        action="store_true",
        help="accept files other than the official ones, and say so in the manifest",
    )
    settings = parser.parse_args(arguments)
    if settings.seed < 0:
        return preparation.refuse(ValueError(f"--seed must not be negative, got {settings.seed}"))
    if settings.images is not None and not 10 <= settings.images <= imagenet32.MOST_DRAWN:
        allowed = f"between 10 and {imagenet32.MOST_DRAWN:,}, nearly as many of each file"
        return preparation.refuse(
            ValueError(f"--images must be {allowed}, got {settings.images:,}")
        )
    return preparation.run(
        settings.output,
        lambda show: open_source(settings, show),
        data_set="ImageNet 32x32",
        source=ORIGIN,
        licence=LICENCE,
    )


def open_source(arguments: argparse.Namespace, show: preparation.Show) -> preparation.Source:
    """Checks the files, and says what the manifest records of them."""
    batches = imagenet32.open_batches(arguments.source, arguments.accept_unverified, show)

    def build(show: preparation.Show) -> Mapping[str, FederatedData]:
        columns = imagenet32.read_batches(batches, arguments.images, arguments.seed, show)
        return {"train": FederatedData.of_one_client(columns, "train")}

    recorded = {
        "source": "official files",
        "md5": dict(batches.md5s),
        "images": arguments.images,
        "seed": arguments.seed,
        "unverified": bool(batches.unverified),
    }
    return preparation.Source(
        recorded, build, tuple(f"UNVERIFIED: {line}" for line in batches.unverified)
    )
