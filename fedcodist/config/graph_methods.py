"""Builds methods of clients on a graph, MHD and its baselines, from a config.

OFFERS makes the arguments of a method that are not settings. The others are settings of `algorithm`.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from fedcodist.algorithms.graph import graphs
from fedcodist.algorithms.graph.mhd_costs import memory_for_checkpoints
from fedcodist.algorithms.graph.mhd_exchange import CheckpointExchange
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.config.bind import bind, offered
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data import Data
from fedcodist.config.execution import execution_of
from fedcodist.config.party_methods import num_parties, public_of
from fedcodist.config.referenced_networks import classes_of, example_of, referenced_module
from fedcodist.config.references import choice_or_reference, is_reference
from fedcodist.config.registry import algorithm_entry, function_of
from fedcodist.core.checks import check_number, check_several, shown
from fedcodist.core.local_steps import StepTraining
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.models import MLP, NormalizedCNN, ResNet
from fedcodist.models.fed_md import TABLE_1, FedMDNetwork, narrower
from fedcodist.models.multi_headed import main_head_only, multi_headed
from fedcodist.models.resnet_imagenet import resnet18, resnet34
from fedcodist.run import launch

BACKBONES: dict[str, Callable[[], Any]] = {
    "digits_small": lambda: MLP((32,), classes=None),
    "digits_large": lambda: MLP((128, 64), classes=None),
    "normalized_cnn": lambda: NormalizedCNN(16, None),
    "normalized_cnn_wide": lambda: NormalizedCNN(32, None),
    "resnet8_narrow": lambda: ResNet(1, None, width=8),
    "resnet8": lambda: ResNet(1, None),
    "resnet20": lambda: ResNet(3, None),
    "resnet18": lambda: resnet18(classes=None),
    "resnet34": lambda: resnet34(classes=None),
    # The ten networks of configs/cifar_fed_md_small.py, an eighth as wide as the paper's.
    **{
        "fed_md_" + "_".join(map(str, widths)): functools.partial(FedMDNetwork, widths, 0.0, None)
        for widths, _ in narrower(TABLE_1, 8)
    },
}
GRAPHS: dict[str, Callable[..., np.ndarray]] = {
    "complete": graphs.complete,
    "directed_cycle": graphs.directed_cycle,
    "islands": graphs.islands,
    "random": graphs.random_graph,
}
_READ_OF_TRAINING = ("batch_size", "learning_rate", "momentum", "steps")


def build_on_graph(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """The method of clients on a graph that a config's `algorithm` names."""
    function = function_of(algorithm_entry(config))
    given = offered(function, OFFERS, config, data)
    algorithm = bind(function, config.algorithm, "algorithm.", **given)
    if config.seeds == 1:
        return algorithm
    notes = (f"{note}, for each of {config.seeds} seeds" for note in algorithm.notes)
    return algorithm._replace(notes=tuple(notes))


def decentralised_groups(
    config: ConfigDict, data: Data, heads: int = 0, projection: int | None = None
) -> dict[str, PartyGroup]:
    """Which clients have which network: backbone's name -> its group.

    A user's backbone is a reference to a function that returns a Flax linen module, whose outputs are
    embeddings [batch, width].

    Args:
      config, data: of the run.
      heads: the number of auxiliary heads.
      projection: width to which embeddings are projected; only MHD needs it.
    """
    names, count = backbone_names(config), data.splits["train"].num_clients
    if len(names) != count:
        raise ValueError(
            f"parties.networks must be one name or {count}, one per client (data.num_clients), got "
            f"{len(names)}."
        )
    size = image_shape(data)
    classes = classes_of(data)
    groups = {}
    for name in dict.fromkeys(names):
        if is_reference(name):
            backbone = referenced_module("parties.networks", name, data)
        else:
            backbone = choice_or_reference("parties.networks", name, BACKBONES)()
        model = multi_headed(backbone, jnp.zeros((1, *size)), classes, heads, projection)
        groups[name.replace(":", ".")] = PartyGroup(model, np.flatnonzero(np.array(names) == name))
    return groups


def backbone_names(config: ConfigDict) -> tuple[str, ...]:
    """Every client's backbone, in their order."""
    networks = config.parties.networks
    if isinstance(networks, str):
        return (networks,) * num_parties(config)
    return tuple(networks)


def graph_of(config: ConfigDict, num_clients: int) -> np.ndarray:
    """The graph that `parties.graph` describes by a name and the arguments of its function.

    "time_varying" has `graphs`, a list of such descriptions, and `every`, the number of rounds that each
    graph lasts.
    """
    return _graph("parties.graph", config.parties.graph, num_clients)


def centralised_examples(data: Data) -> dict[str, np.ndarray]:
    """All clients' examples and the public ones, with labels.

    Public examples are left out if no client has any of their classes, as in FedMD's data, since these
    classes are not tested.
    """
    private, public = data.splits["train"].all_examples(), public_of(data).train.all_examples()
    parts = [private]
    if np.isin(public["label"], private["label"]).any():
        parts.append(public)
    return {name: np.concatenate([part[name] for part in parts]) for name in ("image", "label")}


def image_shape(data: Data) -> tuple[int, ...]:
    """The shape of an image as networks see it, after preprocessing."""
    return example_of(data).shape[1:]


def _graph(setting: str, described: Mapping[str, Any], num_clients: int) -> np.ndarray:
    if not isinstance(described, Mapping | ConfigDict):
        raise TypeError(
            f"{setting} must be a graph's name and settings, such as dict(name='complete'), got "
            f"{shown(described)}."
        )
    settings = {name: value for name, value in dict(described).items() if value is not None}
    name = settings.pop("name", None)
    if name == "time_varying":
        _check_names(setting, name, settings, {"graphs", "every"}, {"graphs"})
        check_several(f"{setting}.graphs", settings["graphs"])
        several = [
            _graph(f"{setting}.graphs[{index}]", description, num_clients)
            for index, description in enumerate(settings.pop("graphs"))
        ]
        return graphs.time_varying(several, num_clients, **settings)
    make = choice(f"{setting}.name", name, {**GRAPHS, "time_varying": graphs.time_varying})
    needed = set(inspect.signature(make).parameters) - {"num_clients"}
    _check_names(setting, name, settings, needed, needed)
    if num_clients < 2:
        raise ValueError(f"parties must be at least 2 clients on a graph, got {num_clients}.")
    with named(f"{setting}."):
        return make(num_clients, **settings)


def _check_names(
    setting: str, name: str, given: Iterable[str], known: Set[str], needed: Set[str]
) -> None:
    given = set(given)
    allowed = f"it has {', '.join(['name', *sorted(known)])}"
    if missing := sorted(needed - given):
        raise ValueError(
            f"{setting} must have {missing[0]!r} where its name is {name!r}: {allowed}."
        )
    if unknown := sorted(given - known):
        raise ValueError(
            f"{setting} must not have {unknown[0]!r} where its name is {name!r}: {allowed}."
        )


def _groups(config: ConfigDict, data: Data) -> dict[str, PartyGroup]:
    """Groups of clients; their models have auxiliary heads where the method reads these."""
    if "heads" in algorithm_entry(config).reads:
        return decentralised_groups(config, data, config.parties.heads, config.parties.projection)
    groups = decentralised_groups(config, data)
    return {n: group._replace(model=main_head_only(group.model)) for n, group in groups.items()}


def _training(config: ConfigDict, data: Data) -> StepTraining:
    settings = config.training
    for name, value in settings.items():
        is_group = isinstance(value, ConfigDict)
        if value is not None and not is_group and name not in _READ_OF_TRAINING:
            raise ValueError(
                f"training.{name} must be left out on a graph, whose clients take steps of SGD and read "
                f"{', '.join(_READ_OF_TRAINING)}."
            )
    check_number("training.momentum", settings.momentum, low=0, high=1)
    return StepTraining(
        functools.partial(optax.sgd, momentum=settings.momentum),
        settings.batch_size,
        settings.steps,
        data.preprocess,
    )


def _graph_or_server(config: ConfigDict, data: Data) -> np.ndarray | None:
    """The graph, or None for FedAvg on the complete graph.

    FedAvg then has a server, so that its messages count as one model each way.
    """
    graph = graph_of(config, data.splits["train"].num_clients)
    is_complete = config.parties.graph.get("name") == "complete"
    return None if is_complete and config.algorithm.name == "decentralised_fed_avg" else graph


def _num_shared(config: ConfigDict, data: Data) -> int | None:
    """The number of `centralised_examples`, where the method reads these."""
    if "shared" not in algorithm_entry(config).reads:
        return None
    if config.data.get("public_share") == 1:
        raise ValueError(
            "data.public_share must be below 1 for centralised, or private images count twice."
        )
    return len(centralised_examples(data)["label"])


def _exchange(config: ConfigDict) -> CheckpointExchange:
    """The exchange of checkpoints, with a share of the memory: each seed and process has its own."""
    settings = config.algorithm
    exchange = CheckpointExchange(
        settings.checkpoints_per_client, settings.checkpoints_on, settings.exchange_seed
    )
    memory = memory_for_checkpoints(exchange, launch.processes_here()) // config.seeds
    return exchange._replace(memory=memory)


def _public_batch_size(config: ConfigDict) -> int:
    """MHD's setting, or the one whose name a method's argument `distillation` has elsewhere."""
    of_distillation: int | None = config.algorithm.get("distillation_batch_size")
    return config.algorithm.public_batch_size if of_distillation is None else of_distillation


def _rate(config: ConfigDict) -> float:
    check_number("training.learning_rate", config.training.learning_rate, low=0)
    return config.training.learning_rate


# Some are fields of `hyper` and of `distillation`, which is on public examples.
OFFERS: dict[str, Callable[[ConfigDict, Data], Any]] = {
    "groups": _groups,
    "num_rounds": lambda config, data: config.rounds,
    "graph": _graph_or_server,
    "training": _training,
    "learning_rate": lambda config, data: _rate(config),
    "num_shared": _num_shared,
    "public": lambda config, data: {"image": public_of(data).train.columns["image"]},
    "num_public": lambda config, data: public_of(data).train.num_examples,
    "distillation_batch_size": lambda config, data: _public_batch_size(config),
    "distillation_preprocess": lambda config, data: public_of(data).preprocess,
    "exchange": lambda config, data: _exchange(config),
    "inference_batch_size": lambda config, data: config.evaluation.batch_size,
    "execution": lambda config, data: execution_of(config),
    "name": lambda config, data: config.algorithm.name,
}
