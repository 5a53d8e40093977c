"""From a config's `training` and a pool to how its clients train.

`training.method` names it, FedAvg where it is not set.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from ml_collections import ConfigDict

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, constant, fed_avg, linear_decay
from fedcodist.algorithms.clients.fed_dropout import fed_dropout
from fedcodist.algorithms.clients.fed_gkd import FedGKDHyper, fed_gkd
from fedcodist.algorithms.clients.fed_kd import FedKDHyper, fed_kd
from fedcodist.algorithms.clients.fed_kd_losses import MutualLosses
from fedcodist.algorithms.clients.fed_prox import FedProxHyper, fed_prox
from fedcodist.algorithms.clients.fetch_sgd import FetchSGDHyper, fetch_sgd
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data import Data
from fedcodist.config.execution import as_executed
from fedcodist.config.networks import MODELS, image_model, model_of, submodel_of
from fedcodist.config.optimizers import optimizer_of
from fedcodist.core.checks import check_number
from fedcodist.core.layer_outputs import with_layers
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model


def client_method(
    config: ConfigDict, data: Data, model: Model, pool: ConfigDict, num_clients: int
) -> FederatedMethod:
    """How a pool's clients train and what its server makes of it."""
    clients = Clients(
        config,
        data,
        model,
        pool,
        num_clients,
        local_training(config, data),
        server_settings(config),
        FedAvgHyper(pool.client_learning_rate, pool.server_learning_rate),
    )
    name = config.training.get("method", "fed_avg")
    return choice("training.method", name, CLIENT_METHODS)(clients)


def local_training(config: ConfigDict, data: Data) -> LocalTraining:
    """The clients' optimizer, batches, epochs and preprocessing."""
    training = config.training
    return LocalTraining(
        optimizer_of("training.client_optimizer", training.client_optimizer),
        training.batch_size,
        training.epochs,
        data.preprocess,
    )


def server_settings(config: ConfigDict) -> dict[str, Any]:
    """The server's optimizer and its schedule, as methods' arguments."""
    training = config.training
    schedules = {"constant": constant, "linear_decay": linear_decay(config.rounds)}
    return dict(
        server_optimizer=optimizer_of(
            "training.server_optimizer", training.server_optimizer, training.server_epsilon
        ),
        schedule=choice("training.server_schedule", training.server_schedule, schedules),
    )


class Clients(NamedTuple):
    """What a client method is made of: the config, a pool of it, and what all methods need.

    Attributes:
      config, data, model, pool, num_clients: of the pool.
      local: how clients train.
      server: the server's optimizer and its schedule, as methods' arguments.
      rates: clients' and the server's.
    """

    config: ConfigDict
    data: Data
    model: Model
    pool: ConfigDict
    num_clients: int
    local: LocalTraining
    server: dict[str, Any]
    rates: FedAvgHyper


def _refuse_text(data: Data, method: str) -> None:
    """Raises one line for text to be continued; encoded sentences have networks of their own."""
    if data.text is not None:
        raise ValueError(f"training.method must be another than {method}, for text.")


def _fed_avg(clients: Clients) -> FederatedMethod:
    return fed_avg(clients.model, clients.local, hyper=clients.rates, **clients.server)


def _fed_prox(clients: Clients) -> FederatedMethod:
    weight = clients.config.training.proximal_weight
    check_number("training.proximal_weight", weight, low=0)
    hyper = FedProxHyper(*clients.rates, weight)
    return fed_prox(clients.model, clients.local, hyper=hyper, **clients.server)


def _fed_gkd(clients: Clients) -> FederatedMethod:
    _refuse_text(clients.data, "fed_gkd, whose clients learn from logits")
    settings = clients.config.training.fed_gkd
    hyper = FedGKDHyper(*clients.rates, settings.weight, settings.temperature)
    with named("training.fed_gkd: "):
        return fed_gkd(
            clients.model, clients.local, settings.models_kept, hyper=hyper, **clients.server
        )


def _scaffold(clients: Clients) -> FederatedMethod:
    with named("training.scaffold_"):
        return scaffold(
            clients.model,
            clients.num_clients,
            clients.local,
            clients.config.training.scaffold_option,
            hyper=clients.rates,
            **clients.server,
        )


def _fetch_sgd(clients: Clients) -> FederatedMethod:
    settings = clients.config.training.fetch_sgd
    hyper = FetchSGDHyper(clients.pool.server_learning_rate, settings.momentum)
    sketch = {name: value for name, value in settings.items() if name != "momentum"}
    with named("training.fetch_sgd: "):
        return fetch_sgd(
            clients.model,
            clients.local,
            **sketch,
            schedule=clients.server["schedule"],
            hyper=hyper,
        )


def _fed_dropout(clients: Clients) -> FederatedMethod:
    _refuse_text(clients.data, "fed_dropout, whose parts are cut out of chains of layers")
    model, share = clients.model, clients.config.training.fed_dropout.share
    submodel, units = submodel_of(clients.data, clients.pool.model, share, model)
    submodel = as_executed(clients.config, submodel)
    with named("training.fed_dropout: "):
        return fed_dropout(
            model, submodel, units, clients.local, hyper=clients.rates, **clients.server
        )


def _fed_kd(clients: Clients) -> FederatedMethod:
    """The pool's model is the student; `training.fed_kd` names the teacher and the layers to align."""
    config, data = clients.config, clients.data
    _refuse_text(data, "fed_kd, which aligns layers that these networks do not show")
    settings = config.training.fed_kd
    train = data.splits["train"]

    def network(setting, name, layers):
        if data.models is not None:  # they show all of their layers
            return as_executed(config, model_of(config, data, setting, name))
        image_model(setting, name, data)  # a mistake is told by its setting
        create, shape = MODELS[name]
        with named(f"training.fed_kd.{layers}: "):
            model = with_layers(create(), jnp.zeros((1, *shape)), settings[layers])
        return as_executed(config, model)

    teacher = network("training.fed_kd.teacher", settings["teacher"], "teacher_layers")
    student = network("a pool's model for fed_kd", clients.pool.model, "student_layers")
    with named("training.fed_kd: "):
        return fed_kd(
            teacher,
            student,
            train.columns,
            clients.local,
            settings["exchange"],
            settings.get("fresh_optimizers", False),
            MutualLosses(
                **{name: settings[name] for name in MutualLosses._fields if name in settings}
            ),
            FedKDHyper(
                settings["teacher_learning_rate"],
                clients.pool.client_learning_rate,
                settings["output_weight"],
                settings["hidden_weight"],
            ),
        )


CLIENT_METHODS: dict[str, Callable[[Clients], FederatedMethod]] = {
    "fed_avg": _fed_avg,
    "fed_prox": _fed_prox,
    "fed_gkd": _fed_gkd,
    "scaffold": _scaffold,
    "fetch_sgd": _fetch_sgd,
    "fed_dropout": _fed_dropout,
    "fed_kd": _fed_kd,
}
