"""Builds methods of parties, who each have a model, from a config.

`parties.networks` is one name, or a list with each party's network. A network is (widths, dropout), a
name in `fedcodist.models.htfl.BACKBONES`, or a reference, "my_module:network" (see
`fedcodist.config.referenced_networks`). A single reference, or a single name in BACKBONES, is the
network of all parties. With a name in GROUPS, party i has the group's network i modulo the number of its
networks. With `parties.embedding_width` the named networks are `headed`: embeddings of one width and a
linear head, which methods of prototypes and of shared heads need. Networks of BACKBONES are always
headed, with a width of 512 where none is set.

OFFERS makes the arguments of a method that are not settings. The others are settings of `algorithm`.
`fedcodist.config.phases` runs the training before the method's first round.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.local_only import LocalOnlyParty
from fedcodist.compression.compressor import Compressor
from fedcodist.config.bind import bind, offered
from fedcodist.config.compression import links_of
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data import Data
from fedcodist.config.data_graph import PRIMARY
from fedcodist.config.data_parties import PUBLIC_PRIVATE
from fedcodist.config.execution import execution_of
from fedcodist.config.optimizers import optimizer_of
from fedcodist.config.party_privacy import party_noise_multiplier, private_sum
from fedcodist.config.referenced_networks import classes_of, example_of, referenced_model
from fedcodist.config.references import is_reference
from fedcodist.config.registry import algorithm_entry, function_of
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.models import htfl
from fedcodist.models.fed_md import (
    TABLE_1,
    TABLE_2,
    FedMDNetwork,
    FullyConnected,
    Shape,
    narrower,
    output_penalty,
)
from fedcodist.models.headed import Headed, headed
from fedcodist.privacy.private_parties import counted
from fedcodist.run.folder_check import PHASES

PyTree = Any
Network = Shape | str  # widths and dropout, one of BACKBONES, or a reference
# Party i has network i. A single width is a fully connected network, the weak party of FedMD's paper.
NETWORKS: dict[str, Sequence[Shape]] = {
    "table_1": TABLE_1,
    "table_2": TABLE_2,
    "digits": 2 * (Shape((8, 16), 0.1), Shape((64,), 0.0), Shape((32,), 0.0)),
}
# However many parties there are, party i has network i modulo the number of networks.
GROUPS: dict[str, Sequence[Network]] = {
    "digits_four": (
        Shape((8, 16), 0.0),
        Shape((4, 8), 0.0),
        Shape((64,), 0.0),
        Shape((32,), 0.0),
    ),
    **htfl.GROUPS,
}


def build_of_parties(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """The method of parties that a config's `algorithm` names."""
    function = function_of(algorithm_entry(config))
    given = offered(function, OFFERS, config, data)
    noise_multiplier = party_noise_multiplier(config, data.splits["train"].num_clients)
    if noise_multiplier is not None:
        given["reduce"] = private_sum(config, noise_multiplier)
    algorithm = bind(function, config.algorithm, "algorithm.", **given)
    if noise_multiplier is not None:
        algorithm = counted(algorithm, noise_multiplier)
    if config.get("phases") is not None and config.phases.stopping == "test_data":
        # The name is changed afterwards, since the draw of batches may depend on it.
        return algorithm._replace(name=f"{algorithm.name}, {PHASES} stopped on test data")
    return algorithm


def start(
    config: ConfigDict, data: Data, trained: dict[str, LocalOnlyParty], key: jax.Array
) -> PyTree:
    """The state of the config's method before its first round, with parties that were trained before.

    The optimizer's state of private training is kept where a method trains on private examples by an
    optimizer that lasts over rounds: FedMD in its revisit, as in the released code, and `local_only`.

    A method's state must be a dictionary architecture -> party, or have it as a field `models`. A party
    is Variables, or has these as `variables` and its optimizer's state as `revisit_state` or
    `optimizer_state`.

    Args:
      config, data: as `build_experiment` gets them.
      trained: architecture -> its parties after private training, leaves [group, ...].
      key: for other random parts of the state, such as a server's model.
    """
    state = build_of_parties(config, data).init(key)

    def continued(fresh: Any, party: LocalOnlyParty) -> Any:
        if isinstance(fresh, Variables):
            return party.variables
        lasting = {"revisit_state", "optimizer_state"} & set(fresh._fields)
        states = dict.fromkeys(lasting, party.optimizer_state)
        return fresh._replace(variables=party.variables, **states)

    parties = state if isinstance(state, dict) else state.models
    parties = {name: continued(fresh, trained[name]) for name, fresh in parties.items()}
    return parties if isinstance(state, dict) else state._replace(models=parties)


def public_of(data: Data) -> Any:
    """The data's public part; raises ValueError that names the data that have one."""
    if data.public is None:
        raise ValueError(
            f"data.name must be one of {sorted([*PUBLIC_PRIVATE, *PRIMARY])}, or return a Data with "
            "`public`, for methods that need public examples."
        )
    return data.public


def party_groups(config: ConfigDict, data: Data) -> dict[str, PartyGroup]:
    """Which parties have which network: architecture's name -> its group."""
    shapes, count = party_shapes(config), data.splits["train"].num_clients
    if len(shapes) != count:
        if unseen := config.data.get("unseen_clients"):
            raise ValueError(
                f"data.unseen_clients must be None where parties.networks has one network per party: "
                f"{len(shapes)} networks for {count} parties and {unseen} unseen clients."
            )
        raise ValueError(
            f"parties.networks must be {count}, one per party (data.num_parties), got {len(shapes)}."
        )
    groups = {}
    for shape in dict.fromkeys(shapes):
        model = _model_of(shape, data, embedding_width(config))
        clients = [party for party, network in enumerate(shapes) if network == shape]
        groups[shape_name(shape)] = PartyGroup(model, np.array(clients))
    return groups


def party_shapes(config: ConfigDict) -> tuple[Network, ...]:
    """Every party's network, in their order."""
    networks, divisor = config.parties.networks, config.parties.get("narrower", 1)
    check_integer("parties.narrower", divisor, low=1)
    if isinstance(networks, str):
        if networks in NETWORKS:
            return _narrower(NETWORKS[networks], divisor)
        if not is_reference(networks) and networks not in htfl.BACKBONES:
            group = choice("parties.networks", networks, {**GROUPS, **NETWORKS, **htfl.BACKBONES})
        else:
            group = (networks,)
        networks = [group[party % len(group)] for party in range(num_parties(config))]
    shapes: list[Network] = []
    for index, network in enumerate(networks):
        if isinstance(network, str):
            if not is_reference(network) and network not in htfl.BACKBONES:
                raise ValueError(
                    f"parties.networks[{index}] must be (widths, dropout), one of "
                    f"{sorted(htfl.BACKBONES)} or package.module:function, got {network!r}."
                )
            if divisor > 1 and network in htfl.BACKBONES:
                raise ValueError(
                    f"parties.narrower must be 1 for parties.networks {network!r}, got {divisor}."
                )
            shapes.append(network)
            continue
        shape = Shape(tuple(network[0]), network[1])
        if len(shape.widths) == 1 and shape.dropout:
            raise ValueError(
                f"parties.networks must have dropout 0 for fully connected networks, which have none, "
                f"got {tuple(shape)}."
            )
        shapes += _narrower([shape], divisor)
    return tuple(shapes)


def num_parties(config: ConfigDict) -> int:
    """The number of clients that the config's data will have.

    Raises:
      ValueError: no setting determines it.
    """
    data = config.data
    partition = data.get("partition") or {}
    for settings, name in (
        (data, "num_parties"),
        (partition, "num_clients"),
        (data, "num_clients"),
    ):
        if (count := settings.get(name)) is not None:
            return count - (data.get("unseen_clients") or 0)
    raise ValueError(
        "parties.networks must be a list, one network per party: no setting of data tells how many "
        "parties there are."
    )


def _narrower(shapes: Sequence[Shape], divisor: int) -> tuple[Shape, ...]:
    with named("parties.narrower: "):
        return narrower(shapes, divisor)


def _model_of(shape: Network, data: Data, width: int | None) -> Model:
    if is_reference(shape):
        return referenced_model("parties.networks", str(shape), data)
    example = jnp.zeros(example_of(data).shape)
    classes = classes_of(data)
    if isinstance(shape, str):
        backbone = htfl.htfl_backbone(shape, width or htfl.EMBEDDING_WIDTH)
        with named(f"parties.networks {shape!r}: "):
            return headed(backbone, example, classes)
    if width is not None:
        return headed(network_of(shape, None), example, classes, width)
    return from_flax_linen(network_of(shape, classes), example)


def party_optimizer(settings: ConfigDict) -> OptimizerFactory:
    """The optimizer that `algorithm.optimizer` names, with the config's epsilon if it has one."""
    name = settings.get("optimizer", "adam")
    return optimizer_of("algorithm.optimizer", name, settings.get("epsilon"))


def _generator_optimizer(settings: ConfigDict) -> OptimizerFactory:
    """The optimizer of FedGen's generator, which is another one than the parties'."""
    name = settings.get("generator_optimizer", "adam")
    return optimizer_of("algorithm.generator_optimizer", name, settings.get("epsilon"))


def output_penalty_of(config: ConfigDict) -> Callable[[Any, Any], Any]:
    """The gradient hook of `algorithm.output_penalty`; with 0 it needs no layer of a certain name."""
    weight = config.algorithm.output_penalty
    return output_penalty(weight) if weight else lambda gradient, params: gradient


def extra_shape(config: ConfigDict, setting: str) -> Network:
    """The network of a model beside the parties'; the setting is the index of a party that has it."""
    shapes, party = party_shapes(config), config.algorithm[setting]
    check_integer(f"algorithm.{setting}", party, low=0)
    if party >= len(shapes):
        raise ValueError(
            f"algorithm.{setting} must be one of the {len(shapes)} parties, whose network it is, "
            f"got {party}."
        )
    return shapes[party]


def _extra_model(config: ConfigDict, data: Data, setting: str) -> Model:
    return _model_of(extra_shape(config, setting), data, embedding_width(config))


def _small_model(config: ConfigDict, data: Data) -> Model:
    """FedMRL's shared model, a party's network with an embedding of `algorithm.small_width`."""
    width = embedding_width(config)
    if width is not None and config.algorithm.small_width > width:
        raise ValueError(
            f"algorithm.small_width must be at most parties.embedding_width={width}, got "
            f"{config.algorithm.small_width}."
        )
    return _model_of(extra_shape(config, "small"), data, config.algorithm.small_width)


def _links(config: ConfigDict) -> tuple[Compressor | None, Compressor | None]:
    """FedKD's compressors of uplink and downlink."""
    settings = config.algorithm.get("compression")
    return (None, None) if settings is None else links_of(settings, "algorithm.compression")


def embedding_width(config: ConfigDict) -> int | None:
    """`parties.embedding_width`, or None where networks end in an output layer of their own."""
    return config.parties.get("embedding_width")


def module_of(shape: Network, classes: int, width: int | None) -> Any:
    """A network's module as parties have it, with a linear head where embeddings have a width.

    Raises:
      ValueError: it is a reference.
    """
    if isinstance(shape, str) and not is_reference(shape):
        return Headed(htfl.htfl_backbone(shape, width or htfl.EMBEDDING_WIDTH), classes)
    if width is not None:
        return Headed(network_of(shape, None), classes, width)
    return network_of(shape, classes)


def network_of(shape: Network, classes: int | None) -> Any:
    """A shape's network; a single width makes a fully connected one. Without classes it has no output.

    Raises:
      ValueError: it is a reference, whose widths are unknown.
    """
    if isinstance(shape, str):
        raise ValueError(f"{shape!r} is a network of one's own, whose layers are not counted.")
    if len(shape.widths) == 1:
        return FullyConnected(shape.widths[0], classes)
    return FedMDNetwork(shape.widths, shape.dropout, classes)


def shape_name(shape: Network) -> str:
    """The name that an architecture has in tables."""
    if isinstance(shape, str):
        return shape.replace(":", ".")
    if len(shape.widths) == 1:
        return f"dense_{shape.widths[0]}"
    return f"conv_{'_'.join(map(str, shape.widths))}_dropout_{100 * shape.dropout:g}"


def _rate(config: ConfigDict) -> float:
    check_number("algorithm.learning_rate", config.algorithm.learning_rate, low=0)
    return config.algorithm.learning_rate


# Some are fields of a method's training: `preprocess` is that of private examples.
OFFERS: dict[str, Callable[[ConfigDict, Data], Any]] = {
    "groups": party_groups,
    "public_labels": lambda config, data: public_of(data).train.columns["label"],
    "num_classes": lambda config, data: classes_of(data),
    "num_public": lambda config, data: public_of(data).train.num_examples,
    "learning_rate": lambda config, data: _rate(config),
    "digest_learning_rate": lambda config, data: _rate(config),
    "revisit_learning_rate": lambda config, data: _rate(config),
    "optimizer": lambda config, data: party_optimizer(config.algorithm),
    "generator_optimizer": lambda config, data: _generator_optimizer(config.algorithm),
    "preprocess": lambda config, data: data.preprocess,
    "public_preprocess": lambda config, data: public_of(data).preprocess,
    "digest_preprocess": lambda config, data: public_of(data).preprocess,
    "distillation_preprocess": lambda config, data: public_of(data).preprocess,
    "gradient_hook": lambda config, data: output_penalty_of(config),
    "inference_batch_size": lambda config, data: config.evaluation.batch_size,
    "execution": lambda config, data: execution_of(config),
    "name": lambda config, data: config.algorithm.name,
    # The networks of DS-FL's server, FML's meme, FedKD's student and FedMRL's small model.
    "server": lambda config, data: _extra_model(config, data, "server"),
    "meme": lambda config, data: _extra_model(config, data, "meme"),
    "student": lambda config, data: _extra_model(config, data, "student"),
    "columns": lambda config, data: data.splits["train"].columns,
    "num_rounds": lambda config, data: config.rounds,
    "uplink": lambda config, data: _links(config)[0],
    "downlink": lambda config, data: _links(config)[1],
    "small": _small_model,
}
