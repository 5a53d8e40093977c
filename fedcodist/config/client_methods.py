"""Builds the method of a pool's clients from a config's `training`.

`training.method` names the method; the default is FedAvg. OFFERS makes the arguments of a method that
are not settings. The others are settings of the group `training.<its name>`, or of `training` if there
is no such group.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedcodist.config.bind import accepted, bind, is_library_function, offered
from fedcodist.config.config_errors import named
from fedcodist.config.data import Data
from fedcodist.config.execution import as_executed
from fedcodist.config.networks import model_of, module_of, submodel_of
from fedcodist.config.optimizers import optimizer_of, with_momentum
from fedcodist.config.privacy import example_privacy_of
from fedcodist.config.references import choice_or_reference
from fedcodist.config.registry import Entry, client_entry, function_of
from fedcodist.core.layer_outputs import with_layers
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Model
from fedcodist.core.schedules import constant, linear_decay


class Clients(NamedTuple):
    """What a client method is built from; `model` and `num_clients` are those of the pool."""

    config: ConfigDict
    data: Data
    model: Model
    pool: ConfigDict
    num_clients: int


# `training.proximal_weight` is FedProx's, which is far smaller than theirs.
_OTHER_PROXIMAL_WEIGHT = ("ditto", "p_fed_me")
# Settings of `training` that count with any method. A user's method may have arguments of these names.
_OF_ALL_METHODS = (
    "method",
    "client_optimizer",
    "momentum",
    "batch_size",
    "epochs",
    "server_optimizer",
    "server_epsilon",
    "server_schedule",
    "compression",
    "privacy",
    "example_privacy",
    "secure_sum",
)


def client_method(clients: Clients) -> FederatedMethod:
    """Builds the method by which a pool's clients train and its server aggregates their updates."""
    entry, training = client_entry(clients.config), clients.config.training
    check_not_text("training.method", entry, clients.data)
    function, settings, prefix = function_of(entry), training, "training."
    is_ours = is_library_function(function)
    has_other_weight = is_ours and entry.name in _OTHER_PROXIMAL_WEIGHT
    if isinstance(training.get(entry.name), ConfigDict):
        settings, prefix = training[entry.name], f"training.{entry.name}."
    elif has_other_weight:
        settings = {name: value for name, value in training.items() if name != "proximal_weight"}
    given = offered(function, OFFERS, clients, of_the_library=_OFFERS_TO_SINGLE_METHODS)
    if settings is not training and not has_other_weight:
        read = set(given) if is_ours else {*given, *_OF_ALL_METHODS}
        for name in sorted(accepted(function, given) & set(training) - read):
            raise ValueError(
                f"training.{name} is not read beside the group training.{entry.name}: set it there."
            )
    for rate in ("client_learning_rate", "server_learning_rate"):
        if not is_ours and rate not in given:
            warnings.warn(f"pools.*.{rate} is not read by {function.__name__}.", stacklevel=2)
    made = {LocalTraining: functools.partial(_further_training, clients)}
    return bind(function, settings, prefix, made=made, **given)


def check_not_text(setting: str, entry: Entry, data: Data) -> None:
    """Raises ValueError that names the setting if the data are text and the method needs images."""
    if data.text is not None and "logits" in entry.reads:
        raise ValueError(
            f"{setting} must be another than {entry.name}, which reads models' logits or cuts or aligns "
            "their layers, for text."
        )


def local_training(config: ConfigDict, data: Data) -> LocalTraining:
    """The clients' optimizer, batches, epochs and preprocessing.

    Raises:
      ValueError, TypeError: names a setting that is not allowed, or that only methods on a graph have.
    """
    training = config.training
    instead = {"learning_rate": "pools.<name>.client_learning_rate", "steps": "training.epochs"}
    for name in sorted(instead.keys() & training.keys()):
        raise ValueError(
            f"training.{name} is not a setting of methods with pools: use {instead[name]}."
        )
    setting, name = "training.client_optimizer", training.client_optimizer
    momentum = training.get("momentum")
    return LocalTraining(
        with_momentum(optimizer_of(setting, name), momentum, (setting, "training.momentum"), name),
        training.batch_size,
        training.epochs,
        data.preprocess,
        example_privacy_of(config),
    )


def _further_training(clients: Clients, argument: str, fields: dict[str, Any]) -> LocalTraining:
    """The local training of the argument of a user's method: the clients', but for these fields."""
    if isinstance(name := fields.get("optimizer"), str):
        fields = fields | {"optimizer": optimizer_of(f"{argument}.optimizer", name)}
    return local_training(clients.config, clients.data)._replace(**fields)


def server_optimizer(config: ConfigDict) -> Any:
    """A function that makes the server's optimizer from a learning rate."""
    training = config.training
    name, epsilon = training.server_optimizer, training.server_epsilon
    return optimizer_of("training.server_optimizer", name, epsilon)


def server_schedule(config: ConfigDict) -> Any:
    """A function: (the server's learning rate, round) -> the learning rate in this round."""
    schedules = {"constant": constant, "linear_decay": linear_decay(config.rounds)}
    return choice_or_reference(
        "training.server_schedule", config.training.server_schedule, schedules
    )


def _submodel(clients: Clients) -> tuple[Model, Any]:
    """The smaller model of Federated Dropout's clients, and the layers by which it is cut out."""
    share = clients.config.training.fed_dropout.share
    part, layers = submodel_of(clients.data, clients.pool.model, share, clients.model)
    return as_executed(clients.config, part), layers


def _fed_kd_network(clients: Clients, setting: str, name: str, layers: str) -> Model:
    """A network of FedKD that outputs its logits and the layers to align."""
    model = model_of(
        clients.config, clients.data, setting, name
    )  # made for images too, so that a message about the network names the setting
    if clients.data.models is not None:
        if (given := clients.config.training.fed_kd.get(layers)) is not None:
            raise ValueError(
                f"training.fed_kd.{layers} must be left out: these networks output all of their layers, "
                f"got {given!r}."
            )
        return as_executed(clients.config, model)
    layers_to_align = clients.config.training.fed_kd[layers]
    return _with_layers(clients, setting, name, f"training.fed_kd.{layers}", layers_to_align)


def _with_layers(
    clients: Clients, setting: str, name: str, prefix: str, layers: Sequence[str]
) -> Model:
    """The network that a setting names, with its logits and these layers as outputs."""
    if clients.config.algorithm.get("embedding_width") is not None:
        raise ValueError(
            f"algorithm.embedding_width must be None with {prefix}, whose networks have no embedding."
        )
    module, example = module_of(setting, name, clients.data)
    with named(f"{prefix}: "):
        return as_executed(clients.config, with_layers(module, example, layers))


def _model(clients: Clients) -> Model:
    """The pool's network; it outputs a layer too where a library's method names it as its `layer`."""
    training, entry = clients.config.training, client_entry(clients.config)
    settings, method = training.get(entry.name), entry.name
    layer = settings.get("layer") if isinstance(settings, ConfigDict) else None
    if layer is None or not is_library_function(function_of(entry)):
        return clients.model
    name, setting = f"a pool's model for {method}", f"training.{method}.layer"
    return _with_layers(clients, name, clients.pool.model, setting, [layer])


# Arguments that any method of clients may have, also one of a user's.
_OFFERS_TO_ALL: dict[str, Callable[[Clients], Any]] = {
    "model": _model,
    "num_clients": lambda clients: clients.num_clients,
    "columns": lambda clients: clients.data.splits["train"].columns,
    "training": lambda clients: local_training(clients.config, clients.data),
    "server_optimizer": lambda clients: server_optimizer(clients.config),
    "schedule": lambda clients: server_schedule(clients.config),
    "client_learning_rate": lambda clients: clients.pool.client_learning_rate,
    "server_learning_rate": lambda clients: clients.pool.server_learning_rate,
}
# Arguments of single methods of the library. In a user's method such a name is an ordinary setting.
_OFFERS_TO_SINGLE_METHODS: dict[str, Callable[[Clients], Any]] = {
    # FetchSGD's, whose clients have no learning rate.
    "learning_rate": lambda clients: clients.pool.server_learning_rate,
    # SCAFFOLD's, FedGKD's and Federated Dropout's.
    "option": lambda clients: clients.config.training.scaffold_option,
    "distillation_weight": lambda clients: clients.config.training.fed_gkd.weight,
    "submodel": lambda clients: _submodel(clients)[0],
    "layers": lambda clients: _submodel(clients)[1],
    # FedKD's; the pool's model is the student.
    "teacher": lambda clients: _fed_kd_network(
        clients,
        "training.fed_kd.teacher",
        clients.config.training.fed_kd.teacher,
        "teacher_layers",
    ),
    "student": lambda clients: _fed_kd_network(
        clients, "a pool's model for fed_kd", clients.pool.model, "student_layers"
    ),
    "student_learning_rate": lambda clients: clients.pool.client_learning_rate,
}
OFFERS = _OFFERS_TO_ALL | _OFFERS_TO_SINGLE_METHODS
