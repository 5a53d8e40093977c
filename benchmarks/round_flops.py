"""FLOPs that a workload's round needs, from the shapes of its networks' weights.

The multiplications and additions of matrix products and direct convolutions are counted, as in
fedcodist/report/flops.py: learning from an example costs three forward passes. Padding is not counted,
nor is work that one program avoids. A sentence is counted with its mean number of tokens.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from peers import workload as work

LEARNING = 3  # forward passes


def flops_of_round(workload: str, inputs: Path, rounds: int) -> float:
    """The mean of the first rounds of a file of make_inputs.py."""
    networks, distillation = (
        work.WORKLOADS[workload].networks,
        work.WORKLOADS[workload].distillation,
    )
    total = distillation_flops(distillation, list(networks.values()))
    if distillation is not None and distillation.method == "mhd":
        return total
    with np.load(inputs) as file:
        sizes = np.diff(file["offsets"])
        for pool, network in networks.items():
            if pool == work.MEME:  # all clients train it
                total += LEARNING * forward_flops(network) * sizes.sum()
                continue
            cohorts = file[f"{pool}/cohorts"]
            drawn = cohorts[np.arange(rounds) % len(cohorts)]
            total += LEARNING * forward_flops(network) * sizes[drawn].sum() / rounds
    return float(total)


def distillation_flops(
    distillation: work.Distillation | None, networks: Sequence[work.AnyNetwork]
) -> float:
    """FLOPs besides training on a cohort's examples; for MHD all FLOPs of clients."""
    forward = [forward_flops(network) for network in networks]
    images = distillation.steps * work.DISTILLATION_BATCH if distillation else 0
    match distillation and distillation.method:
        case "merged" | "periodic" | "fed_md":  # all predict every image once and learn from it
            return images * (1 + LEARNING) * sum(forward)
        case "fed_sdd":  # all teach the first
            return images * (sum(forward) + LEARNING * forward[0])
        case "mhd":  # the main head from private images, all from public ones, one teacher
            alone = sum(forward_flops(network._replace(heads=0)) for network in networks)
            batch = distillation.steps * work.MHD_BATCH
            return batch * (LEARNING * (alone + sum(forward)) + sum(forward))
    return 0.0


def forward_flops(network: work.AnyNetwork) -> float:
    """FLOPs of one example's forward pass."""
    return sum(
        2 * math.prod(shape) * positions(network, name)
        for name, shape in work.weight_shapes(network).items()
        if name.endswith("kernel")
    )


def positions(network: work.AnyNetwork, weight: str) -> float:
    """How often a kernel is applied to one example: pixels of a convolution's output, or tokens."""
    layer = weight.split("/")[-2]
    if isinstance(network, work.LanguageNetwork):
        return work.EXPECTED_LENGTH
    if isinstance(network, work.ResidualNetwork):
        if layer == "output":
            return 1
        stage = 1 if layer == "stem" else int(weight[len("stage")])
        height, width, _ = network.image
        return (height // 2 ** (stage - 1)) * (width // 2 ** (stage - 1))
    if isinstance(network, work.HtFLNetwork):
        return _htfl_positions(network, weight)
    if not layer.startswith("conv"):
        return 1
    index = int(layer.removeprefix("conv")) - 1
    if isinstance(network, work.PartyNetwork):
        return work.party_sizes(network)[index] ** 2
    height, width, _ = network.image
    margin = 2 if network.padding == "VALID" else 0
    for _, pooled in network.convolutions[:index]:
        height, width = ((side - margin) // (2 if pooled else 1) for side in (height, width))
    return (height - margin) * (width - margin)


def _htfl_positions(network: work.HtFLNetwork, weight: str) -> int:
    if network.kind == "cnn":
        return {"conv1": 28, "conv2": 10}.get(weight.split("/")[0], 1) ** 2
    if weight.startswith("head"):
        return 1
    if weight.startswith("stem"):
        return 16 * 16
    return (8 // 2 ** (int(weight[len("stage")]) - 1)) ** 2
