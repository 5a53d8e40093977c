"""Networks of the reproduced papers and the layers they are made of."""

from fedcodist.models.cnn import CNN, large_cnn, small_cnn
from fedcodist.models.convolution import conv3x3, max_pool_2x2
from fedcodist.models.digits import MLP, BatchNormMLP, large_digits, small_digits
from fedcodist.models.normalization import BatchNorm

__all__ = [
    "CNN",
    "MLP",
    "BatchNorm",
    "BatchNormMLP",
    "conv3x3",
    "large_cnn",
    "large_digits",
    "max_pool_2x2",
    "small_cnn",
    "small_digits",
]
