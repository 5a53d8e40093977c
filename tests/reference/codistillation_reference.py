"""Knowledge codistillation written out with NumPy and loops, to check the library against.

Everything here follows the paper's Algorithms 1 and 2 line by line: no JAX, no automatic
differentiation, no vectorisation over pools, clients or steps. The model is a multilayer
perceptron (ReLU between layers, softmax cross-entropy). Nothing here is random: the caller gives
the batches of every client and the (already augmented) batches of every student.

Precision: all arithmetic runs in the dtype of the parameters, float64 unless the caller asks for
another one in `initial_state` or `run`.

Example::

    settings = {
        "small": PoolSettings(client_learning_rate=0.1, server_learning_rate=1e-2),
        "large": PoolSettings(client_learning_rate=0.1, server_learning_rate=1e-2),
    }
    rounds = [
        RoundInputs(
            clients={
                "small": [ClientRound(batches=[(x, y), (x2, y2)], num_examples=40), ...],
                "large": [...],
            },
            distillation={"small": [u1, u2, ...], "large": [u1, u2, ...]},
        ),
        ...
    ]
    parameters_after_round = run(
        "periodic", {"small": small, "large": large}, rounds, settings, num_rounds=1500, period=200
    )
    parameters_after_round[0]["small"][0]  # (kernel, bias) of the first layer after round one
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

Layer = tuple[np.ndarray, np.ndarray]
"""Kernel [inputs, outputs] and bias [outputs]."""

Parameters = list[Layer]
Batch = tuple[ArrayLike, ArrayLike]
"""Inputs [examples, ...] (trailing axes get flattened), integer labels [examples]; no padding."""

KlDirection = Literal["forward", "reverse"]


class AdamState(NamedTuple):
    """First moment m, second moment v (both shaped as the parameters) and steps taken so far."""

    first_moment: Parameters
    second_moment: Parameters
    steps: int


class Teacher(NamedTuple):
    """A frozen teacher with its weight w_j in the target and its temperature T_j."""

    parameters: Parameters
    weight: float
    temperature: float


class PoolState(NamedTuple):
    """Server model of one pool and its server optimizer's state (kept, unused, under plain SGD)."""

    parameters: Parameters
    server_adam: AdamState


State = dict[str, PoolState]


@dataclass(frozen=True)
class PoolSettings:
    """Settings of one pool: its clients, its server, its model as a student and as a teacher.

    `teacher_temperature` is T_i where this pool's model teaches others. `self_teacher_weight` is
    lambda_i, the share of the student's own start in its target; `self_teacher_temperature` is
    that share's. `teacher_weights` maps every teaching pool to w_j (they sum to one); None means
    uniform over the other pools. `alpha` (merged rounds only) is a number or a function of the
    zero-based round.
    """

    client_learning_rate: float
    server_learning_rate: float
    server_optimizer: Literal["adam", "sgd"] = "adam"
    server_epsilon: float = 1e-5
    distillation_learning_rate: float = 1e-3
    distillation_decay: float = 0.1
    distillation_epsilon: float = 1e-5
    teacher_temperature: float = 1.0
    self_teacher_weight: float = 0.05
    self_teacher_temperature: float = 1.0
    teacher_weights: Mapping[str, float] | None = None
    kl_direction: KlDirection = "forward"
    alpha: float | Callable[[int], float] = 0.7


@dataclass(frozen=True)
class ClientRound:
    """One client's work in a round: its batches of all local epochs, its weight in the mean."""

    batches: Sequence[Batch]
    num_examples: float


@dataclass(frozen=True)
class RoundInputs:
    """What one round consumes: each pool's clients, each student's batches of inputs.

    `distillation` is only read in rounds that distill; a student without batches takes no step.
    """

    clients: Mapping[str, Sequence[ClientRound]]
    distillation: Mapping[str, Sequence[ArrayLike]]


def run(
    method: Literal["periodic", "merged"],
    parameters: Mapping[str, Sequence[tuple[ArrayLike, ArrayLike]]],
    rounds: Sequence[RoundInputs],
    settings: Mapping[str, PoolSettings],
    *,
    num_rounds: int | None = None,
    period: int | None = None,
    dtype: DTypeLike = np.float64,
) -> list[dict[str, Parameters]]:
    """Runs all `rounds` from `parameters` and returns every pool's parameters after each of them.

    `num_rounds` is T of the learning-rate schedules (default: as many as are given); `period` is
    needed by "periodic" only, and a period above T makes the run plain FedAvg.
    """
    total = len(rounds) if num_rounds is None else num_rounds
    state = initial_state(parameters, dtype)
    history = []
    for t in range(len(rounds)):
        if method == "periodic":
            if period is None:
                raise ValueError("period is None: a periodic run needs an integer >= 1")
            state = periodic_round(state, t, rounds[t], settings, num_rounds=total, period=period)
        elif method == "merged":
            state = merged_round(state, t, rounds[t], settings, num_rounds=total)
        else:
            raise ValueError(f"method is {method!r}: must be 'periodic' or 'merged'")
        history.append({pool: copy_parameters(state[pool].parameters) for pool in state})
    return history


def initial_state(
    parameters: Mapping[str, Sequence[tuple[ArrayLike, ArrayLike]]],
    dtype: DTypeLike = np.float64,
) -> State:
    """State before the first round: `parameters` copied and cast to `dtype`, fresh Adam moments."""
    state = {}
    for pool, layers in parameters.items():
        cast = [
            (np.array(kernel, dtype=dtype), np.array(bias, dtype=dtype)) for kernel, bias in layers
        ]
        state[pool] = PoolState(cast, adam_init(cast))
    return state


# ---------------------------------------------------------------------------------------------
# The two algorithms, one round each. `t` is the zero-based round, 0 .. num_rounds - 1.


def periodic_round(
    state: State,
    t: int,
    inputs: RoundInputs,
    settings: Mapping[str, PoolSettings],
    *,
    num_rounds: int,
    period: int,
) -> State:
    """One round of PeriodicCodist (Algorithm 1): FedAvg, then in every `period`-th codistillation.

    Teachers and student starts are the models after this round's FedAvg update. A codistillation
    resets the server's Adam moments and step count and leaves the learning-rate schedule alone.
    """
    updated = {}
    for pool in state:
        gradient = pseudo_gradient(state[pool].parameters, inputs.clients[pool], settings[pool])
        updated[pool] = server_update(state[pool], gradient, settings[pool], t, num_rounds)

    t_one_based = t + 1
    if t_one_based % period != 0:
        return updated

    frozen = {pool: copy_parameters(updated[pool].parameters) for pool in updated}
    replaced = {}
    for pool in updated:
        student = distill_student(pool, frozen, inputs, settings, t, num_rounds)
        replaced[pool] = PoolState(student, adam_init(student))
    return replaced


def merged_round(
    state: State,
    t: int,
    inputs: RoundInputs,
    settings: Mapping[str, PoolSettings],
    *,
    num_rounds: int,
    zero_norm: float | None = None,
) -> State:
    """One round of MergedCodist (Algorithm 2): the server consumes Delta_i instead of g_i.

    Teachers and student starts are the models before the update, theta^t. `zero_norm` as in
    `merge_directions`.
    """
    frozen = {pool: copy_parameters(state[pool].parameters) for pool in state}
    updated = {}
    for pool in state:
        gradient = pseudo_gradient(frozen[pool], inputs.clients[pool], settings[pool])
        student = distill_student(pool, frozen, inputs, settings, t, num_rounds)
        delta = subtract(frozen[pool], student)
        alpha = settings[pool].alpha
        if callable(alpha):
            alpha = alpha(t)
        merged = merge_directions(gradient, delta, alpha, zero_norm)
        updated[pool] = server_update(state[pool], merged, settings[pool], t, num_rounds)
    return updated


def merge_directions(
    gradient: Parameters, delta: Parameters, alpha: float, zero_norm: float | None = None
) -> Parameters:
    """Delta_i = alpha g_i + (1 - alpha) delta_i ||g_i|| / ||delta_i||, norms over all tensors.

    Where ||delta_i|| <= `zero_norm` (default: the smallest normal number of the dtype) there is no
    direction to rescale and the result is alpha g_i, not renormalised to g_i.
    """
    if zero_norm is None:
        zero_norm = float(np.finfo(gradient[0][0].dtype).tiny)
    gradient_norm = global_norm(gradient)
    delta_norm = global_norm(delta)
    scale = 0.0
    if delta_norm > zero_norm:
        scale = (1 - alpha) * gradient_norm / delta_norm
    merged = []
    for (g_kernel, g_bias), (d_kernel, d_bias) in zip(gradient, delta, strict=True):
        merged.append((alpha * g_kernel + scale * d_kernel, alpha * g_bias + scale * d_bias))
    return merged


# ---------------------------------------------------------------------------------------------
# FedAvg: clients, aggregation, server


def pseudo_gradient(
    server: Parameters, clients: Sequence[ClientRound], settings: PoolSettings
) -> Parameters:
    """g = sum_k n_k (theta_server - theta_k) / sum_k n_k: points as a gradient does."""
    deltas = []
    weights = []
    for client in clients:
        final = client_update(server, client.batches, settings.client_learning_rate)
        deltas.append(subtract(server, final))
        weights.append(client.num_examples)
    return weighted_mean(deltas, weights)


def client_update(server: Parameters, batches: Sequence[Batch], learning_rate: float) -> Parameters:
    """Parameters after one SGD step per batch, starting from `server`, at a constant rate."""
    parameters = copy_parameters(server)
    for inputs, labels in batches:
        _, gradient = cross_entropy(parameters, inputs, labels)
        parameters = sgd_step(parameters, gradient, learning_rate)
    return parameters


def weighted_mean(trees: Sequence[Parameters], weights: Sequence[float]) -> Parameters:
    """sum_k w_k tree_k / sum_k w_k. Raises ValueError unless the weights sum to more than zero."""
    total = float(sum(weights))
    if not total > 0:
        raise ValueError(f"weights sum to {total}: must sum to more than zero")
    mean = zeros_like(trees[0])
    for tree, weight in zip(trees, weights, strict=True):
        share = float(weight) / total
        for layer in range(len(mean)):
            mean_kernel, mean_bias = mean[layer]
            kernel, bias = tree[layer]
            mean[layer] = (mean_kernel + share * kernel, mean_bias + share * bias)
    return mean


def server_update(
    pool: PoolState, gradient: Parameters, settings: PoolSettings, t: int, num_rounds: int
) -> PoolState:
    """Applies the server optimizer to `gradient` at the rate of zero-based round `t`."""
    rate = server_learning_rate(settings.server_learning_rate, t, num_rounds)
    if settings.server_optimizer == "adam":
        parameters, adam = adam_step(
            pool.parameters, gradient, pool.server_adam, rate, epsilon=settings.server_epsilon
        )
        return PoolState(parameters, adam)
    if settings.server_optimizer == "sgd":
        return PoolState(sgd_step(pool.parameters, gradient, rate), pool.server_adam)
    raise ValueError(f"server_optimizer is {settings.server_optimizer!r}: must be 'adam' or 'sgd'")


def server_learning_rate(initial: float, t: int, num_rounds: int) -> float:
    """lr0 (1 - t/T), t = 0 .. T-1."""
    return initial * (1 - t / num_rounds)


# ---------------------------------------------------------------------------------------------
# Distillation


def distill_student(
    pool: str,
    frozen: Mapping[str, Parameters],
    inputs: RoundInputs,
    settings: Mapping[str, PoolSettings],
    t: int,
    num_rounds: int,
) -> Parameters:
    """Student of `pool`, started from frozen[pool], taught by the other pools' frozen models."""
    teachers = []
    for teacher_pool, weight in teacher_weights(pool, list(frozen), settings[pool]).items():
        temperature = settings[teacher_pool].teacher_temperature
        teachers.append(Teacher(frozen[teacher_pool], weight, temperature))
    rate = distillation_learning_rate(
        settings[pool].distillation_learning_rate, settings[pool].distillation_decay, t, num_rounds
    )
    batches = inputs.distillation.get(pool, ())
    return distill(frozen[pool], teachers, batches, settings[pool], rate)


def teacher_weights(pool: str, pools: Sequence[str], settings: PoolSettings) -> dict[str, float]:
    """w_j of every pool that teaches `pool`; ValueError unless all are others' and sum to 1."""
    if settings.teacher_weights is None:
        others = [other for other in pools if other != pool]
        return {other: 1 / len(others) for other in others}
    weights = dict(settings.teacher_weights)
    if pool in weights or not set(weights) <= set(pools):
        raise ValueError(
            f"teacher_weights names {sorted(weights)}: must be pools other than {pool!r}"
        )
    if abs(sum(weights.values()) - 1) > 1e-9:
        raise ValueError(f"teacher_weights sum to {sum(weights.values())}: must sum to 1")
    return weights


def distill(
    start: Parameters,
    teachers: Sequence[Teacher],
    batches: Sequence[ArrayLike],
    settings: PoolSettings,
    learning_rate: float,
) -> Parameters:
    """One Adam step per batch on the mean KL to the target; fresh Adam moments, constant rate."""
    student_init = copy_parameters(start)
    student = copy_parameters(start)
    adam = adam_init(student)
    for batch in batches:
        target = target_distribution(
            batch,
            teachers,
            student_init,
            settings.self_teacher_weight,
            settings.self_teacher_temperature,
        )
        _, gradient = kl_divergence(student, batch, target, settings.kl_direction)
        student, adam = adam_step(
            student, gradient, adam, learning_rate, epsilon=settings.distillation_epsilon
        )
    return student


def target_distribution(
    inputs: ArrayLike,
    teachers: Sequence[Teacher],
    student_init: Parameters,
    self_teacher_weight: float,
    self_teacher_temperature: float = 1.0,
) -> np.ndarray:
    """q = (1 - lambda) sum_j w_j softmax(z_j / T_j) + lambda softmax(z_init / T_self).

    Returns probabilities [examples, classes].
    """
    own = softmax(forward(student_init, inputs) / self_teacher_temperature)
    taught = np.zeros_like(own)
    for teacher in teachers:
        probabilities = softmax(forward(teacher.parameters, inputs) / teacher.temperature)
        taught = taught + teacher.weight * probabilities
    return (1 - self_teacher_weight) * taught + self_teacher_weight * own


def distillation_learning_rate(initial: float, decay: float, t: int, num_rounds: int) -> float:
    """lr0 (1 - (1 - gamma) t/T), t the zero-based round, gamma the decay coefficient."""
    return initial * (1 - (1 - decay) * t / num_rounds)


# ---------------------------------------------------------------------------------------------
# Optimizers


def adam_init(parameters: Parameters) -> AdamState:
    """m = v = 0, no step taken."""
    return AdamState(zeros_like(parameters), zeros_like(parameters), 0)


def adam_step(
    parameters: Parameters,
    gradient: Parameters,
    state: AdamState,
    learning_rate: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-5,
) -> tuple[Parameters, AdamState]:
    """theta - lr m_hat / (sqrt(v_hat) + epsilon), bias-corrected, epsilon outside the root."""
    count = state.steps + 1
    new_parameters, first, second = [], [], []
    for layer in range(len(parameters)):
        new_tensors, new_m, new_v = [], [], []
        for tensor in range(2):  # kernel, bias
            g = gradient[layer][tensor]
            m = beta1 * state.first_moment[layer][tensor] + (1 - beta1) * g
            v = beta2 * state.second_moment[layer][tensor] + (1 - beta2) * g * g
            m_hat = m / (1 - beta1**count)
            v_hat = v / (1 - beta2**count)
            step = learning_rate * m_hat / (np.sqrt(v_hat) + epsilon)
            new_tensors.append(parameters[layer][tensor] - step)
            new_m.append(m)
            new_v.append(v)
        new_parameters.append((new_tensors[0], new_tensors[1]))
        first.append((new_m[0], new_m[1]))
        second.append((new_v[0], new_v[1]))
    return new_parameters, AdamState(first, second, count)


def sgd_step(parameters: Parameters, gradient: Parameters, learning_rate: float) -> Parameters:
    """theta - lr g."""
    stepped = []
    for (kernel, bias), (g_kernel, g_bias) in zip(parameters, gradient, strict=True):
        stepped.append((kernel - learning_rate * g_kernel, bias - learning_rate * g_bias))
    return stepped


# ---------------------------------------------------------------------------------------------
# Multilayer perceptron: forward pass, losses, hand-written backpropagation


def forward(parameters: Parameters, inputs: ArrayLike) -> np.ndarray:
    """Logits [examples, classes] of `inputs` [examples, ...]."""
    logits, _ = _forward_with_activations(parameters, inputs)
    return logits


def cross_entropy(
    parameters: Parameters, inputs: ArrayLike, labels: ArrayLike
) -> tuple[float, Parameters]:
    """Mean of -log softmax(z)[label] over the batch, and its gradient."""
    logits, activations = _forward_with_activations(parameters, inputs)
    labels = np.asarray(labels)
    examples = np.arange(len(labels))
    loss = -np.mean(log_softmax(logits)[examples, labels])
    logits_gradient = softmax(logits)
    logits_gradient[examples, labels] -= 1
    return float(loss), _backward(parameters, activations, logits_gradient / len(labels))


def kl_divergence(
    parameters: Parameters,
    inputs: ArrayLike,
    target: np.ndarray,
    direction: KlDirection = "forward",
) -> tuple[float, Parameters]:
    """Mean KL between `target` q [examples, classes] and p = softmax(z), and its gradient.

    "forward" is KL(q || p), whose gradient by the logits is p - q; "reverse" is KL(p || q), whose
    gradient is p_k (log p_k - log q_k - KL(p || q)). The reverse one needs q > 0 everywhere.
    """
    logits, activations = _forward_with_activations(parameters, inputs)
    log_p = log_softmax(logits)
    p = np.exp(log_p)
    if direction == "forward":
        log_q = np.log(np.where(target > 0, target, 1))  # 0 log 0 = 0
        per_example = np.sum(target * (log_q - log_p), axis=1)
        logits_gradient = softmax(logits) - target
    elif direction == "reverse":
        log_q = np.log(target)
        per_example = np.sum(p * (log_p - log_q), axis=1)
        logits_gradient = p * (log_p - log_q - per_example[:, None])
    else:
        raise ValueError(f"kl_direction is {direction!r}: must be 'forward' or 'reverse'")
    gradient = _backward(parameters, activations, logits_gradient / len(logits))
    return float(np.mean(per_example)), gradient


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis."""
    exponentials = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return exponentials / np.sum(exponentials, axis=-1, keepdims=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities over the last axis."""
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def _forward_with_activations(
    parameters: Parameters, inputs: ArrayLike
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits, and what entered each layer."""
    hidden = np.asarray(inputs, dtype=parameters[0][0].dtype)
    hidden = hidden.reshape(len(hidden), -1)
    activations = []
    for layer, (kernel, bias) in enumerate(parameters):
        activations.append(hidden)
        hidden = hidden @ kernel + bias
        if layer < len(parameters) - 1:
            hidden = np.maximum(hidden, 0)
    return hidden, activations


def _backward(
    parameters: Parameters, activations: list[np.ndarray], logits_gradient: np.ndarray
) -> Parameters:
    """Gradient by every kernel and bias from the gradient by the logits [examples, classes]."""
    gradient: Parameters = [parameters[0]] * len(parameters)
    upstream = logits_gradient
    for layer in reversed(range(len(parameters))):
        kernel, _ = parameters[layer]
        gradient[layer] = (activations[layer].T @ upstream, np.sum(upstream, axis=0))
        if layer > 0:
            # What enters layer > 0 is a ReLU's output: positive exactly where the ReLU passed.
            upstream = (upstream @ kernel.T) * (activations[layer] > 0)
    return gradient


# ---------------------------------------------------------------------------------------------
# Arithmetic on lists of layers


def copy_parameters(parameters: Parameters) -> Parameters:
    """A copy that shares no memory."""
    return [(kernel.copy(), bias.copy()) for kernel, bias in parameters]


def zeros_like(parameters: Parameters) -> Parameters:
    """Zeros with the shapes and dtype of `parameters`."""
    return [(np.zeros_like(kernel), np.zeros_like(bias)) for kernel, bias in parameters]


def subtract(left: Parameters, right: Parameters) -> Parameters:
    """left - right, tensor by tensor."""
    difference = []
    for (left_kernel, left_bias), (right_kernel, right_bias) in zip(left, right, strict=True):
        difference.append((left_kernel - right_kernel, left_bias - right_bias))
    return difference


def global_norm(parameters: Parameters) -> float:
    """Euclidean norm of all tensors flattened into one vector."""
    squares = 0.0
    for kernel, bias in parameters:
        squares += float(np.sum(kernel * kernel)) + float(np.sum(bias * bias))
    return float(np.sqrt(squares))
