"""Runs of a private method on clients of a few examples, for tests of its sums and of its accounting."""

import functools

import numpy as np
import optax
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.local_training import LocalTraining
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

SIZES, FEATURES, CLASSES = (3, 5, 2, 4, 6, 3), 4, 3
RATE, CLIP = 0.3, 0.05
TRAINING = LocalTraining(batch_size=max(SIZES))
MODEL = softmax_regression(FEATURES, CLASSES)
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)
AVERAGING = fed_avg(MODEL, TRAINING, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))


def run(algorithm, rounds=1, data_sets=None, workdir=None, evaluate_every=1, **settings):
    source = resident_data(federated(), data_sets or {})
    experiment = Experiment(
        algorithm, source, {"train": federated()}, rounds, evaluate_every=evaluate_every, **settings
    )
    return run_experiment(experiment, workdir, show_progress=False)


def one_pool(method, cohort_size=4, poisson=None, rounds=1, **settings):
    pools = {"pool": Pool(method, np.arange(len(SIZES)), cohort_size, poisson)}
    return run(independent_pools(pools, federated().columns), rounds, **settings)
