"""The networks of HtFLlib's groups for images of CIFAR's size: backbones of embeddings of one width.

HtFLlib (Zhang et al., KDD 2025, https://arxiv.org/abs/2506.03954) compares methods whose clients have
different networks. In its code, https://github.com/TsingZ0/HtFLlib at commit e959261, each network's
output layer is replaced by an average pooling of neighbouring features, to 512 features, and a linear
head. The pooling has no parameters; it repeats each of ResNet-4's 64 features eight times. The networks
are those of torchvision, whose stem and pooling leave 8x8 positions of a 32x32 image, and those of
HtFLlib's own files `system/flcore/trainmodel`.

Initial weights are drawn as in this library. HtFLlib's groups with several kinds of heads are left out,
and so is HtM-img-10, which adds two vision transformers to the eight networks of HtFE-img-8.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.checks import check_integer
from fedcodist.models.convolution import max_pool_2x2
from fedcodist.models.correlation import correlate
from fedcodist.models.googlenet import GoogLeNet
from fedcodist.models.mobilenet import MobileNetV2
from fedcodist.models.resnet_imagenet import ImageNetResNet

EMBEDDING_WIDTH = 512  # `feature_dim`


class HtFLCNN(nn.Module):
    """Two 5x5 convolutions without padding, each with ReLU and 2x2 max-pooling, and a dense layer.

    HtFLlib's FedAvgCNN: 32 -> 28 -> 14 -> 10 -> 5. Called with [B, 32, 32, C] floats; returns [B, 512].

    Raises:
      ValueError: for images of another shape.
    """

    filters: tuple[int, int] = (32, 64)
    hidden: int = 512

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if x.ndim != 4 or x.shape[1:3] != (32, 32):
            raise ValueError(f"x must be [B, 32, 32, C], got {x.shape}")
        for index, features in enumerate(self.filters, start=1):
            x = Convolution5x5(features, name=f"conv{index}")(x)
        x = x.reshape(x.shape[0], -1)
        return nn.relu(nn.Dense(self.hidden, name="dense")(x))


class Convolution5x5(nn.Module):
    """A 5x5 convolution without padding, bias, 2x2 max-pooling and ReLU.

    Bias and ReLU keep the order of values, so they come after the pooling, on a quarter of the values.
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (5, 5, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,), jnp.float32)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias)
        return nn.relu(max_pool_2x2(correlate(x, kernel)) + bias)


class WithWidth(nn.Module):
    """A backbone [B, features] and `adaptive_means` of what it returns, [B, width]."""

    backbone: nn.Module
    width: int = EMBEDDING_WIDTH

    def __post_init__(self) -> None:
        check_integer("width", self.width, low=1)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        if isinstance(self.backbone, HtFLCNN):
            return adaptive_means(self.backbone(x), self.width)
        return adaptive_means(self.backbone(x, train=train, mask=mask), self.width)


def adaptive_means(x: jax.Array, width: int) -> jax.Array:
    """Makes [..., width] of [..., features]: means of neighbouring features, or features repeated.

    Output i is the mean of features floor(i F / width) to ceil((i + 1) F / width), as in PyTorch's
    AdaptiveAvgPool1d.

    >>> adaptive_means(jnp.arange(4.0), 2).tolist(), adaptive_means(jnp.arange(2.0), 4).tolist()
    ([0.5, 2.5], [0.0, 0.0, 1.0, 1.0])
    """
    features = x.shape[-1]
    if features == width:
        return x
    index = np.arange(width)
    first, last = index * features // width, -(-(index + 1) * features // width)
    place = np.arange(features)[:, None]
    shares = ((place >= first) & (place < last)) / (last - first)
    return x @ jnp.asarray(shares, x.dtype)


BACKBONES: dict[str, Callable[[], Any]] = {
    "htfl_cnn": HtFLCNN,
    "htfl_googlenet": functools.partial(GoogLeNet, None),
    "htfl_mobilenet_v2": functools.partial(MobileNetV2, None),
    **{
        f"htfl_resnet{layers}": functools.partial(ImageNetResNet, blocks, None, layers >= 50)
        for layers, blocks in {
            4: (1,),
            6: (1, 1),
            8: (1, 1, 1),
            10: (1, 1, 1, 1),
            18: (2, 2, 2, 2),
            34: (3, 4, 6, 3),
            50: (3, 4, 6, 3),
            101: (3, 4, 23, 3),
            152: (3, 8, 36, 3),
        }.items()
    },
}
_RESNETS = tuple(f"htfl_resnet{layers}" for layers in (18, 34, 50, 101, 152))
# HtFLlib's groups HtFE-img-2 to HtFE-img-9: client i has the network i modulo their number.
GROUPS: dict[str, tuple[str, ...]] = {
    "htfe_img_2": ("htfl_cnn", "htfl_resnet18"),
    "htfe_img_3": ("htfl_resnet10", "htfl_resnet18", "htfl_resnet34"),
    "htfe_img_4": ("htfl_cnn", "htfl_googlenet", "htfl_mobilenet_v2", "htfl_resnet18"),
    "htfe_img_5": ("htfl_googlenet", "htfl_mobilenet_v2", *_RESNETS[:3]),
    "htfe_img_8": ("htfl_cnn", "htfl_googlenet", "htfl_mobilenet_v2", *_RESNETS),
    "htfe_img_9": (*(f"htfl_resnet{layers}" for layers in (4, 6, 8, 10)), *_RESNETS),
    # Not one of HtFLlib's groups: networks of its groups that are small enough for a CPU.
    "htfl_small": ("htfl_cnn", "htfl_resnet4", "htfl_resnet6", "htfl_resnet8"),
}


def htfl_backbone(name: str, width: int = EMBEDDING_WIDTH) -> WithWidth:
    """One of BACKBONES for `headed`, with embeddings of a width."""
    return WithWidth(BACKBONES[name](), width)
