"""The work that every program of the comparison does, as plain numbers and NumPy arrays.

One file per workload, written by make_inputs.py, holds images, labels, clients, cohorts and initial
weights, so that all programs compute the same thing.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

COHORT, BATCH = 20, 20
CLIENT_LEARNING_RATE = 0.05
SERVER_LEARNING_RATE, SERVER_BETAS, SERVER_EPSILON = 1e-3, (0.9, 0.999), 1e-5


class Network(NamedTuple):
    """3x3 convolutions and dense layers with ReLU between, linear at the end.

    Attributes:
      image: shape of one example, (height, width, channels) or (features,).
      convolutions: features of each, and whether a 2x2 max-pool follows its ReLU.
      padding: of the convolutions, 'SAME' or 'VALID'.
      hidden: features of the hidden dense layers, which see height x width x channels flattened.
      classes: width of the output.
    """

    image: tuple[int, ...]
    convolutions: tuple[tuple[int, bool], ...]
    padding: str
    hidden: tuple[int, ...]
    classes: int


class Population(NamedTuple):
    """How many clients there are, and between which sizes."""

    clients: int
    smallest: int
    largest: int


NETWORKS = {
    "cnn_small": Network(
        (24, 24, 3), ((16, True), (32, True), (32, False)), "SAME", (64, 128), 100
    ),
    "cnn_large": Network(
        (24, 24, 3), ((32, True), (64, True), (64, False)), "SAME", (128, 256), 100
    ),
    "digits": Network((64,), (), "SAME", (64,), 10),
    "emnist": Network((28, 28, 1), ((32, False), (64, True)), "VALID", (128,), 62),
}
POPULATIONS = {
    "cnn_small": Population(100, 100, 100),
    "cnn_large": Population(100, 100, 100),
    "digits": Population(100, 100, 100),
    "emnist": Population(3400, 1, 300),
}


class Inputs(NamedTuple):
    """A workload's data.

    Attributes:
      workload: its name.
      network: the network to train.
      images: float32 [rows, *network.image], normalised.
      labels: int32 [rows].
      offsets: int64 [clients + 1]; client i has rows offsets[i]:offsets[i + 1], in that order.
      cohorts: int32 [rounds, COHORT], the clients of each round, all different.
      weights: 'layer/kernel' ([3, 3, in, out] or [in, out]) and 'layer/bias' -> float32.
    """

    workload: str
    network: Network
    images: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    cohorts: np.ndarray
    weights: dict[str, np.ndarray]

    def rows_of(self, client: int) -> slice:
        """A client's rows."""
        return slice(int(self.offsets[client]), int(self.offsets[client + 1]))


def read_inputs(path: Path, workload: str) -> Inputs:
    """Reads a file of make_inputs.py; ends the program with one line where there is none."""
    if not path.is_file():
        print(f"error: no inputs at {path}: make_inputs.py writes them.", file=sys.stderr)
        raise SystemExit(2)
    with np.load(path) as file:
        arrays = dict(file)
    written = str(arrays.pop("workload"))
    if written != workload:
        print(f"error: {path} is for {written}, not for {workload}.", file=sys.stderr)
        raise SystemExit(2)
    images = arrays.pop("pixels").astype(np.float32)
    images /= 255
    images -= 0.5
    images /= 0.25
    labels, offsets, cohorts = (arrays.pop(name) for name in ("labels", "offsets", "cohorts"))
    return Inputs(workload, NETWORKS[workload], images, labels, offsets, cohorts, arrays)


def weight_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Shapes of a network's weights in the common layout, in the order of its layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    *size, channels = network.image
    for index, (features, pooled) in enumerate(network.convolutions):
        shapes[f"conv{index + 1}/kernel"] = (3, 3, channels, features)
        shapes[f"conv{index + 1}/bias"] = (features,)
        margin = 2 if network.padding == "VALID" else 0
        size = [(length - margin) // (2 if pooled else 1) for length in size]
        channels = features
    width = channels * int(np.prod(size))
    widths = (*network.hidden, network.classes)
    for name, features in zip(dense_layers(network), widths, strict=True):
        shapes[f"{name}/kernel"] = (width, features)
        shapes[f"{name}/bias"] = (features,)
        width = features
    return shapes


def dense_layers(network: Network) -> list[str]:
    """Names of the dense layers, the output last."""
    return [*(f"dense{index + 1}" for index in range(len(network.hidden))), "output"]
