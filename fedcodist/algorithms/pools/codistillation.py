"""Shared by PeriodicCodist and MergedCodist: settings, targets, and one codistillation.

"Heterogeneous Federated Learning Using Knowledge Codistillation" (Lichtarge et al., 2023): each pool of
clients has one federated model. The models teach each other on the server, with unlabelled data. Local
training does not change. https://arxiv.org/abs/2310.02549
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from fedcodist.algorithms.pools.pool import Pool, check_class_counts, check_pools
from fedcodist.core import keys
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.inputs import Round
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.model import Variables
from fedcodist.distillation.label_teacher import label_targets, label_teacher
from fedcodist.distillation.loop import Comparison, Distilled, Targets, distill, frozen
from fedcodist.distillation.settings import Distillation, check_distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED

PyTree = Any
_LABELS = "data/labels"  # a name among teachers; no pool's name contains '/'


class TeachingHyper(NamedTuple):
    """One pool's floats in codistillation, as student and as teacher; traced.

    Attributes:
      learning_rate: the student's learning rate in round 0.
      decay: gamma, the share of this learning rate that is left after the last round.
      interpolation: lambda, the share of the student's own initial prediction in its targets.
      self_teacher_temperature: temperature of that prediction.
      temperature: temperature of this pool's model as a teacher.
      weight: weight of this pool's model among a student's teachers, with more than two pools.
      label_interpolation: mu, the share of the one-hot label in the student's targets, for distillation
        data with labels (appendix C.4). None reads no labels.
    """

    learning_rate: Any = 1e-3
    decay: Any = 0.1
    interpolation: Any = 0.05
    self_teacher_temperature: Any = 1.0
    temperature: Any = 1.0
    weight: Any = 1.0
    label_interpolation: Any = None


class CodistillationHyper(NamedTuple):
    """All floats of a codistillation.

    Attributes:
      methods: pool -> the hyper-parameters of its method.
      teaching: pool -> TeachingHyper.
    """

    methods: Mapping[str, PyTree]
    teaching: Mapping[str, TeachingHyper]


def check_codistillation(
    pools: Mapping[str, Pool],
    distillation: Distillation,
    teaching: Mapping[str, TeachingHyper] | None,
    num_rounds: int,
    num_unlabelled: int,
) -> tuple[dict[str, Pool], CodistillationHyper]:
    """Returns checked pools and complete hyper-parameters; raises ValueError that names an argument."""
    pools = check_pools(pools)
    if len(pools) < 2:
        raise ValueError(f"pools must hold at least two pools to codistill, got {list(pools)}.")
    teaching = dict(teaching or {})
    if unknown := set(teaching) - set(pools):
        raise ValueError(f"teaching names {sorted(unknown)}, but the pools are {list(pools)}.")
    teaching = {name: teaching.get(name, TeachingHyper()) for name in pools}
    for name, hyper in teaching.items():
        where = f"teaching[{name!r}]"
        check_number(f"{where}.learning_rate", hyper.learning_rate, low=0)
        check_number(f"{where}.decay", hyper.decay, low=0, high=1)
        check_number(f"{where}.interpolation", hyper.interpolation, low=0, high=1)
        check_number(f"{where}.temperature", hyper.temperature, above=0)
        check_number(f"{where}.self_teacher_temperature", hyper.self_teacher_temperature, above=0)
        check_number(f"{where}.weight", hyper.weight, low=0)
        if hyper.label_interpolation is not None:
            check_number(f"{where}.label_interpolation", hyper.label_interpolation, low=0, high=1)
    for name in pools:
        if not any(teaching[other].weight > 0 for other in pools if other != name):
            raise ValueError(f"teaching gives no teacher of {name!r} a weight above 0.")
    check_class_counts(pools)
    check_distillation(distillation, num_unlabelled)
    check_integer("num_rounds", num_rounds, low=1)
    methods = {name: pool.method.hyper for name, pool in pools.items()}
    return pools, CodistillationHyper(methods, teaching)


def loss_metrics(distilled: Distilled | None, pools: Mapping[str, Pool]) -> dict[str, jax.Array]:
    """`<pool>/distillation_loss_first` and `_last`; NaN in a round without steps of distillation."""
    metrics: dict[str, jax.Array] = {}
    for name in pools:
        first, last = jnp.full((), jnp.nan), jnp.full((), jnp.nan)
        if distilled is not None:
            first, last = distilled.first_loss[name], distilled.last_loss[name]
        # Rounds with and without codistillation must have metrics of one dtype.
        metrics[f"{name}/distillation_loss_first"] = first.astype(jnp.result_type(float))
        metrics[f"{name}/distillation_loss_last"] = last.astype(jnp.result_type(float))
    return metrics


def codistill(
    pools: Mapping[str, Pool],
    starts: Mapping[str, Variables],
    round: Round,
    teaching: Mapping[str, TeachingHyper],
    distillation: Distillation,
    num_rounds: int,
    targets: Targets | None = None,
    divergence: Comparison | None = None,
    outputs_of: Callable[[Any], Any] = logits_of,
) -> Distilled:
    """Every pool's model learns from frozen copies of all other models and of itself (section 3).

    Args:
      pools: name -> Pool.
      starts: pool -> model; students start from it, teachers are frozen copies of it.
      round: with the data set `unlabelled`.
      teaching: pool -> TeachingHyper.
      distillation: steps, batch size, optimizer, augmentation.
      num_rounds: rounds T of the whole run.
      targets: (student's pool, teachers' outputs by pool) -> target; by default those of
        `codistillation_targets`, which are of logits.
      divergence, outputs_of: as in `distill`; teachers' outputs are what `outputs_of` keeps of them.

    Raises:
      ValueError: names `targets`, if an `outputs_of` is given without them.
    """
    if targets is None and outputs_of is not logits_of:
        raise ValueError(
            "targets must be given with outputs_of, got None: those of codistillation are of logits."
        )
    # Appendix C.4: learning rates decay linearly over all rounds.
    progress = jnp.minimum(round.index / num_rounds, 1)
    rates = {
        name: hyper.learning_rate * (1 - (1 - hyper.decay) * progress)
        for name, hyper in teaching.items()
    }
    models = {name: pool.method.model for name, pool in pools.items()}
    teachers = {name: frozen(models[name], starts[name], outputs_of) for name in pools}
    if any(hyper.label_interpolation is not None for hyper in teaching.values()):
        name = next(iter(pools))
        teachers[_LABELS] = label_teacher(models[name], starts[name])
    return distill(
        models=models,
        students=starts,
        teachers=teachers,
        targets=targets or codistillation_targets(pools, teaching),
        unlabelled=round.inputs.examples[UNLABELLED],
        key=keys.derive(round.key, "distillation", round.index),
        learning_rates=rates,
        settings=distillation,
        axis_name=round.axis_name,
        divergence=divergence,
        outputs_of=outputs_of,
    )


def codistillation_targets(
    pools: Collection[str], teaching: Mapping[str, TeachingHyper]
) -> Targets:
    """Returns (student's pool, teachers' logits by pool) -> probabilities [batch, classes].

    They are those of `codistillation_target` and, if the student learns from labels too, of these.
    """

    def targets(student: str, logits: Mapping[str, Any]) -> jax.Array:
        others = [name for name in pools if name != student]
        target = codistillation_target(
            teachers={name: logits[name] for name in others},
            temperatures={name: teaching[name].temperature for name in others},
            weights={name: teaching[name].weight for name in others},
            initial=logits[student],
            interpolation=teaching[student].interpolation,
            self_teacher_temperature=teaching[student].self_teacher_temperature,
        )
        # Appendix C.4: with labelled data the target is also interpolated with the one-hot label.
        if (share := teaching[student].label_interpolation) is None:
            return target
        return (1 - share) * target + share * label_targets(logits[_LABELS], target.shape[-1])

    return targets


def codistillation_target(
    teachers: Mapping[str, jax.Array],
    temperatures: Mapping[str, Any],
    weights: Mapping[str, Any],
    initial: jax.Array,
    interpolation: Any,
    self_teacher_temperature: Any = 1.0,
) -> jax.Array:
    """The target q = (1 - lambda) sum_j w_j softmax(z_j / T_j) + lambda softmax(z_init / T_self).

    Args:
      teachers: teacher's name -> logits [batch, classes].
      temperatures: teacher's name -> temperature > 0.
      weights: teacher's name -> weight; they are normalised to sum to 1.
      initial: logits [batch, classes] of the student's own copy before distillation.
      interpolation: lambda in [0, 1], the share of the student's own initial prediction.
      self_teacher_temperature: the temperature of that prediction.

    Returns:
      Probabilities [batch, classes].
    """
    chex.assert_equal_shape([initial, *teachers.values()])
    total = sum(weights[name] for name in teachers)
    taught = sum(
        (weights[name] / total) * jax.nn.softmax(logits / temperatures[name])
        for name, logits in teachers.items()
    )
    itself = jax.nn.softmax(initial / self_teacher_temperature)
    return (1 - interpolation) * taught + interpolation * itself
