"""User-level differential privacy in PyTorch (McMahan et al., 2018): clipped updates and noise."""

import torch
from peers import workload as work


def clip(update, bound: float) -> None:
    """Scales an update's tensors in place, so that their norm together is at most the bound."""
    scale = (bound / torch.nn.utils.get_total_norm(update)).clamp(max=1)
    for tensor in update:
        tensor.mul_(scale)


def add_noise(mean, privacy: work.Privacy, clients: int) -> None:
    """Adds Gaussian noise to the mean of the clients' updates, in place."""
    # The multiplier is the sum's.
    deviation = privacy.noise_multiplier * privacy.clip / clients
    for tensor in mean:
        tensor.add_(torch.randn_like(tensor), alpha=deviation)
