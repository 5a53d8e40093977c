"""Networks for images from the reproduced papers, and their layers."""

from fedcodist.models.cnn import CNN, large_cnn, small_cnn
from fedcodist.models.convolution import conv3x3, max_pool_2x2
from fedcodist.models.digits import MLP, BatchNormMLP, large_digits, small_digits
from fedcodist.models.emnist import EMNISTCNN, emnist_cnn
from fedcodist.models.fed_md import FedMDNetwork, FullyConnected
from fedcodist.models.normalization import BatchNorm
from fedcodist.models.normalized_cnn import NormalizedCNN
from fedcodist.models.resnet import (
    ResNet,
    WideResNet,
    resnet8,
    resnet20,
    resnet56,
    wide_resnet16_2,
)

__all__ = [
    "CNN",
    "EMNISTCNN",
    "MLP",
    "BatchNorm",
    "BatchNormMLP",
    "FedMDNetwork",
    "FullyConnected",
    "NormalizedCNN",
    "ResNet",
    "WideResNet",
    "conv3x3",
    "emnist_cnn",
    "large_cnn",
    "large_digits",
    "max_pool_2x2",
    "resnet8",
    "resnet20",
    "resnet56",
    "small_cnn",
    "small_digits",
    "wide_resnet16_2",
]
