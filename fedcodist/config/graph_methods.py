"""From a config's `parties` and `algorithm` to a method of clients of a graph: MHD and its baselines."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from fedcodist.algorithms.graph import graphs
from fedcodist.algorithms.graph.centralised import centralised
from fedcodist.algorithms.graph.decentralised_fed_avg import decentralised_fed_avg
from fedcodist.algorithms.graph.decentralised_periodic_codistillation import (
    DecentralisedPeriodicHyper,
    PublicAnswers,
    decentralised_periodic_codistillation,
)
from fedcodist.algorithms.graph.local_only_steps import LocalOnlyStepsHyper, local_only_steps
from fedcodist.algorithms.graph.mhd_costs import memory_for_checkpoints
from fedcodist.algorithms.graph.mhd_exchange import CheckpointExchange
from fedcodist.algorithms.graph.mhd_losses import HeadDistillation
from fedcodist.algorithms.graph.multi_headed_distillation import (
    MHDHyper,
    multi_headed_distillation,
)
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data import Data
from fedcodist.config.execution import execution_of
from fedcodist.config.party_methods import public_of
from fedcodist.core.checks import check_number
from fedcodist.core.local_steps import StepTraining
from fedcodist.core.local_training import LocalTraining
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


def build_multi_headed(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """MHD as a config describes it."""
    settings = config.algorithm
    exchange = CheckpointExchange(
        settings.checkpoints_per_client, settings.checkpoints_on, settings.exchange_seed
    )
    # Every seed of a run has banks of its own, and every process on this machine.
    memory = memory_for_checkpoints(exchange, launch.processes_here()) // config.seeds
    distillation = HeadDistillation(
        settings.public_batch_size,
        settings.teachers,
        settings.candidates,
        settings.choice,
        settings.embedding_distance,
        settings.get("reaches_backbone", True),
        settings.get("updates_statistics", False),
        public_of(data).preprocess,
        exchange._replace(memory=memory),
    )
    algorithm = multi_headed_distillation(
        decentralised_groups(config, data, config.parties.heads, config.parties.projection),
        {"image": data.unlabelled},
        graph_of(config, data.splits["train"].num_clients),
        config.rounds,
        _training(config, data),
        distillation,
        MHDHyper(_rate(config), settings.embedding_weight, settings.head_weight),
        execution=execution_of(config),
        same_start=_same_start(config),
    )
    if config.seeds == 1:
        return algorithm
    notes = (f"{note}, for each of {config.seeds} seeds" for note in algorithm.notes)
    return algorithm._replace(notes=tuple(notes))


def build_local_only_steps(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """Clients alone."""
    return local_only_steps(
        _main_only(decentralised_groups(config, data)),
        config.rounds,
        _training(config, data),
        hyper=LocalOnlyStepsHyper(_rate(config)),
        execution=execution_of(config),
        same_start=_same_start(config),
    )


def build_centralised(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """One model of each architecture on all examples; which these are, `pooled_examples` says."""
    if config.data.get("public_share") == 1:
        raise ValueError(
            "data.public_share must be below 1 for pooled, or private images count twice."
        )
    return centralised(
        _main_only(decentralised_groups(config, data)),
        len(pooled_examples(data)["label"]),
        config.rounds,
        _training(config, data),
        LocalOnlyStepsHyper(_rate(config)),
        execution_of(config),
    )


def build_fed_avg(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """FedAvg among clients of one architecture, every `training.steps` steps.

    Where everybody is joined with everybody a server's messages are counted, one model each way.
    """
    is_complete = config.parties.graph.get("name") == "complete"
    return decentralised_fed_avg(
        _main_only(decentralised_groups(config, data)),
        config.rounds,
        None if is_complete else graph_of(config, data.splits["train"].num_clients),
        _training(config, data),
        LocalOnlyStepsHyper(_rate(config)),
        execution_of(config),
        same_start=_same_start(config, default=True),
    )


def build_periodic(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """Neighbours' models teach each other every `algorithm.period` rounds."""
    settings = config.algorithm
    check_number("algorithm.distillation_learning_rate", settings.distillation_learning_rate, low=0)
    return decentralised_periodic_codistillation(
        _main_only(decentralised_groups(config, data)),
        PublicAnswers(
            len(data.unlabelled), settings.examples, settings.period, config.evaluation.batch_size
        ),
        config.rounds,
        graph_of(config, data.splits["train"].num_clients),
        _training(config, data),
        LocalTraining(
            functools.partial(optax.adam, eps=1e-5),
            settings.public_batch_size,
            preprocess=public_of(data).preprocess,
        ),
        DecentralisedPeriodicHyper(
            _rate(config), settings.distillation_learning_rate, settings.temperature
        ),
        execution_of(config),
        same_start=_same_start(config),
    )


DECENTRALISED_METHODS: dict[str, Callable[[ConfigDict, Data], FederatedAlgorithm]] = {
    "multi_headed_distillation": build_multi_headed,
    "local_only_steps": build_local_only_steps,
    "centralised": build_centralised,
    "decentralised_fed_avg": build_fed_avg,
    "decentralised_periodic_codistillation": build_periodic,
}


def decentralised_groups(
    config: ConfigDict, data: Data, heads: int = 0, projection: int | None = None
) -> dict[str, PartyGroup]:
    """Who has which network: backbone's name -> its clients.

    Args:
      config, data: of the run.
      heads: auxiliary ones.
      projection: width of the embeddings' map, which MHD alone needs.
    """
    names, count = backbone_names(config), data.splits["train"].num_clients
    if len(names) != count:
        raise ValueError(
            f"parties.networks must be one name or {count}, one per client (data.num_clients), got "
            f"{len(names)}."
        )
    size = image_shape(data)
    classes = public_of(data).num_classes
    groups = {}
    for name in dict.fromkeys(names):
        backbone = choice("parties.networks", name, BACKBONES)()
        model = multi_headed(backbone, jnp.zeros((1, *size)), classes, heads, projection)
        groups[name] = PartyGroup(model, np.flatnonzero(np.array(names) == name))
    return groups


def backbone_names(config: ConfigDict) -> tuple[str, ...]:
    """Every client's backbone, in their order."""
    networks = config.parties.networks
    if isinstance(networks, str):
        return (networks,) * config.data.num_clients
    return tuple(networks)


def graph_of(config: ConfigDict, num_clients: int) -> np.ndarray:
    """The graph that `parties.graph` names: a name and its function's arguments.

    "time_varying" has `graphs`, each of them again a name and arguments, and `every`, the rounds that
    each of them lasts.
    """
    return _graph("parties.graph", config.parties.graph, num_clients)


def pooled_examples(data: Data) -> dict[str, np.ndarray]:
    """All clients' examples and the public ones, with labels.

    Public ones of other classes than any client's, such as FedMD's, are left out: they would teach what
    no test asks for.
    """
    private, public = data.splits["train"].all_examples(), public_of(data).train.all_examples()
    parts = [private]
    if np.isin(public["label"], private["label"]).any():
        parts.append(public)
    return {name: np.concatenate([part[name] for part in parts]) for name in ("image", "label")}


def image_shape(data: Data) -> tuple[int, ...]:
    """The shape of an image as networks see it, after preprocessing."""
    images = data.splits["train"].columns["image"]
    batch = {"image": jax.ShapeDtypeStruct((1, *images.shape[1:]), images.dtype)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    seen = jax.eval_shape(data.preprocess, batch, key, jax.ShapeDtypeStruct((1,), jnp.int32))
    return seen["image"].shape[1:]


def _graph(setting: str, described: Mapping[str, Any], num_clients: int) -> np.ndarray:
    settings = {name: value for name, value in dict(described).items() if value is not None}
    name = settings.pop("name", None)
    if name == "time_varying":
        _check_names(setting, name, settings, {"graphs", "every"}, {"graphs"})
        several = [
            _graph(f"{setting}.graphs[{index}]", each, num_clients)
            for index, each in enumerate(settings.pop("graphs"))
        ]
        return graphs.time_varying(several, num_clients, **settings)
    make = choice(f"{setting}.name", name, GRAPHS)
    needed = set(inspect.signature(make).parameters) - {"num_clients"}
    _check_names(setting, name, settings, needed, needed)
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


def _main_only(groups: Mapping[str, PartyGroup]) -> dict[str, PartyGroup]:
    return {n: group._replace(model=main_head_only(group.model)) for n, group in groups.items()}


def _training(config: ConfigDict, data: Data) -> StepTraining:
    settings = config.training
    check_number("training.momentum", settings.momentum, low=0, high=1)
    return StepTraining(
        functools.partial(optax.sgd, momentum=settings.momentum),
        settings.batch_size,
        settings.steps,
        data.preprocess,
    )


def _same_start(config: ConfigDict, default: bool = False) -> bool:
    """Whether clients of one architecture start from the same values."""
    value = config.algorithm.get("same_start", default)
    if not isinstance(value, bool):
        raise TypeError(f"algorithm.same_start must be True or False, got {value!r}.")
    return value


def _rate(config: ConfigDict) -> float:
    check_number("training.learning_rate", config.training.learning_rate, low=0)
    return config.training.learning_rate
