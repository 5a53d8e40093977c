"""The units of BERT's encoder that Federated Dropout drops, and encoders with a share of them."""

import re
from typing import Any

from fedcodist.core.checks import check_number
from fedcodist.core.trees import named_leaves
from fedcodist.models.submodels import Axis, Units
from fedcodist.text.bert import Encoder

PyTree = Any
# The units along the axes of a layer's arrays; None for the hidden width.
_UNITS: dict[str, tuple[str | None, ...]] = {
    **{f"{name}/kernel": (None, "heads") for name in ("query", "key", "value")},
    **{f"{name}/bias": ("heads",) for name in ("query", "key", "value")},
    "attention_output/kernel": ("heads", None),
    "inner/kernel": (None, "inner"),
    "inner/bias": ("inner",),
    "output/kernel": ("inner", None),
}


def encoder_units(params: PyTree, heads: int) -> Units:
    """The units of an encoder that Federated Dropout drops: attention heads and inner neurons.

    Args:
      params: parameters of a model that contain an encoder's layers, or their shapes.
      heads: attention heads of each layer.

    Raises:
      ValueError: the layers have another number of heads.
    """
    units: dict[str, tuple[Axis | None, ...]] = {}
    for name, leaf in named_leaves(params).items():
        match = re.fullmatch(r"((?:.*/)?layer\d+)/(\w+/\w+)", name)
        if match is None or match[2] not in _UNITS:
            continue
        axes: list[Axis | None] = []
        for kind, size in zip(_UNITS[match[2]], leaf.shape, strict=True):
            if kind == "heads" and size % heads:
                raise ValueError(
                    f"heads must be a divisor of the {size} numbers of {name!r}, got {heads}."
                )
            numbers = size // heads if kind == "heads" else 1
            axes.append(Axis(f"{match[1]}/{kind}", inner=numbers) if kind else None)
        units[name] = tuple(axes)
    return units


def narrowed(encoder: Encoder, share: float) -> Encoder:
    """The encoder with a share of each layer's heads and inner neurons, at least one; same width."""
    check_number("share", share, above=0, high=1)
    return encoder.clone(
        heads=max(1, round(share * encoder.heads)),
        head_width=encoder.head_width or encoder.width // encoder.heads,
        inner_width=max(1, round(share * (encoder.inner_width or 4 * encoder.width))),
    )
