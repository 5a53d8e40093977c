"""The networks in PyTorch, their weights in the common layout, and how a client trains one."""

import numpy as np
import torch
from peers import torch_device
from peers import workload as work


def make_network(network: work.AnyNetwork) -> torch.nn.Module:
    """A pool's network. Called with [batch, channels, height, width] or tokens; returns logits.

    Its attribute `weighted` lists (layer's name in the common layout, layer, shape of the array that
    is flattened before it, or ()).
    """
    return kind_of(network)(network).to(torch_device.current())


def kind_of(network: work.AnyNetwork) -> type[torch.nn.Module]:
    """The class of a pool's network."""
    if isinstance(network, work.Network):
        return HeadedNetwork if network.heads else Network
    return {
        work.ResidualNetwork: ResidualNetwork,
        work.PartyNetwork: PartyNetwork,
        work.LanguageNetwork: LanguageNetwork,
    }[type(network)]


class Network(torch.nn.Module):
    """Convolutions and dense layers."""

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


class HeadedNetwork(torch.nn.Module):
    """Convolutions and dense layers with a main head and auxiliary heads."""

    def __init__(self, network: work.Network):
        super().__init__()
        whole = Network(network)
        *layers, self.output = whole.layers
        self.backbone = torch.nn.Sequential(*layers)
        self.heads = network.heads
        self.aux = torch.nn.Linear(self.output.in_features, network.heads * network.classes)
        self.weighted = [*whole.weighted, ("aux", self.aux, ())]

    def main(self, images):
        """The main head's logits alone."""
        return self.output(self.backbone(images))

    def forward(self, images):
        """Logits [batch, 1 + heads, classes] and the embedding."""
        embedding = self.backbone(images)
        aux = self.aux(embedding).unflatten(1, (self.heads, -1))
        return torch.cat([self.output(embedding)[:, None], aux], 1), embedding


class ResidualNetwork(torch.nn.Module):
    """A stem, basic blocks, the mean over the image, a linear output."""

    def __init__(self, network: work.ResidualNetwork):
        super().__init__()
        self.stem = torch.nn.Conv2d(network.image[-1], 16, 3, padding=1, bias=False)
        self.stem_norm = BatchNorm(16)
        self.weighted = [("stem", self.stem, ()), ("stem_norm", self.stem_norm, ())]
        blocks, channels = [], 16
        for stage, features in enumerate((16, 32, 64)):
            for block in range(network.blocks):
                blocks.append(BasicBlock(channels, features))
                name = f"stage{stage + 1}_block{block + 1}"
                self.weighted += [(f"{name}/{n}", m, ()) for n, m in blocks[-1].named_children()]
                channels = features
        self.blocks = torch.nn.Sequential(*blocks)
        self.output = torch.nn.Linear(channels, network.classes)
        self.weighted.append(("output", self.output, ()))

    def forward(self, images):
        x = torch.relu(self.stem_norm(self.stem(images)))
        return self.output(self.blocks(x).mean((2, 3)))


class PartyNetwork(torch.nn.Module):
    """Normalised convolutions with mean pools between, a linear output."""

    def __init__(self, network: work.PartyNetwork):
        super().__init__()
        layers, channels = [], network.image[-1]
        self.weighted: list[tuple[str, torch.nn.Module, tuple[int, ...]]] = []
        shapes = zip(work.party_layers(network), network.widths, strict=True)
        for index, ((size, stride), features) in enumerate(shapes, start=1):
            padding = 1 if stride == 1 else 0
            convolution = torch.nn.Conv2d(channels, features, size, stride, padding)
            norm = BatchNorm(features, *work.PARTY_STATISTICS)
            self.weighted += [(f"conv{index}", convolution, ()), (f"norm{index}", norm, ())]
            layers += [convolution, norm, torch.nn.ReLU()]
            if index == 1:
                # With the last row and column repeated, means are over pixels of the image only.
                layers += [torch.nn.ReplicationPad2d((0, 1, 0, 1)), torch.nn.AvgPool2d(2, 1)]
            elif index == 2 and len(network.widths) == 3:
                layers.append(torch.nn.AvgPool2d(2))
            channels = features
        self.layers = torch.nn.Sequential(*layers, torch.nn.Flatten())
        side = work.party_sizes(network)[-1]
        self.output = torch.nn.Linear(side * side * channels, network.classes, bias=False)
        self.weighted.append(("output", self.output, (side, side, channels)))

    def forward(self, images):
        return self.output(self.layers(images))


class LanguageNetwork(torch.nn.Module):
    """Predicts the token after each of tokens [batch, positions]: logits [batch, positions, tokens]."""

    def __init__(self, network: work.LanguageNetwork):
        super().__init__()
        vocabulary, width, hidden, layers = network
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.weighted = [("embedding", self.embedding, ())]
        blocks = []
        for index in range(1, layers + 1):
            blocks.append(
                torch.nn.ModuleList([LSTM(width, hidden), torch.nn.Linear(hidden, width)])
            )
            lstm, projection = blocks[-1]
            self.weighted += [(f"lstm{index}", lstm, ()), (f"projection{index}", projection, ())]
        self.blocks = torch.nn.ModuleList(blocks)
        self.output = torch.nn.Linear(width, vocabulary)
        self.weighted.append(("output", self.output, ()))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for lstm, projection in self.blocks:
            x = projection(torch.tanh(lstm(x)[0]))
        return self.output(x)


class LSTM(torch.nn.LSTM):
    """A layer with one bias that is trained; PyTorch's second one adds 1 to the forget gate."""

    def __init__(self, features: int, hidden: int):
        super().__init__(features, hidden, batch_first=True)
        added = torch.nn.init.zeros_(self.bias_hh_l0).requires_grad_(False)
        added[hidden : 2 * hidden] = 1


class BasicBlock(torch.nn.Module):
    """Two normalised 3x3 convolutions added to a shortcut; halves the image where it widens."""

    def __init__(self, channels: int, features: int):
        super().__init__()
        stride = 1 if channels == features else 2
        self.conv1 = torch.nn.Conv2d(channels, features, 3, stride, padding=1, bias=False)
        self.norm1 = BatchNorm(features)
        self.conv2 = torch.nn.Conv2d(features, features, 3, padding=1, bias=False)
        self.norm2 = BatchNorm(features)
        self.widens = channels != features
        if self.widens:
            self.shortcut = torch.nn.Conv2d(channels, features, 1, stride, bias=False)
            self.shortcut_norm = BatchNorm(features)

    def forward(self, x):
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return torch.relu(y + (self.shortcut_norm(self.shortcut(x)) if self.widens else x))


class BatchNorm(torch.nn.BatchNorm2d):
    """Keeps a running mean of biased variances; PyTorch's own layer keeps unbiased ones."""

    def __init__(
        self,
        features: int,
        momentum: float = work.STATISTICS_MOMENTUM,
        epsilon: float = work.STATISTICS_EPSILON,
    ):
        super().__init__(features, epsilon, 1 - momentum)  # PyTorch weights the new value

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        old = (1 - self.momentum) * self.running_var
        y = super().forward(x)
        values = x.numel() // x.shape[1]
        # Not in place, since the backward pass checks that its inputs have not changed.
        self.running_var = old + (self.running_var - old) * ((values - 1) / values)
        return y


def load_weights(network: torch.nn.Module, weights: dict[str, np.ndarray]) -> None:
    """Copies weights in the common layout into a network."""
    with torch.no_grad():
        for name, layer, flattened in network.weighted:
            for leaf, tensor in _leaves(layer).items():
                value = weights[f"{name}/{leaf}"]
                if leaf == "kernel":
                    value = kernel_to_torch(value, flattened)
                if isinstance(layer, LSTM):
                    value = _other_gates(value).T
                tensor.copy_(torch.tensor(value))


def common_weights(network: torch.nn.Module) -> dict[str, np.ndarray]:
    """A network's weights in the common layout."""
    weights = {}
    for name, layer, flattened in network.weighted:
        for leaf, tensor in _leaves(layer).items():
            value = tensor.detach().cpu().numpy()
            if leaf == "kernel":
                value = kernel_from_torch(value, flattened)
            if isinstance(layer, LSTM):
                value = _other_gates(value.T)
            weights[f"{name}/{leaf}"] = np.array(value)
    return weights


def client_tensors(inputs: work.Inputs, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's images, channels first, and labels."""
    rows = inputs.rows_of(client)
    return image_tensor(inputs.images[rows]), torch_device.tensor(inputs.labels[rows]).long()


def image_tensor(images: np.ndarray) -> torch.Tensor:
    """Images with channels first; features and tokens stay as they are."""
    tensor = torch_device.tensor(images)
    return tensor.permute(0, 3, 1, 2).contiguous() if tensor.ndim == 4 else tensor


def train_client(network, images, labels) -> None:
    """One epoch of mini-batch SGD in the order of the rows."""
    optimizer = torch.optim.SGD(network.parameters(), work.CLIENT_LEARNING_RATE)
    for batch in zip(images.split(work.BATCH), labels.split(work.BATCH), strict=True):
        optimizer.zero_grad()
        loss(network(batch[0]), batch[1]).backward()
        optimizer.step()


def loss(logits, labels) -> torch.Tensor:
    """Mean cross-entropy over examples; for a sentence the sum over tokens / EXPECTED_LENGTH."""
    if labels.ndim == 1:
        return torch.nn.functional.cross_entropy(logits, labels)
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=work.PADDING, reduction="sum"
    )
    return total / (len(labels) * work.EXPECTED_LENGTH)


def _leaves(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(layer, BatchNorm):
        statistics = {"mean": layer.running_mean, "var": layer.running_var}
        return {"scale": layer.weight, "bias": layer.bias, **statistics}
    if isinstance(layer, LSTM):
        kernels = {"input_kernel": layer.weight_ih_l0, "hidden_kernel": layer.weight_hh_l0}
        return {**kernels, "bias": layer.bias_ih_l0}
    if isinstance(layer, torch.nn.Embedding):
        return {"vectors": layer.weight}
    return {"kernel": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias})


def kernel_to_torch(kernel: np.ndarray, flattened: tuple[int, ...]) -> np.ndarray:
    """A common kernel in PyTorch's layout; `flattened` is the shape flattened before it, or ()."""
    if kernel.ndim == 4:
        return kernel.transpose(3, 2, 0, 1)
    if flattened:
        kernel = kernel.reshape(*flattened, -1).transpose(2, 0, 1, 3)
        kernel = kernel.reshape(-1, kernel.shape[-1])
    return kernel.T


def kernel_from_torch(kernel: np.ndarray, flattened: tuple[int, ...]) -> np.ndarray:
    """The inverse of `kernel_to_torch`."""
    if kernel.ndim == 4:
        return kernel.transpose(2, 3, 1, 0)
    kernel = kernel.T
    if flattened:
        height, width, channels = flattened
        kernel = kernel.reshape(channels, height, width, -1).transpose(1, 2, 0, 3)
        kernel = kernel.reshape(-1, kernel.shape[-1])
    return kernel


def _other_gates(value: np.ndarray) -> np.ndarray:
    """Swaps the gates candidate and forget, whose order differs in PyTorch; its own inverse."""
    first, second, third, last = np.split(value, 4, axis=-1)
    return np.concatenate([first, third, second, last], axis=-1)
