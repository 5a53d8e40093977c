"""FedMD (Li and Wang, 2019): parties of any architecture agree on logits of public examples."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.algorithms.parties.party import (
    PARTIES,
    PUBLIC,
    PartyGroup,
    all_clients,
    check_groups,
    check_widths,
    everybody,
    for_each_party,
    inference,
    init_models,
    num_clients,
    party_predictors,
    same_for_all,
    shared_examples,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number, shown
from fedcodist.core.communication import Communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.local_training import (
    LocalTraining,
    TrainedClient,
    check_training,
    lasting_state,
    train_client,
)
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables, is_finite
from fedcodist.core.shuffling import stratified_sample

PyTree = Any


def keras_adam(learning_rate: Any) -> optax.GradientTransformation:
    """Adam with Keras' epsilon, as in the released code."""
    return optax.adam(learning_rate, eps=1e-7)


class Party(NamedTuple):
    """What a party has: its model, and its two optimizers, which go on over all rounds."""

    variables: Variables
    digest_state: PyTree
    revisit_state: PyTree


class FedMDHyper(NamedTuple):
    """Floats of FedMD; traced.

    Attributes:
      digest_learning_rate, revisit_learning_rate: of the two optimizers.
      weights: c_k, [parties] in the order of clients; only their proportions count.
      temperature: T, where probabilities are exchanged.
    """

    digest_learning_rate: Any = 1e-3
    revisit_learning_rate: Any = 1e-3
    weights: Any = 1.0
    temperature: Any = 1.0


def fed_md(
    groups: Mapping[str, PartyGroup],
    public_labels: np.ndarray,
    num_classes: int,
    digest: LocalTraining = LocalTraining(keras_adam, batch_size=256),
    revisit: LocalTraining = LocalTraining(keras_adam, batch_size=5, epochs=4),
    alignment_size: int | None = 5000,
    weights: Sequence[float] | None = None,
    exchanged: str = "logits",
    gradient_hook: Callable[[PyTree, PyTree], PyTree] = lambda gradient, params: gradient,
    inference_batch_size: int = 500,
    hyper: FedMDHyper = FedMDHyper(),
    execution: Execution = Execution(),
    name: str = "fed_md",
) -> FederatedAlgorithm:
    """FedMD's collaboration, after transfer learning (`local_only`) has trained the parties' models.

    A round (algorithm 1): a fresh subset of the public examples is drawn, class by class; every party
    sends its logits on it, in inference mode; their weighted mean is the consensus. Then each party
    digests, fitting its own logits to the consensus by the mean absolute error, and revisits its
    private examples. All of them send before anyone learns.

    Args:
      groups: architecture -> its parties.
      public_labels: int [rows] of the data set `public`, for the stratified draw; nothing else of a
        round reads labels of public examples.
      num_classes: of the joint label space, public and private classes.
      digest: optimizer, batch size, epochs and preprocessing of public examples; large batches suit the
        loss, whose gradient does not fade. With 0 epochs nobody learns from others. Logits that are sent
        are of examples preprocessed in the same way, with one fixed key where it is random.
      revisit: the same of private examples.
      alignment_size: examples of the subset; None takes all public ones, and no indices are sent.
      weights: c_k, one per party in the order of clients; equal where not given. This argument
        alone sets `hyper.weights`.
      exchanged: 'logits', or 'probabilities': softmax(z / T), of senders and in the digest.
      gradient_hook: (gradient, params) -> gradient of digest and revisit, such as a penalty's.
      inference_batch_size: examples per step while logits are computed.
      hyper: learning rates and temperature.
      execution: how parties of one architecture are executed.
      name: the method's name in tables.

    Raises:
      ValueError, TypeError: one line that names the argument and what is allowed.
    """
    check_arguments(fed_md, locals())
    groups = check_groups(groups)
    check_widths(groups, num_classes)
    check_training("digest", digest, fewest_epochs=0)
    check_training("revisit", revisit, fewest_epochs=0)
    public_labels = _checked_labels(public_labels, num_classes)
    count = _alignment_size(alignment_size, len(public_labels))
    clients = sum(len(group.clients) for group in groups.values())
    if np.ndim(hyper.weights) or hyper.weights != FedMDHyper().weights:
        raise ValueError(
            f"hyper.weights must be left as it is (the argument weights sets it), got {hyper.weights!r}."
        )
    hyper = hyper._replace(weights=_weights(weights, clients))
    check_number("hyper.digest_learning_rate", hyper.digest_learning_rate, low=0)
    check_number("hyper.revisit_learning_rate", hyper.revisit_learning_rate, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)
    check_integer("inference_batch_size", inference_batch_size, low=1)
    if exchanged not in ("logits", "probabilities"):
        raise ValueError(f"exchanged must be 'logits' or 'probabilities', got {exchanged!r}.")

    def init(key):
        return start(init_models(groups, key), digest, revisit)

    def select(round, key):
        indices = jnp.arange(count)
        if alignment_size is not None:
            indices = stratified_sample(keys.derive(key, "alignment", round), public_labels, count)
        return everybody(groups, {PUBLIC: indices[None]})

    def round_(state, client_states, round, hyper):
        key, inputs, axis_name = round.key, round.inputs, round.axis_name
        public = inputs.examples[PUBLIC]
        alignment = dict(public.columns)
        if alignment_size is not None:
            at = public.indices[0]
            alignment = {column: values[at] for column, values in alignment.items()}

        def scores(logits):
            return logits if exchanged == "logits" else jax.nn.softmax(logits / hyper.temperature)

        def error(outputs, batch):
            return mean_absolute_error(scores(logits_of(outputs)), batch["consensus"])

        def communicate(model, message, own, data, key):
            variables, weight = own
            examples = shared_examples(alignment, data)
            return sent(model, variables, weight, examples, digest, inference_batch_size, scores)

        def digest_and_revisit(model, consensus, party, data, key):
            examples = shared_examples(alignment | {"consensus": consensus}, data)
            digested = _train(
                model,
                digest,
                party.variables,
                examples,
                keys.derive(key, "digest"),
                hyper.digest_learning_rate,
                gradient_hook,
                error,
                party.digest_state,
            )
            revisited = _train(
                model,
                revisit,
                digested.variables,
                data,
                keys.derive(key, "revisit"),
                hyper.revisit_learning_rate,
                gradient_hook,
                None,
                party.revisit_state,
            )
            metrics = {
                "digest_loss": digested.loss,
                "loss": revisited.loss,
                "num_steps": digested.num_steps + revisited.num_steps,
                "client_examples": revisited.num_examples,
                "finite": is_finite(revisited.variables),
            }
            after = Party(revisited.variables, digested.optimizer_state, revisited.optimizer_state)
            return ClientResult({}, {}, jnp.ones(()), after, metrics)

        run = lambda update, message, own, purpose: for_each_party(
            groups,
            update,
            message,
            own,
            inputs.cohorts[PARTIES],
            keys.derive(key, purpose, round.index),
            execution,
            axis_name,
        )
        weights = _by_group(groups, hyper.weights)
        senders = {name: (party.variables, weights[name]) for name, party in state.items()}
        communicated = run(communicate, None, senders, "communicate")
        consensus = communicated.update / communicated.weight
        trained = run(digest_and_revisit, consensus, state, "client_update")
        return trained.own, client_states, trained.metrics

    scalar = np.dtype(np.float32).itemsize
    scores_bytes = count * num_classes * scalar
    indices_bytes = 0 if alignment_size is None else count * np.dtype(np.int32).itemsize
    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=init,
        client_states={},
        select=select,
        round=round_,
        predictors=party_predictors(groups, lambda state, name: state[name].variables),
        communication=same_for_all(
            groups, Communication(down=scores_bytes + indices_bytes, up=scores_bytes)
        ),
        num_clients=num_clients(groups),
        data_set_sizes={PUBLIC: len(public_labels)},
    )


def start(
    models: Mapping[str, Variables],
    digest: LocalTraining,
    revisit: LocalTraining,
    private_states: Mapping[str, PyTree] | None = None,
) -> dict[str, Party]:
    """The state before the first round.

    Args:
      models: architecture -> Variables, leaves [group, ...], after transfer learning.
      digest, revisit: as `fed_md` gets them.
      private_states: architecture -> states of the optimizers of private training, which go on in the
        revisit, as in the released code; fresh ones where not given.
    """

    def fresh(name, training, params):
        first = functools.partial(lasting_state, f"{name}.optimizer", training.optimizer)
        return jax.vmap(first)(params)

    found = {}
    for name, (params, mutable) in models.items():
        goes_on = None if private_states is None else private_states[name]
        if goes_on is None:
            goes_on = fresh("revisit", revisit, params)
        digesting = fresh("digest", digest, params)
        found[name] = Party(Variables(params, mutable), digesting, goes_on)
    return found


def sent(
    model: Model,
    variables: Variables,
    weight: jax.Array,
    examples: Any,
    digest: LocalTraining,
    batch_size: int,
    scores: Any = lambda logits: logits,
) -> ClientResult:
    """What a party sends: its scores [examples, classes] and nothing else. It keeps what it has."""
    logits = inference(model, variables, examples, digest.preprocess, batch_size)
    return ClientResult(scores(logits), {}, weight, None, {})


def mean_absolute_error(scores: jax.Array, consensus: jax.Array) -> jax.Array:
    """The digest's loss per example, the mean over classes; of [batch, classes] both."""
    difference = scores - consensus
    # Not abs, whose gradient JAX takes to be 1 where the difference is 0; Keras' is 0, and so is this.
    return jnp.mean(difference * jax.lax.stop_gradient(jnp.sign(difference)), axis=-1)


def _train(
    model, training, variables, data, key, rate, gradient_hook, loss_hook, state
) -> TrainedClient:
    if training.epochs == 0:
        nothing = jnp.zeros((), jnp.int32)
        return TrainedClient(variables, nothing, jnp.zeros(()), nothing, state)
    return train_client(
        model, training, variables, data, key, rate, gradient_hook, loss_hook, state
    )


def _by_group(groups: Mapping[str, PartyGroup], values: jax.Array) -> dict[str, jax.Array]:
    everyone = all_clients(groups)
    return {
        name: values[np.searchsorted(everyone, group.clients)] for name, group in groups.items()
    }


def _alignment_size(size: int | None, num_public: int) -> int:
    if size is None:
        return num_public
    check_integer("alignment_size", size, low=1)
    if size > num_public:
        raise ValueError(
            f"alignment_size must be at most the {num_public} public examples, got {size}."
        )
    return size


def _checked_labels(labels: Any, num_classes: int) -> np.ndarray:
    try:
        found = np.asarray(labels)
    except (TypeError, ValueError):  # rows of different lengths
        found = np.asarray(None)
    if found.ndim == 1 and not found.size:
        raise ValueError("public_labels must not be empty.")
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        got = shown(labels) if found.dtype == object else f"{found.dtype} {list(found.shape)}"
        raise TypeError(f"public_labels must be integers [rows], got {got}.")
    if found.min() < 0 or found.max() >= num_classes:
        raise ValueError(
            f"public_labels must be classes of the joint label space, 0 to {num_classes - 1}, got "
            f"{found.min()} to {found.max()}."
        )
    return found


def _weights(weights: Sequence[float] | None, count: int) -> np.ndarray:
    if weights is None:
        return np.ones(count, np.float32)
    try:
        values = np.asarray(weights, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"weights must be numbers, one per party, got {shown(weights)}.") from None
    if values.shape != (count,):
        raise ValueError(f"weights must be {count} numbers, one per party, got {weights!r}.")
    if not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise ValueError(
            f"weights must be at least 0, finite and not all 0, got {values.tolist()}."
        )
    return (values / values.sum()).astype(np.float32)
