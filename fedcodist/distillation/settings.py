"""Settings of a distillation, their checks, and the loss that they name."""

from typing import NamedTuple

import optax

from fedcodist.core.batches import Preprocess, check_preprocess
from fedcodist.core.checks import check_integer, check_number, check_stream
from fedcodist.core.optimizer_factories import OptimizerFactory, check_factory
from fedcodist.distillation.divergences import (
    DIVERGENCES,
    KL,
    Divergence,
    kl_divergence,
    own_divergence,
)


class Distillation(NamedTuple):
    """How students are trained on unlabelled data.

    Attributes:
      steps: optimizer steps of one distillation.
      batch_size: unlabelled examples per step.
      optimizer: learning rate -> optax optimizer; every distillation starts with a fresh state.
      direction: 'forward' for KL(target || student), 'reverse' for KL(student || target). It must be
        'forward' if `divergence` is not 'kl'.
      mixup_beta: mixup coefficients are drawn from Beta(beta, beta); 0 switches mixup off.
      preprocess: (batch, key, positions) -> batch, before mixup.
      inputs: the column of the network's inputs.
      divergence: the students' loss: 'kl', 'jensen_shannon' or 'mean_squared_logits' (see
        `fedcodist.distillation.divergences`), or a function (student logits [batch, classes], target
        probabilities [batch, classes]) -> [batch].
    """

    steps: int
    batch_size: int = 128
    optimizer: OptimizerFactory = lambda rate: optax.adam(rate, eps=1e-5)
    direction: str = "forward"
    mixup_beta: float = 2.0
    preprocess: Preprocess = lambda batch, key, positions: batch
    inputs: str = "image"
    divergence: str | Divergence = KL


def check_distillation(distillation: Distillation, num_unlabelled: int) -> None:
    """Raises ValueError or TypeError that names the setting which is not allowed."""
    check_stream(
        "distillation.batch_size",
        distillation.batch_size,
        "distillation.steps",
        distillation.steps,
        low=0,
    )
    check_integer("num_unlabelled", num_unlabelled, low=1)
    check_factory("distillation.optimizer", distillation.optimizer)
    check_preprocess("distillation.preprocess", distillation.preprocess)
    check_number("distillation.mixup_beta", distillation.mixup_beta, low=0)
    divergence_of(distillation)


def divergence_of(distillation: Distillation) -> Divergence:
    """The loss (student logits, target probabilities) -> divergence per example.

    Raises:
      ValueError, TypeError: names `divergence` or `direction`, and what is allowed.
    """
    named, direction = distillation.divergence, distillation.direction
    if direction not in ("forward", "reverse"):
        raise ValueError(
            f"distillation.direction must be 'forward' or 'reverse', got {direction!r}."
        )
    kl = kl_divergence(direction)
    if named == KL:
        return kl
    if direction != "forward":
        raise ValueError(
            f"distillation.direction must be 'forward' where distillation.divergence is not {KL!r}, "
            f"got {direction!r}."
        )
    if callable(named):
        return own_divergence("distillation.divergence", named)
    if named not in DIVERGENCES:
        raise ValueError(
            f"distillation.divergence must be one of {(KL, *DIVERGENCES)} or a function, got "
            f"{named!r}."
        )
    return DIVERGENCES[named]
