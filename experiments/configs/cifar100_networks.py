"""The CNNs of Table 1 with dropout, which the codistillation paper does not mention.

The rates are those of FedJAX's only CNN: 0.25 after flattening, 0.5 after the first dense layer. The
paper's experiments may have been built in FedJAX.
"""

from fedcodist.models import cnn

DROPOUT = {"none": (0.0, 0.0), "flat": (0.25, 0.0), "both": (0.25, 0.5)}


def large_flat(num_classes: int) -> cnn.CNN:
    """The large network with dropout after flattening."""
    return cnn.large_cnn(classes=num_classes, dropout=DROPOUT["flat"])


def large_both(num_classes: int) -> cnn.CNN:
    """The large network with dropout in both places."""
    return cnn.large_cnn(classes=num_classes, dropout=DROPOUT["both"])


def large_32_both(num_classes: int) -> cnn.CNN:
    """The large network for images of 32x32, with dropout in both places."""
    return cnn.large_cnn(input_size=32, classes=num_classes, dropout=DROPOUT["both"])


def small_flat(num_classes: int) -> cnn.CNN:
    """The small network with dropout after flattening."""
    return cnn.small_cnn(classes=num_classes, dropout=DROPOUT["flat"])


def small_32_flat(num_classes: int) -> cnn.CNN:
    """The small network for images of 32x32, with dropout after flattening."""
    return cnn.small_cnn(input_size=32, classes=num_classes, dropout=DROPOUT["flat"])


def small_both(num_classes: int) -> cnn.CNN:
    """The small network with dropout in both places."""
    return cnn.small_cnn(classes=num_classes, dropout=DROPOUT["both"])


def network(model: str, dropout: str) -> str:
    """A network's name for configs; `model` is "small" or "large", `dropout` a key of DROPOUT."""
    return f"cnn_{model}" if dropout == "none" else f"{__name__}:{model}_{dropout}"
