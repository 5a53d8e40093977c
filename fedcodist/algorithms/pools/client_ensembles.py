"""Ensembles of one round's client models, beside which FedSDD sets its own (table 5)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.pools.pool import Pool, check_client_models
from fedcodist.core.checks import check_several, shown
from fedcodist.core.model import Variables
from fedcodist.distillation.ensembles import (
    Ensemble,
    concatenated,
    dirichlet_samples,
    equal_weights,
    gaussian_samples,
)

CLIENT_ENSEMBLES = ("clients", "gaussian", "dirichlet")
SAMPLES = 10  # models drawn for the last two


class ClientModels(NamedTuple):
    """The clients' models of the last round, kept to be measured.

    Attributes:
      received: the main model, from which its own group's clients started.
      average: what that model became, before distillation.
      members: the clients' models of all groups, leaves [cohort, ...].
      key: uint32, data of the key that draws samples around them.
    """

    received: Variables
    average: Variables
    members: Variables
    key: jax.Array


def client_ensemble(kind: str, clients: ClientModels) -> Ensemble:
    """An ensemble of the clients' models.

    Args:
      kind: 'clients', these alone; 'gaussian' or 'dirichlet', with their average and ten models sampled
        around them (FedBE).
      clients: the round's.
    """
    if kind == "clients":
        return equal_weights(clients.members)
    key = jax.random.wrap_key_data(jnp.asarray(clients.key))
    if kind == "gaussian":
        samples = gaussian_samples(key, clients.received, clients.members, SAMPLES)
    else:
        samples = dirichlet_samples(key, clients.members, SAMPLES)
    average = jax.tree.map(lambda leaf: leaf[None], clients.average)
    return concatenated(*(equal_weights(each) for each in (clients.members, average, samples)))


def check_client_ensembles(name: str, kinds: Sequence[str], pool: Pool, num_models: int) -> None:
    """Raises one line for kinds that do not exist, or not for this pool or number of models."""
    if isinstance(kinds, str):
        raise TypeError(f"{name} must be several of {CLIENT_ENSEMBLES}, got the string {kinds!r}.")
    check_several(name, kinds)
    kinds = list(kinds)
    if unknown := [kind for kind in kinds if kind not in CLIENT_ENSEMBLES]:
        raise ValueError(f"{name} must be among {CLIENT_ENSEMBLES}, got {shown(unknown)}.")
    if num_models > 1 and (around := sorted(set(kinds) & {"dirichlet", "gaussian"})):
        raise ValueError(
            f"{name} must not name {around} with num_models above 1: between models that began apart "
            "there is nothing to sample."
        )
    if kinds:
        check_client_models({"pool": pool})
