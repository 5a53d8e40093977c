"""The work that all compared programs do, as plain numbers and NumPy arrays.

One file per workload, written by make_inputs.py, has images or sentences, clients, cohorts and initial
weights, so that all programs compute the same.

For text, FedJAX runs its own Stack Overflow model, which is the same function of the same weights as the
networks here and in this library. PyTorch's LSTM has another order of gates, does not add 1 to the
forget gate's bias, and has a second bias. This second bias adds the 1 and is not trained. All programs
divide the sum of a sentence's token losses by EXPECTED_LENGTH and take the mean over sentences.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

POOL = "clients"  # the name of the pool in workloads with only one
BATCH = 20
CLIENT_LEARNING_RATE = 0.05
SERVER_LEARNING_RATE, SERVER_BETAS, SERVER_EPSILON = 1e-3, (0.9, 0.999), 1e-5
UNLABELLED, DISTILLATION_BATCH = 5000, 128
# Of codistillation, as in its paper; alpha is the share of the clients' pseudo-gradient.
STUDENT_LEARNING_RATE, STUDENT_EPSILON, INTERPOLATION, ALPHA = 1e-3, 1e-5, 0.05, 0.7
# Of FedSDD: the main model's learning rate and the temperature of teacher and student.
TEACHING_RATE, TEACHING_TEMPERATURE = 0.1, 4.0
# Of FedMD: its two optimizers, the output layer's penalty, public images of a step and of an answer.
PARTY_RATE, PARTY_EPSILON, OUTPUT_PENALTY = 1e-3, 1e-7, 1e-3
DIGEST_BATCH, ANSWER_BATCH = DISTILLATION_BATCH, 500
# Of MHD: every client's SGD and batches, weights of its losses, and the rounds of the whole run that
# pools and the learning rate's cosine are for.
MHD_RATE, MHD_MOMENTUM, MHD_BATCH = 0.03, 0.9, 64
EMBEDDING_WEIGHT, HEAD_WEIGHT, MHD_ROUNDS = 1.0, 3.0, 20
# Of FedKD: Adam's learning rates, in the paper's ratio; the energy threshold, which rises from the first
# to the last of the whole run's rounds.
FED_KD_TEACHER_RATE, FED_KD_STUDENT_RATE = 1e-3, 2.5e-3
FED_KD_THRESHOLDS, FED_KD_ROUNDS = (0.95, 0.98), 8
TEACHER, STUDENT = "teacher", "student"  # its networks
# Of HtFLlib's methods: SGD's rate, examples of a step, features before the head, FML's share of the
# labels in each loss, the weight of FD's and FedProto's distances, and the rounds whose order of
# examples all programs know.
PIXEL_MEAN, PIXEL_DEVIATION = 0.5, 0.25
HTFL_RATE, HTFL_BATCH, HTFL_EMBEDDING = 0.01, 10, 512
HTFL_LABELS, HTFL_WEIGHT, HTFL_ORDERS = 0.5, 1.0, 2
HTFL_METHODS = ("local_only", "fd", "fml", "lg_fed_avg", "fed_proto", "fed_kd_parties")
MEME = "meme"  # FML's shared network, and FedKD's student
WITH_MEME = ("fml", "fed_kd_parties")
HTFL_ROUNDS = 20  # over which the ranks of FedKD's SVD grow
HTFL_ENERGY = (0.95, 0.98)  # of FedKD's SVD, at the start and at the end
PARTY_STATISTICS = (0.99, 1e-3)  # momentum and epsilon of batch normalisation, Keras'
# Of batch statistics: the old running average's share, and what is added to variances.
STATISTICS_MOMENTUM, STATISTICS_EPSILON = 0.9, 1e-5
# Of text: FedJAX's tokens and length of sentences, and Stack Overflow's mean of tokens to predict.
PADDING, BEGINNING, END, FIRST_WORD, POSITIONS, EXPECTED_LENGTH = 0, 1, 2, 3, 20, 13.3


class Network(NamedTuple):
    """3x3 convolutions and dense layers with ReLU between, linear at the end.

    Attributes:
      image: shape of one example, (height, width, channels) or (features,).
      convolutions: features of each, and whether a 2x2 max-pool follows its ReLU.
      padding: of the convolutions, 'SAME' or 'VALID'.
      hidden: features of the hidden dense layers, which see height x width x channels flattened.
      classes: width of the output.
      heads: further outputs beside it, of the same width.
    """

    image: tuple[int, ...]
    convolutions: tuple[tuple[int, bool], ...]
    padding: str
    hidden: tuple[int, ...]
    classes: int
    heads: int = 0


class ResidualNetwork(NamedTuple):
    """ResNet of three stages with 16, 32 and 64 channels, with batch normalisation.

    Shortcuts between different shapes are normalised 1x1 convolutions; no convolution has a bias.

    Attributes:
      image: shape of one example, (height, width, channels).
      blocks: of each stage, two 3x3 convolutions in each.
      classes: width of the output.
    """

    image: tuple[int, ...]
    blocks: int
    classes: int


class PartyNetwork(NamedTuple):
    """FedMD's networks of two or three convolutions with batch normalisation and ReLU, no dropout.

    3x3, mean of 2x2 at stride 1 (of the pixels that exist); with two widths 3x3 at stride 2; with three
    2x2 at stride 2, mean of 2x2 at stride 2, 3x3 at stride 2. Whole windows only at stride 2. A linear
    output without bias.

    Attributes:
      image: shape of one example, (height, width, channels).
      widths: features of the convolutions.
      classes: width of the output.
    """

    image: tuple[int, ...]
    widths: tuple[int, ...]
    classes: int


class HtFLNetwork(NamedTuple):
    """HtFLlib's networks of 32x32 images, of whose features 512 are made by adaptive means, and a head.

    'cnn' has two 5x5 convolutions without padding, each with ReLU and a 2x2 max-pool, and a dense layer.
    The others have a normalised 7x7 stem and a 3x3 max-pool at stride 2 each, and one, two or three
    stages of one basic block, with 64, 128 and 256 channels.

    Attributes:
      image: shape of one example, (32, 32, channels).
      kind: 'cnn', 'resnet4', 'resnet6' or 'resnet8'.
      classes: width of the head.
    """

    image: tuple[int, ...]
    kind: str
    classes: int


class LanguageNetwork(NamedTuple):
    """Embedding, layers of LSTM, tanh and a linear map back to the embedding's width, linear output.

    1 is added to the forget gates' bias.

    Attributes:
      vocabulary: tokens, four of which are no words.
      embedding: width of the embedding.
      hidden: width of an LSTM.
      layers: number of LSTMs.
    """

    vocabulary: int
    embedding: int
    hidden: int
    layers: int


class Population(NamedTuple):
    """How many clients a pool has, and between which sizes."""

    clients: int
    smallest: int
    largest: int


AnyNetwork = Network | ResidualNetwork | PartyNetwork | HtFLNetwork | LanguageNetwork


class Distillation(NamedTuple):
    """How pools' models teach each other in every round, and in how many steps.

    'merged' and 'periodic' are the codistillations. In 'fed_sdd' all models teach the first. In 'fed_md'
    each pool is a party, and parties agree on logits. In 'mhd' each pool is a client, which learns from
    the checkpoints of all others. In 'fed_kd' both pools have the same clients, who train their own
    teacher and a student that is sent; it has no steps on unlabelled images. HTFL_METHODS have none
    either: each pool is a client with its own network, and MEME belongs to no client.
    """

    method: str
    steps: int = 0


class Privacy(NamedTuple):
    """User-level differential privacy of a round of federated averaging.

    Each client's update is scaled so that its norm is at most `clip`. All clients have the same weight,
    however many examples they have. The sum of updates gets Gaussian noise.

    Attributes:
      clip: the bound of an update's norm, over all arrays together.
      noise_multiplier: the noise's standard deviation, divided by `clip`.
    """

    clip: float
    noise_multiplier: float


class Workload(NamedTuple):
    """The networks that are trained, and their clients.

    Attributes:
      networks: pool -> the network that its clients train; pools share no clients but FedKD's.
      population: of each pool.
      cohort: clients of each pool in a round.
      distillation: of several pools' models, else None.
      privacy: of federated averaging with one pool, else None.
    """

    networks: Mapping[str, "AnyNetwork"]
    population: Population
    cohort: int = 20
    distillation: Distillation | None = None
    privacy: Privacy | None = None


_EQUAL = Population(100, 100, 100)
_QUARTER = Population(25, 100, 100)  # of each of four pools
_SMALL = Network((24, 24, 3), ((16, True), (32, True), (32, False)), "SAME", (64, 128), 100)
_LARGE = Network((24, 24, 3), ((32, True), (64, True), (64, False)), "SAME", (128, 256), 100)
_BOTH = {"small": _SMALL, "large": _LARGE}
_DIGITS = Network((64,), (), "SAME", (64,), 10)
_EMNIST = Network((28, 28, 1), ((32, False), (64, True)), "VALID", (128,), 62)
_RESNET20 = ResidualNetwork((32, 32, 3), 3, 10)
_FOUR = dict.fromkeys(("main", "model_1", "model_2", "model_3"), _RESNET20)
# The paper's table 1, a quarter as wide.
_PARTIES = {
    f"party_{index}": PartyNetwork((32, 32, 3), tuple(width // 4 for width in widths), 16)
    for index, widths in enumerate(
        (
            *((128, 256), (128, 384), (128, 512), (256, 256), (256, 512)),
            *((64, 128, 256), (64, 128, 192), (128, 192, 256), (128, 128, 128), (128, 128, 192)),
        )
    )
}
# Drawn with a mean of 396 sentences, which users of Stack Overflow have in the codistillation paper's
# pool. Those that are drawn have 448.
_WRITERS = Population(100, 100, 988)
_HEADED_CNN, _HEADED_DIGITS = (network._replace(heads=3) for network in (_SMALL, _DIGITS))
_ONE = Population(1, 100, 100)


def _mhd(network: Network, clients: int) -> Workload:
    """A round is 100 steps."""
    networks = {f"client_{index}": network for index in range(clients)}
    return Workload(networks, _ONE, 1, Distillation("mhd", 100))


def _htfl(method: str) -> Workload:
    """Eight clients with four networks, two each."""
    kinds = ("cnn", "resnet4", "resnet6", "resnet8")
    networks = {
        f"client_{index}": HtFLNetwork((32, 32, 3), kinds[index % 4], 10) for index in range(8)
    }
    if method in WITH_MEME:
        networks[MEME] = networks["client_0"]
    return Workload(networks, _ONE, 1, Distillation(method))


WORKLOADS = {
    "cnn_small": Workload({POOL: _SMALL}, _EQUAL),
    "cnn_large": Workload({POOL: _LARGE}, _EQUAL),
    # The same data as cnn_small's. About half of its updates have a larger norm in the first round.
    "private": Workload({POOL: _SMALL}, _EQUAL, privacy=Privacy(0.3, 1.0)),
    "digits": Workload({POOL: _DIGITS}, _EQUAL),
    "emnist": Workload({POOL: _EMNIST}, Population(3400, 1, 300)),
    "resnet20": Workload({POOL: _RESNET20}, _EQUAL, cohort=8),
    "lstm_small": Workload({POOL: LanguageNetwork(10_004, 96, 70, 1)}, _WRITERS),
    "lstm_large": Workload({POOL: LanguageNetwork(10_004, 192, 140, 2)}, _WRITERS),
    "merged": Workload(_BOTH, _EQUAL, distillation=Distillation("merged", 32)),
    "periodic": Workload(_BOTH, _EQUAL, distillation=Distillation("periodic", 200)),
    "fed_sdd": Workload(_FOUR, _QUARTER, cohort=2, distillation=Distillation("fed_sdd", 8)),
    "fed_md": Workload(_PARTIES, _ONE, 1, Distillation("fed_md", 8)),
    "mhd": _mhd(_HEADED_CNN, 8),
    "mhd_digits": _mhd(_HEADED_DIGITS, 8),
    "mhd_64": _mhd(_HEADED_DIGITS, 64),
    "fed_kd": Workload(
        {TEACHER: _LARGE, STUDENT: _SMALL}, Population(4, 100, 100), 4, Distillation("fed_kd")
    ),
    **{f"htfl_{method}": _htfl(method) for method in HTFL_METHODS},
}


class Pool(NamedTuple):
    """A pool's part of the data.

    Attributes:
      network: the network to train.
      cohorts: int32 [rounds, cohort], the clients of each round, all different.
      weights: 'layer/leaf' -> floats, see `weight_shapes`.
      orders: purpose -> int32, draws for a party; empty for other methods. FedMD: 'digest' and 'revisit'
        are positions of examples in the order of visits. MHD: 'private' and 'public' are positions of
        the batches' examples [steps, MHD_BATCH]; 'drawn' [steps] is the entry of the checkpoint buffer
        that teaches; 'first' [entries] are the clients whose models are the first entries; 'replaced'
        and 'source' have for each round the replaced entry and the client of the new one. HTFL_METHODS:
        'visited' [HTFL_ORDERS, examples] are positions in each of the first rounds.
    """

    network: AnyNetwork
    cohorts: np.ndarray
    weights: dict[str, np.ndarray]
    orders: Mapping[str, np.ndarray] = {}


class Inputs(NamedTuple):
    """A workload's data.

    Attributes:
      workload: its name.
      images: floats [rows, *image], normalised, or bytes where they were asked for; of text, tokens
        int32 [rows, POSITIONS].
      labels: int32 [rows]; of text, the tokens after those, int32 [rows, POSITIONS].
      offsets: int64 [clients + 1]; client i has rows offsets[i]:offsets[i + 1], in that order.
      pools: name -> Pool.
      unlabelled: floats [UNLABELLED, *image] with steps of distillation, else None.
      unlabelled_rows: int32 [rounds, steps, DISTILLATION_BATCH] with steps of distillation, else None.
      privacy: the workload's; without noise if programs are compared, since each draws its own.
    """

    workload: str
    images: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    pools: dict[str, Pool]
    unlabelled: np.ndarray | None = None
    unlabelled_rows: np.ndarray | None = None
    privacy: Privacy | None = None

    @property
    def pool(self) -> Pool:
        """The only pool."""
        (pool,) = self.pools.values()
        return pool

    def rows_of(self, client: int) -> slice:
        """A client's rows."""
        return slice(int(self.offsets[client]), int(self.offsets[client + 1]))


def read_inputs(path: Path, workload: str, double: bool = False, as_bytes: bool = False) -> Inputs:
    """Reads a file of make_inputs.py; ends the program with one line if there is none.

    Args:
      path: the file.
      workload: the workload for which the file must be.
      double: to compare programs: floats are float64 instead of float32, and privacy has no noise.
      as_bytes: whether clients' pixels remain uint8, for a program that normalises each batch.
    """
    dtype = np.float64 if double else np.float32
    if not path.is_file():
        print(f"error: no inputs at {path}: make_inputs.py writes them.", file=sys.stderr)
        raise SystemExit(2)
    with np.load(path) as file:
        arrays = dict(file)
    written = str(arrays.pop("workload"))
    if written != workload:
        print(f"error: {path} is for {written}, not for {workload}.", file=sys.stderr)
        raise SystemExit(2)
    pools = {}
    for pool, network in WORKLOADS[workload].networks.items():
        names = weight_shapes(network)
        weights = {name: arrays[f"{pool}/{name}"].astype(dtype) for name in names}
        orders = {
            name.removesuffix("_orders"): array[len(pools)]
            for name, array in arrays.items()
            if name.endswith("_orders") and len(pools) < len(array)  # FML's meme has none
        }
        pools[pool] = Pool(network, arrays[f"{pool}/cohorts"], weights, orders)
    if "tokens" in arrays:
        tokens = arrays["tokens"].astype(np.int32)
        images, labels = tokens[:, :-1], tokens[:, 1:]
    else:
        images, labels = arrays["pixels"], arrays["labels"]
        if not as_bytes:
            images = _normalised(images, dtype)
        if workload.startswith("htfl_"):
            # HtFLlib rounds examples to float32. So others do: a difference of 1e-8 can switch a ReLU.
            images = images.astype(np.float32).astype(images.dtype)
    unlabelled, privacy = arrays.get("unlabelled"), WORKLOADS[workload].privacy
    if privacy is not None and double:
        privacy = privacy._replace(noise_multiplier=0.0)
    return Inputs(
        workload,
        images,
        labels,
        arrays["offsets"],
        pools,
        None if unlabelled is None else _normalised(unlabelled, dtype),
        arrays.get("unlabelled_rows"),
        privacy,
    )


def weight_shapes(network: AnyNetwork) -> dict[str, tuple[int, ...]]:
    """Shapes of a network's weights in the common layout, in the order of its layers.

    Names are 'layer/leaf'; the leaves of a convolution or dense layer are 'kernel' ([size, size, in,
    out] or [in, out]) and 'bias', those of batch normalisation 'scale', 'bias', 'mean' and 'var'. All
    further heads are one dense layer 'aux'. An embedding has 'vectors' [tokens, width]; an LSTM has
    'input_kernel', 'hidden_kernel' and 'bias' with the gates side by side: input, candidate, forget,
    output.
    """
    if isinstance(network, ResidualNetwork):
        return _residual_shapes(network)
    if isinstance(network, PartyNetwork):
        return _party_shapes(network)
    if isinstance(network, HtFLNetwork):
        return _htfl_shapes(network)
    if isinstance(network, LanguageNetwork):
        return _language_shapes(network)
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
        previous, width = width, features
    if network.heads:
        shapes["aux/kernel"] = (previous, network.heads * network.classes)
        shapes["aux/bias"] = (network.heads * network.classes,)
    return shapes


def dense_layers(network: Network) -> list[str]:
    """Names of the dense layers, the output last."""
    return [*(f"dense{index + 1}" for index in range(len(network.hidden))), "output"]


def hidden_widths(network: Network) -> dict[str, int]:
    """Layer -> width of what FedKD compares: blocks' means over the image, dense layers before ReLU."""
    features = [features for features, _ in network.convolutions]
    blocks = {f"conv{index}": width for index, width in enumerate(features, start=1)}
    return blocks | dict(zip(dense_layers(network), network.hidden, strict=False))


def _residual_shapes(network: ResidualNetwork) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}

    def add(convolution: str, norm: str, size: int, channels: int, features: int) -> None:
        shapes[f"{convolution}/kernel"] = (size, size, channels, features)
        for leaf in ("scale", "bias", "mean", "var"):
            shapes[f"{norm}/{leaf}"] = (features,)

    channels = 16
    add("stem", "stem_norm", 3, network.image[-1], channels)
    for stage, features in enumerate((16, 32, 64)):
        for block in range(network.blocks):
            name = f"stage{stage + 1}_block{block + 1}"
            add(f"{name}/conv1", f"{name}/norm1", 3, channels, features)
            add(f"{name}/conv2", f"{name}/norm2", 3, features, features)
            if channels != features:
                add(f"{name}/shortcut", f"{name}/shortcut_norm", 1, channels, features)
            channels = features
    shapes["output/kernel"] = (channels, network.classes)
    shapes["output/bias"] = (network.classes,)
    return shapes


def party_layers(network: PartyNetwork) -> list[tuple[int, int]]:
    """Kernel size and stride of each convolution."""
    return [(3, 1), *(((3, 2),) if len(network.widths) == 2 else ((2, 2), (3, 2)))]


def party_sizes(network: PartyNetwork) -> list[int]:
    """Side of the image after each convolution, before the pool behind it."""
    sizes, side = [], network.image[0]
    for index, (size, stride) in enumerate(party_layers(network)):
        side = side if stride == 1 else (side - size) // stride + 1
        sizes.append(side)
        if index == 1 and len(network.widths) == 3:
            side //= 2
    return sizes


def _party_shapes(network: PartyNetwork) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    channels = network.image[-1]
    layers = zip(party_layers(network), network.widths, strict=True)
    for index, ((size, _), features) in enumerate(layers, start=1):
        shapes[f"conv{index}/kernel"] = (size, size, channels, features)
        shapes[f"conv{index}/bias"] = (features,)
        for leaf in ("scale", "bias", "mean", "var"):
            shapes[f"norm{index}/{leaf}"] = (features,)
        channels = features
    shapes["output/kernel"] = (party_sizes(network)[-1] ** 2 * channels, network.classes)
    return shapes


def _htfl_shapes(network: HtFLNetwork) -> dict[str, tuple[int, ...]]:
    """Without batch statistics, which start as zeros and ones and are never compared."""
    shapes: dict[str, tuple[int, ...]] = {}

    def add(convolution: str, norm: str, size: int, channels: int, features: int) -> None:
        shapes[f"{convolution}/kernel"] = (size, size, channels, features)
        shapes.update({f"{norm}/{leaf}": (features,) for leaf in ("scale", "bias")})

    if network.kind == "cnn":
        for index, (channels, features) in enumerate(((network.image[-1], 32), (32, 64)), start=1):
            shapes[f"conv{index}/kernel"] = (5, 5, channels, features)
            shapes[f"conv{index}/bias"] = (features,)
        shapes["dense/kernel"], shapes["dense/bias"] = (5 * 5 * 64, 512), (512,)
    else:
        channels = 64
        add("stem", "stem_norm", 7, network.image[-1], channels)
        for stage in range(htfl_stages(network)):
            name, features = f"stage{stage + 1}_block1", 64 * 2**stage
            add(f"{name}/conv1", f"{name}/norm1", 3, channels, features)
            add(f"{name}/conv2", f"{name}/norm2", 3, features, features)
            if channels != features:
                add(f"{name}/shortcut", f"{name}/shortcut_norm", 1, channels, features)
            channels = features
    shapes["head/kernel"] = (HTFL_EMBEDDING, network.classes)
    shapes["head/bias"] = (network.classes,)
    return shapes


def htfl_stages(network: HtFLNetwork) -> int:
    """Number of stages of a ResNet."""
    return {"resnet4": 1, "resnet6": 2, "resnet8": 3}[network.kind]


def _language_shapes(network: LanguageNetwork) -> dict[str, tuple[int, ...]]:
    vocabulary, width, hidden, layers = network
    shapes: dict[str, tuple[int, ...]] = {"embedding/vectors": (vocabulary, width)}
    for index in range(1, layers + 1):
        shapes[f"lstm{index}/input_kernel"] = (width, 4 * hidden)
        shapes[f"lstm{index}/hidden_kernel"] = (hidden, 4 * hidden)
        shapes[f"lstm{index}/bias"] = (4 * hidden,)
        shapes[f"projection{index}/kernel"] = (hidden, width)
        shapes[f"projection{index}/bias"] = (width,)
    shapes["output/kernel"] = (width, vocabulary)
    shapes["output/bias"] = (vocabulary,)
    return shapes


def _normalised(pixels: np.ndarray, dtype: type) -> np.ndarray:
    images = pixels.astype(dtype)
    images /= 255
    images -= PIXEL_MEAN
    images /= PIXEL_DEVIATION
    return images
