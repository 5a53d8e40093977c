"""Networks that output their layers learn from each other as networks that output logits do."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_kd import FedKDHyper, fed_kd
from fedcodist.algorithms.graph.decentralised_fed_avg import decentralised_fed_avg
from fedcodist.algorithms.graph.decentralised_periodic_codistillation import (
    PublicAnswers,
    decentralised_periodic_codistillation,
)
from fedcodist.algorithms.graph.graphs import complete
from fedcodist.algorithms.parties.alignment import Alignment
from fedcodist.algorithms.parties.ds_fl import ds_fl
from fedcodist.algorithms.parties.fd import fd
from fedcodist.algorithms.parties.fed_md import fed_md
from fedcodist.algorithms.parties.fml import fml
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.kt_pfl import kt_pfl
from fedcodist.algorithms.parties.open_examples import OpenExamples
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.algorithms.pools.client_ensembles import with_client_ensembles
from fedcodist.algorithms.pools.fed_df import FedDFValidation, fed_df
from fedcodist.algorithms.pools.fed_sdd import FedSDDTeaching, fed_sdd
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.svd import svd
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.layer_outputs import with_layers
from fedcodist.core.local_steps import StepTraining
from fedcodist.core.local_training import LocalTraining
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.distillation.validation import VALIDATION, ValidationData
from fedcodist.models.digits import MLP
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLIENTS, EXAMPLES, FEATURES, CLASSES, ROUNDS = 4, 6, 4, 3, 2
DRAWS = np.random.default_rng(0)
COLUMNS = {
    "image": DRAWS.normal(size=(CLIENTS * EXAMPLES, FEATURES)).astype(np.float32),
    "label": DRAWS.integers(0, CLASSES, CLIENTS * EXAMPLES).astype(np.int32),
}
DATA = FederatedData.from_arrays(COLUMNS, offsets=EXAMPLES * np.arange(CLIENTS + 1))
ROWS = {
    UNLABELLED: {"image": DRAWS.normal(size=(9, FEATURES)).astype(np.float32)},
    PUBLIC: {"image": DRAWS.normal(size=(9, FEATURES)).astype(np.float32)},
    VALIDATION: {name: column[:5] for name, column in COLUMNS.items()},
}
TRAINING = LocalTraining(optax.sgd, batch_size=3, epochs=2)
STEP_TRAINING = StepTraining(optax.sgd, batch_size=3, steps=2)


def network(hidden, layered=True):
    module, example = MLP(hidden=(hidden,), classes=CLASSES), jnp.zeros((1, FEATURES))
    return (
        with_layers(module, example, ["Dense_0"]) if layered else from_flax_linen(module, example)
    )


def averaged(hidden, layered):
    return fed_avg(network(hidden, layered), TRAINING, optax.sgd, hyper=FedAvgHyper(0.1, 1.0))


def teachers_and_students(hidden):
    hyper = FedKDHyper(0.1, 0.1)
    method = fed_kd(network(6), network(hidden), COLUMNS, TRAINING, hyper=hyper)
    return compressed(method, ROUNDS, svd(), svd())


def algorithms(name, method):
    pools = {
        pool: Pool(method(hidden), np.arange(CLIENTS), CLIENTS)
        for pool, hidden in (("small", 3), ("large", 5))
    }
    common = dict(columns=COLUMNS, num_unlabelled=9)
    distillation = Distillation(2, 4, optimizer=optax.sgd, mixup_beta=0)
    match name:
        case "periodic":
            return periodic_codistillation(
                pools=pools, num_rounds=ROUNDS, period=1, distillation=distillation, **common
            )
        case "merged":
            return merged_codistillation(
                pools=pools, num_rounds=ROUNDS, alpha=0.5, distillation=distillation, **common
            )
        case "fed_df":
            validated = FedDFValidation(ValidationData(5, 5), every=1, patience=2, drop_worst=True)
            return fed_df(pools, distillation=distillation, validation=validated, **common)
        case "fed_sdd" | "fed_sdd, cached":
            teaching = FedSDDTeaching(cached="cached" in name)
            options = dict(rounds_kept=2, distillation=distillation, teaching=teaching, **common)
            build = lambda pool: fed_sdd(pool, num_models=2, **options)
            return with_client_ensembles(build, pools["small"], ("clients",))


def of_parties(name, layered):
    """Two parties of each of two architectures."""
    models = {size: network(width, layered) for size, width in (("small", 3), ("large", 5))}
    groups = {
        size: PartyGroup(model, np.arange(2) + 2 * index)
        for index, (size, model) in enumerate(models.items())
    }
    match name:
        case "fed_md":
            labels = np.arange(9, dtype=np.int32) % CLASSES
            return fed_md(groups, Alignment(labels, 6), CLASSES, TRAINING, TRAINING)
        case "fd":
            return fd(groups, CLASSES, TRAINING)
        case "ds_fl":
            return ds_fl(groups, models["small"], OpenExamples(9, 6), TRAINING, TRAINING)
        case "kt_pfl":
            return kt_pfl(groups, OpenExamples(9, 6), TRAINING, TRAINING)
        case "fml":
            return fml(groups, models["small"], TRAINING)
        case "fed_avg on a graph":
            return decentralised_fed_avg(groups, ROUNDS, complete(4), STEP_TRAINING)
        case "periodic on a graph":
            distillation = LocalTraining(optax.sgd, batch_size=3)
            return decentralised_periodic_codistillation(
                groups, PublicAnswers(9, 6), ROUNDS, complete(4), STEP_TRAINING, distillation
            )


def records(algorithm):
    data = resident_data(DATA, ROWS)
    experiment = Experiment(algorithm, data, {"test": DATA}, ROUNDS, evaluate_every=ROUNDS)
    return [
        {key: record[key] for key in ("round", "model", "loss", "accuracy")}
        for record in run_experiment(experiment, show_progress=False).records
        if "accuracy" in record
    ]


NAMES = ("merged", "periodic", "fed_df", "fed_sdd", "fed_sdd, cached")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_layers_change_nothing_for_who_learns_from_logits(name):
    assert_alike(
        records(algorithms(name, lambda hidden, own=own: averaged(hidden, own)))
        for own in (False, True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fed_md", "fd", "ds_fl", "kt_pfl", "fml", "fed_avg on a graph", "periodic on a graph"]
)
def test_layers_change_nothing_for_parties(name):
    assert_alike(records(of_parties(name, layered)) for layered in (False, True))


def assert_alike(both):
    plain, layered = both
    assert len(plain) == len(layered) > 2
    for one, other in zip(plain, layered, strict=True):
        assert one.pop("model") == other.pop("model")
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_students_of_fed_kd_are_taught_on_unlabelled_data_too(name):
    found = records(algorithms(name, teachers_and_students))
    models = {record["model"] for record in found}
    assert {f"{each}_teachers" for each in ("main" if "sdd" in name else "small",)} <= models
    assert all(np.isfinite(record["loss"]) for record in found)
    moved = {r["model"] for r in found if r["round"] == ROUNDS} - {"ensemble"}
    first = {r["model"]: r["loss"] for r in found if r["round"] == 0}
    last = {r["model"]: r["loss"] for r in found if r["round"] == ROUNDS}
    assert all(first[model] != last[model] for model in moved if model in first)
