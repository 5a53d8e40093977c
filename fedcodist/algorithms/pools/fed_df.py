"""FedDF: the client models of a round form an ensemble that teaches the pools' averaged models.

"Ensemble Distillation for Robust Model Fusion in Federated Learning" (Lin, Kong, Stich, Jaggi, 2020).
https://arxiv.org/abs/2006.07242
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.pools.assemble import assemble
from fedcodist.algorithms.pools.fed_df_validation import (
    FedDFValidation,
    accuracy_within,
    check_fed_df_validation,
    distill_validated,
    without_worst_clients,
)
from fedcodist.algorithms.pools.pool import (
    Pool,
    check_class_counts,
    check_no_methods,
    check_pools,
    check_sends_models,
)
from fedcodist.algorithms.pools.pool_rounds import (
    set_models,
    train_pools,
    update_servers,
)
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.distillation.divergences import softened, softened_target
from fedcodist.distillation.ensembles import ENSEMBLE, Ensemble, mean_logits_of_all
from fedcodist.distillation.settings import Distillation, check_distillation, divergence_of
from fedcodist.distillation.unlabelled_batches import UNLABELLED, unlabelled_indices
from fedcodist.distillation.validation import (
    VALIDATION,
    validation_indices,
)

PyTree = Any


class FedDFHyper(NamedTuple):
    """Floats of FedDF; traced.

    Attributes:
      learning_rate: of the distillation's optimizer.
      temperature: of teacher and student.
      methods: pool -> the hyper-parameters of its method; `fed_df` puts the pools' own here.
    """

    learning_rate: Any = 1e-3
    temperature: Any = 1.0
    methods: Mapping[str, PyTree] = {}


def fed_df(
    pools: Mapping[str, Pool],
    columns: Mapping[str, Any],
    num_unlabelled: int,
    distillation: Distillation = Distillation(steps=10_000, mixup_beta=0),
    scaled: bool = False,
    validation: FedDFValidation | None = None,
    hyper: FedDFHyper = FedDFHyper(),
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """In every round all clients' models, of any architecture, teach each pool's averaged model.

    The target is softmax(mean logits / T), with the mean over the clients of all pools. Students start
    from their pool's aggregate and minimise the KL divergence from the target. T divides their logits
    too.

    Args:
      pools: name -> Pool, one architecture each.
      columns: the federated data's columns, for counting bytes.
      num_unlabelled: number of examples of the data set `unlabelled`, see `resident_data`.
      distillation: steps, batch size, optimizer, augmentation.
      scaled: whether the divergence is multiplied by T squared. FedDF's code does not do this.
      validation: early stopping and drop-worst; None: neither of them.
      hyper: learning rate and temperature T > 0 of the distillation.
      execution: how clients are executed.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_df, locals())
    pools = check_pools(pools)
    check_class_counts(pools)
    check_sends_models(pools)
    check_distillation(distillation, num_unlabelled)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)
    check_no_methods("methods", hyper.methods)
    if validation is not None:
        check_fed_df_validation(validation, distillation)
    models = {name: pool.method.model for name, pool in pools.items()}

    def select_examples(round: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        examples = {UNLABELLED: unlabelled_indices(key, round, distillation, num_unlabelled)}
        if validation is not None:
            examples[VALIDATION] = validation_indices(validation.data)
        return examples

    def round_(
        state: dict[str, PyTree], client_states: PyTree, round: Round, hyper: FedDFHyper
    ) -> tuple[dict[str, PyTree], PyTree, dict[str, jax.Array]]:
        # Clients of all pools train; their models are the teachers.
        trained = train_pools(
            pools, state, client_states, round, hyper.methods, execution, members=True
        )
        weights = {name: jnp.ones(pool.cohort_size) for name, pool in pools.items()}
        aggregates, accuracy = trained.aggregates, None
        if validation is not None:
            accuracy = functools.partial(accuracy_within, models, validation, round)
            if validation.drop_worst:
                # As in the authors' code: drop the worst teachers, and guessing clients from averages.
                reduce_key = keys.derive(round.key, "reduce", round.index)
                weights, aggregates = without_worst_clients(
                    pools, state, trained, accuracy, reduce_key
                )

        # Students start from the average of their pool's clients.
        state = update_servers(pools, state, aggregates, round.index, hyper.methods)
        starts = {name: pool.method.variables(state[name]) for name, pool in pools.items()}

        # All students learn from one target, softmax(mean of all teachers' logits / T).
        ensembles = {name: Ensemble(trained.members[name], weights[name]) for name in pools}
        divergence = divergence_of(distillation)
        students, metrics = distill_validated(
            validation,
            accuracy,
            models=models,
            students=starts,
            teachers={ENSEMBLE: mean_logits_of_all(models, ensembles)},
            targets=lambda _, logits: softened_target(logits[ENSEMBLE], hyper.temperature),
            unlabelled=round.inputs.examples[UNLABELLED],
            key=keys.derive(round.key, "distillation", round.index),
            learning_rates=dict.fromkeys(pools, hyper.learning_rate),
            settings=distillation,
            axis_name=round.axis_name,
            divergence=softened(divergence, hyper.temperature, scaled),
        )
        # The students replace the averages.
        return set_models(pools, state, students), trained.client_states, trained.metrics | metrics

    hyper = hyper._replace(methods={name: pool.method.hyper for name, pool in pools.items()})
    data_set_sizes = {UNLABELLED: num_unlabelled}
    if validation is not None:
        data_set_sizes[VALIDATION] = validation.data.num_examples
    return assemble("fed_df", pools, columns, hyper, round_, select_examples, data_set_sizes)
