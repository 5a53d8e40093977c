"""Checks that clients' networks fit together in Multi-Headed Distillation, before anything compiles."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.algorithms.graph.mhd_losses import HeadDistillation
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.core.batches import Preprocess, check_preprocess
from fedcodist.core.checks import check_columns, check_integer
from fedcodist.core.user_functions import traced
from fedcodist.models.multi_headed import HeadedOutputs

_PROJECTION = "; multi_headed(..., projection=width) gives them one"


def check_networks(
    groups: Mapping[str, PartyGroup], public: Mapping[str, Any], distillation: HeadDistillation
) -> HeadedOutputs:
    """Returns the shapes of the first network's outputs on one public example.

    Args:
      groups: architecture -> its clients.
      public: columns of the public examples, arrays or shapes.
      distillation: how they learn from each other.

    Raises:
      ValueError: public is empty, architectures differ in classes, heads or embedding width, or a
        teacher is to send more predictions than there are classes.
      TypeError: a network without heads.
    """
    check_columns("public", public)
    check_preprocess("distillation.preprocess", distillation.preprocess)
    if not public or next(iter(public.values())).shape[0] < 1:
        raise ValueError("public must not be empty.")
    outputs = {
        name: _outputs(name, group, public, distillation.preprocess)
        for name, group in groups.items()
    }
    for name, output in outputs.items():
        if not isinstance(output, HeadedOutputs):
            raise TypeError(
                f"groups[{name!r}].model must be made by fedcodist.models.multi_headed, got another."
            )
    for quantity, value_of, advice in (
        ("classes", lambda output: output.logits.shape[2], ""),
        ("auxiliary heads", lambda output: output.logits.shape[1] - 1, ""),
        ("width of the embedding", lambda output: output.embedding.shape[1], _PROJECTION),
    ):
        values = {name: value_of(output) for name, output in outputs.items()}
        if len(set(values.values())) > 1:
            raise ValueError(
                f"groups must have models of the same {quantity}, got {values}{advice}."
            )
    first = next(iter(outputs.values()))
    classes = first.logits.shape[2]
    if distillation.top_predictions is not None:
        check_integer(
            "distillation.top_predictions", distillation.top_predictions, low=1, high=classes
        )
    return first


def _outputs(
    name: str, group: PartyGroup, public: Mapping[str, Any], preprocess: Preprocess
) -> Any:
    """The shapes of a network's outputs on one public example."""
    on_device = jax.dtypes.canonicalize_dtype
    batch = {
        n: jax.ShapeDtypeStruct((1, *c.shape[1:]), on_device(c.dtype)) for n, c in public.items()
    }

    def outputs(batch: dict[str, jax.Array]) -> Any:
        batch = preprocess(batch, jax.random.key(0), jnp.arange(1))
        return group.model.apply(group.model.init(jax.random.key(0)), batch)[0]

    return traced(
        f"groups[{name!r}].model.apply",
        outputs,
        batch,
        hint=f": public has the columns {sorted(public)} before preprocessing",
    )
