"""Image preprocessing on the device, also where a batch is divided among devices.

Every function takes `positions`, the places of the examples in the whole batch. It draws each example's
randomness from (key, position), so the result does not depend on how a batch is divided.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.metrics import Batch

# (images [batch, height, width, channels], key, positions [batch]) -> images
ImageTransform = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def normalise(
    mean: Sequence[float] | np.ndarray, standard_deviation: Sequence[float], scale: float = 255.0
) -> ImageTransform:
    """(x / scale - mean) / standard deviation, as float32.

    Args:
      mean: a number per channel, or an image of the same shape.
      standard_deviation: a number above 0 per channel.
      scale: the largest value of a pixel, above 0.

    Raises:
      ValueError, TypeError: numbers out of range; when traced, a mean or deviation that does not fit the
        images' shape.
    """
    _check_numbers("mean", mean)
    _check_numbers("standard_deviation", standard_deviation, above=0)
    check_number("scale", scale, above=0)

    def transform(images: jax.Array, key: jax.Array, positions: jax.Array) -> jax.Array:
        for name, values in (("mean", mean), ("standard_deviation", standard_deviation)):
            if not _fits(np.shape(values), images.shape[1:]):
                raise ValueError(
                    f"{name} must have a number for each channel of images {list(images.shape[1:])}, "
                    f"or their shape, got {list(np.shape(values))}"
                )
        scaled = images.astype(jnp.float32) / scale
        return (scaled - jnp.asarray(mean)) / jnp.asarray(standard_deviation)

    return transform


def pad(amount: int) -> ImageTransform:
    """Adds a border of `amount` black pixels to every image, for a random crop afterwards."""
    check_integer("amount", amount, low=0)

    def transform(images: jax.Array, key: jax.Array, positions: jax.Array) -> jax.Array:
        _check_images(images)
        return jnp.pad(images, ((0, 0), (amount, amount), (amount, amount), (0, 0)))

    return transform


def random_crop(height: int, width: int) -> ImageTransform:
    """Cuts a random window of height x width out of each image."""
    _check_window(height, width)

    def transform(images: jax.Array, key: jax.Array, positions: jax.Array) -> jax.Array:
        _check_images(images, height, width)
        _, full_height, full_width, channels = images.shape
        limits = jnp.array([full_height - height + 1, full_width - width + 1])
        offsets = jax.vmap(lambda k: jax.random.randint(k, (2,), 0, limits))(
            _example_keys(key, "crop", positions)
        )

        def crop(image: jax.Array, offset: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(image, (*offset, 0), (height, width, channels))

        return jax.vmap(crop)(images, offsets)

    return transform


def centre_crop(height: int, width: int) -> ImageTransform:
    """Cuts the central window of height x width out of each image."""
    _check_window(height, width)

    def transform(images: jax.Array, key: jax.Array, positions: jax.Array) -> jax.Array:
        _check_images(images, height, width)
        top, left = (images.shape[1] - height) // 2, (images.shape[2] - width) // 2
        return images[:, top : top + height, left : left + width]

    return transform


def random_horizontal_flip(images: jax.Array, key: jax.Array, positions: jax.Array) -> jax.Array:
    """Flips each image left to right with probability one half."""
    _check_images(images)
    return jnp.where(_coin(key, "flip", positions), images[:, :, ::-1], images)


def random_axis_flip(images: jax.Array, key: jax.Array, positions: jax.Array) -> jax.Array:
    """Flips each image with probability one half, along either axis with equal probability.

    This is the "horizontal or vertical flip" of unlabelled images in the codistillation paper (appendix
    C.1).
    """
    _check_images(images)
    axis = _coin(key, "flip axis", positions)
    flipped = jnp.where(axis, images[:, :, ::-1], images[:, ::-1])
    return jnp.where(_coin(key, "flip", positions), flipped, images)


def per_batch(transform: ImageTransform) -> ImageTransform:
    """Draws once for a whole batch instead of once per image, as FedJAX augments CIFAR-100."""
    return lambda images, key, positions: transform(images, key, jnp.zeros_like(positions))


def image_preprocess(*transforms: ImageTransform, image: str = "image") -> Preprocess:
    """Chains image transforms into a batch preprocessor: (batch, key, positions) -> batch."""

    def preprocess(batch: Batch, key: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
        images = batch[image]
        for index, transform in enumerate(transforms):
            images = transform(images, keys.derive(key, index), positions)
        return {**batch, image: images}

    return preprocess


def mixup(inputs: jax.Array, partners: jax.Array, coefficient: jax.Array | float) -> jax.Array:
    """coefficient x inputs + (1 - coefficient) x partners: mixup of the inputs only.

    Zhang et al., 2018, https://arxiv.org/abs/1710.09412.
    """
    return coefficient * inputs + (1 - coefficient) * partners


def mixup_coefficient(key: jax.Array, beta: float) -> jax.Array:
    """Draws one coefficient for a batch from Beta(beta, beta)."""
    return jax.random.beta(key, beta, beta)


def _check_numbers(name: str, values: Any, above: float = -np.inf) -> None:
    if not isinstance(values, jax.core.Tracer):
        for value in np.asarray(values).ravel().tolist():
            check_number(name, value, above=above)


def _check_window(height: int, width: int) -> None:
    check_integer("height", height, low=1)
    check_integer("width", width, low=1)


def _fits(shape: tuple[int, ...], image: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, image) == image
    except ValueError:
        return False


def _check_images(images: jax.Array, height: int = 0, width: int = 0) -> None:
    """Raises ValueError unless images are [batch, height, width, channels], at least of this size."""
    if images.ndim != 4:
        raise ValueError(
            f"images must be [batch, height, width, channels], got {list(images.shape)}."
        )
    if images.shape[1] < height or images.shape[2] < width:
        raise ValueError(
            f"images must be at least {height} x {width} to cut a window of this size, got "
            f"{images.shape[1]} x {images.shape[2]}."
        )


def _example_keys(key: jax.Array, purpose: str, positions: jax.Array) -> jax.Array:
    return jax.vmap(lambda position: keys.derive(key, purpose, position))(positions)


def _coin(key: jax.Array, purpose: str, positions: jax.Array) -> jax.Array:
    flips = jax.vmap(jax.random.bernoulli)(_example_keys(key, purpose, positions))
    return flips[:, None, None, None]
