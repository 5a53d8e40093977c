"""The networks in PyTorch, their weights in the common layout, and how a client trains one."""

import numpy as np
import torch
from peers import workload as work


class Network(torch.nn.Module):
    """A workload's network. Called with [batch, channels, height, width]; returns logits."""

    def __init__(self, network: work.Network):
        super().__init__()
        shapes = work.weight_shapes(network)
        padding = network.padding.lower()
        layers: list[torch.nn.Module] = []
        self.weighted: list[tuple[str, torch.nn.Module, tuple[int, ...]]] = []
        *size, channels = network.image
        for index, (features, pooled) in enumerate(network.convolutions):
            layer = torch.nn.Conv2d(channels, features, 3, padding=padding)
            self.weighted.append((f"conv{index + 1}", layer, ()))
            layers += [layer, torch.nn.ReLU()]
            margin = 2 if padding == "valid" else 0
            size = [length - margin for length in size]
            if pooled:
                layers.append(torch.nn.MaxPool2d(2))
                size = [length // 2 for length in size]
            channels = features
        layers.append(torch.nn.Flatten())
        flattened = (*size, channels) if network.convolutions else ()
        names = work.dense_layers(network)
        for name in names:
            layer = torch.nn.Linear(*shapes[f"{name}/kernel"])
            self.weighted.append((name, layer, flattened if name == names[0] else ()))
            layers.append(layer)
            if name != names[-1]:
                layers.append(torch.nn.ReLU())
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, images):
        return self.layers(images)


def load_weights(network: Network, weights: dict[str, np.ndarray]) -> None:
    """Copies weights in the common layout into a network."""
    with torch.no_grad():
        for name, layer, flattened in network.weighted:
            kernel = weights[f"{name}/kernel"]
            if kernel.ndim == 4:
                kernel = kernel.transpose(3, 2, 0, 1)
            else:
                if flattened:
                    kernel = kernel.reshape(*flattened, -1).transpose(2, 0, 1, 3)
                    kernel = kernel.reshape(-1, kernel.shape[-1])
                kernel = kernel.T
            layer.weight.copy_(torch.tensor(kernel))
            layer.bias.copy_(torch.tensor(weights[f"{name}/bias"]))


def common_weights(network: Network) -> dict[str, np.ndarray]:
    """A network's weights in the common layout."""
    weights = {}
    for name, layer, flattened in network.weighted:
        kernel = layer.weight.detach().numpy()
        if kernel.ndim == 4:
            kernel = kernel.transpose(2, 3, 1, 0)
        else:
            kernel = kernel.T
            if flattened:
                height, width, channels = flattened
                kernel = kernel.reshape(channels, height, width, -1).transpose(1, 2, 0, 3)
                kernel = kernel.reshape(-1, kernel.shape[-1])
        weights[f"{name}/kernel"] = np.array(kernel)
        weights[f"{name}/bias"] = np.array(layer.bias.detach().numpy())
    return weights


def client_tensors(inputs: work.Inputs, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's images, channels first, and labels."""
    rows = inputs.rows_of(client)
    images = torch.from_numpy(inputs.images[rows])
    if inputs.network.convolutions:
        images = images.permute(0, 3, 1, 2).contiguous()
    return images, torch.from_numpy(inputs.labels[rows]).long()


def train_client(network, images, labels) -> None:
    """One epoch of mini-batch SGD in the order of the rows."""
    optimizer = torch.optim.SGD(network.parameters(), work.CLIENT_LEARNING_RATE)
    for batch in zip(images.split(work.BATCH), labels.split(work.BATCH), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(batch[0]), batch[1]).backward()
        optimizer.step()
