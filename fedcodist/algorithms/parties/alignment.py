"""The public examples of FedMD's consensus: a subset for each round, drawn class by class."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.parties.party import PartyResult
from fedcodist.algorithms.parties.shared_examples import inference
from fedcodist.core import keys
from fedcodist.core.checks import check_integer, check_not_masked, shown
from fedcodist.core.inputs import ClientData, Examples
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Model, Variables
from fedcodist.core.shuffling import stratified_sample


class Alignment(NamedTuple):
    """The public examples of a round, and the scores that parties exchange on them.

    Attributes:
      public_labels: int [examples] of the data set `public`, for the stratified draw. A round does not
        use labels of public examples for anything else, so examples without labels may all have 0. The
        subset is then drawn uniformly.
      alignment_size: examples in a round's subset. None: all, and then no indices are sent.
      exchanged: 'logits', or 'probabilities', softmax(z / T), for sending and in the digest.
      inference_batch_size: examples per step while logits are computed.
    """

    public_labels: np.ndarray
    alignment_size: int | None = 5000
    exchanged: str = "logits"
    inference_batch_size: int = 500


def checked_alignment(alignment: Alignment, num_classes: int) -> Alignment:
    """The alignment with labels as an array.

    Raises:
      ValueError, TypeError: names the field and what is allowed.
    """
    labels = _checked_labels(alignment.public_labels, num_classes)
    check_integer("alignment.inference_batch_size", alignment.inference_batch_size, low=1)
    if alignment.exchanged not in ("logits", "probabilities"):
        raise ValueError(
            f"alignment.exchanged must be 'logits' or 'probabilities', got {alignment.exchanged!r}."
        )
    if alignment.alignment_size is not None:
        check_integer("alignment.alignment_size", alignment.alignment_size, low=1)
        if alignment.alignment_size > len(labels):
            raise ValueError(
                f"alignment.alignment_size must be at most the {len(labels)} public examples, got "
                f"{alignment.alignment_size}."
            )
    return alignment._replace(public_labels=labels)


def checked_weights(weights: Any, num_parties: int) -> np.ndarray:
    """Each party's weight in the consensus, float32 [parties]; equal weights if not given.

    Raises:
      ValueError, TypeError: names `hyper.weights` and what is allowed.
    """
    if weights is None:
        return np.ones(num_parties, np.float32)
    check_not_masked("hyper.weights", weights)
    try:
        values = np.asarray(weights, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"hyper.weights must be numbers, one per party, got {shown(weights)}."
        ) from None
    if values.shape != (num_parties,):
        raise ValueError(
            f"hyper.weights must be {num_parties} numbers, one per party, got {weights!r}."
        )
    if not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise ValueError(
            f"hyper.weights must be at least 0, finite and not all 0, got {values.tolist()}."
        )
    return (values / values.sum()).astype(np.float32)


def aligned_size(alignment: Alignment) -> int:
    """How many examples a round's subset has."""
    if alignment.alignment_size is None:
        return len(alignment.public_labels)
    return alignment.alignment_size


def aligned_indices(alignment: Alignment, round: jax.Array, key: jax.Array) -> jax.Array:
    """The round's indices of examples of the data set `public`, int [1, examples]."""
    indices = jnp.arange(aligned_size(alignment))
    if alignment.alignment_size is not None:
        draw = keys.derive(key, "alignment", round)
        indices = stratified_sample(draw, alignment.public_labels, alignment.alignment_size)
    return indices[None]


def aligned_columns(alignment: Alignment, public: Examples) -> dict[str, jax.Array]:
    """A round's examples, name -> [examples, ...]."""
    if alignment.alignment_size is None:
        return dict(public.columns)
    indices = public.indices[0]
    return {name: column[indices] for name, column in public.columns.items()}


def exchanged_scores(alignment: Alignment, temperature: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns logits -> the scores that are exchanged."""
    if alignment.exchanged == "logits":
        return lambda logits: logits
    return lambda logits: jax.nn.softmax(logits / temperature)


def message_of_scores(
    model: Model,
    variables: Variables,
    weight: Any,
    examples: ClientData,
    digest: LocalTraining,
    batch_size: int,
    scores: Callable[[jax.Array], jax.Array] = lambda logits: logits,
) -> PartyResult:
    """A PartyResult that sends only the party's scores [examples, classes]; no state changes."""
    logits = inference(model, variables, examples, digest.preprocess, batch_size)
    return PartyResult(None, {}, scores(logits), weight)


def _checked_labels(labels: Any, num_classes: int) -> np.ndarray:
    check_not_masked("alignment.public_labels", labels)
    try:
        values = np.asarray(labels)
    except (TypeError, ValueError):  # rows of different lengths
        values = np.asarray(None)
    if values.ndim == 1 and not values.size:
        raise ValueError("alignment.public_labels must not be empty.")
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        got = shown(labels) if values.dtype == object else f"{values.dtype} {list(values.shape)}"
        raise TypeError(f"alignment.public_labels must be integers [examples], got {got}.")
    if values.min() < 0 or values.max() >= num_classes:
        raise ValueError(
            "alignment.public_labels must be classes of the joint label space, 0 to "
            f"{num_classes - 1}, got {values.min()} to {values.max()}."
        )
    return values
