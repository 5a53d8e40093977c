"""From a config's `parties` and `algorithm` to a method of parties who each own a model.

`fedcodist.config.phases` is what comes before the method's first round.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from fedcodist.algorithms.parties.alignment import Alignment
from fedcodist.algorithms.parties.ds_fl import DSFLHyper, OpenExamples, ds_fl
from fedcodist.algorithms.parties.fd import FDHyper, fd
from fedcodist.algorithms.parties.fed_md import FedMDHyper, fed_md
from fedcodist.algorithms.parties.fml import FMLHyper, fml
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.local_only import LocalOnlyHyper, LocalOnlyParty, local_only
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data import Data
from fedcodist.config.data_parties import PUBLIC_PRIVATE
from fedcodist.config.execution import execution_of
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.local_training import LocalTraining, OptimizerFactory
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables, from_flax_linen
from fedcodist.models.fed_md import (
    TABLE_1,
    TABLE_2,
    FedMDNetwork,
    FullyConnected,
    Shape,
    narrower,
    output_penalty,
)
from fedcodist.run.run_folder import PHASES

PyTree = Any
# Party i has network i. A single width is a fully connected network, the paper's weak party.
NETWORKS: dict[str, Sequence[Shape]] = {
    "table_1": TABLE_1,
    "table_2": TABLE_2,
    "digits": 2 * (Shape((8, 16), 0.1), Shape((64,), 0.0), Shape((32,), 0.0)),
}


def build_fed_md(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """FedMD's collaboration as a config describes it."""
    settings = config.algorithm
    public = public_of(data)
    for rate in ("learning_rate", "output_penalty"):
        check_number(f"algorithm.{rate}", settings[rate], low=0)
    return _made(
        config,
        fed_md,
        party_groups(config, data),
        Alignment(
            public.train.columns["label"],
            settings.alignment_size,
            settings.exchanged,
            config.evaluation.batch_size,
        ),
        public.num_classes,
        digest=digest_training(config, public.preprocess),
        revisit=revisit_training(config, data.preprocess),
        gradient_hook=output_penalty(settings.output_penalty),
        hyper=FedMDHyper(
            settings.learning_rate,
            settings.learning_rate,
            settings.weights,
            settings.temperature,
        ),
    )


def build_local_only(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """Parties who go on training alone, with one optimizer for all rounds."""
    check_number("algorithm.learning_rate", config.algorithm.learning_rate, low=0)
    return _made(
        config,
        local_only,
        party_groups(config, data),
        private_training(config, data.preprocess),
        gradient_hook=output_penalty(config.algorithm.output_penalty),
        hyper=LocalOnlyHyper(config.algorithm.learning_rate),
    )


def build_fd(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """FD: mean outputs per label."""
    settings = config.algorithm
    check_number("algorithm.learning_rate", settings.learning_rate, low=0)
    return _made(
        config,
        fd,
        party_groups(config, data),
        public_of(data).num_classes,
        private_training(config, data.preprocess),
        FDHyper(settings.learning_rate, settings.weight, settings.temperature),
        config.evaluation.batch_size,
    )


def build_ds_fl(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """DS-FL, whose open examples are the public ones."""
    settings, public = config.algorithm, public_of(data)
    rates = (settings.learning_rate, settings.distillation_learning_rate)
    for name, rate in zip(("", "distillation_"), rates, strict=True):
        check_number(f"algorithm.{name}learning_rate", rate, low=0)
    return _made(
        config,
        ds_fl,
        party_groups(config, data),
        _extra_model(config, data, "server"),
        OpenExamples(public.train.num_examples, settings.open_size, config.evaluation.batch_size),
        private_training(config, data.preprocess),
        LocalTraining(
            adam(settings),
            settings.distillation_batch_size,
            settings.distillation_epochs,
            public.preprocess,
        ),
        settings.aggregation,
        DSFLHyper(*rates, settings.temperature),
    )


def build_fml(config: ConfigDict, data: Data) -> FederatedAlgorithm:
    """FML, which needs no public examples."""
    settings = config.algorithm
    check_number("algorithm.learning_rate", settings.learning_rate, low=0)
    return _made(
        config,
        fml,
        party_groups(config, data),
        _extra_model(config, data, "meme"),
        private_training(config, data.preprocess),
        FMLHyper(settings.learning_rate, settings.own_weight, settings.meme_weight),
    )


PARTY_METHODS: dict[str, Callable[[ConfigDict, Data], FederatedAlgorithm]] = {
    "local_only": build_local_only,
    "fed_md": build_fed_md,
    "fd": build_fd,
    "ds_fl": build_ds_fl,
    "fml": build_fml,
}


def start(
    config: ConfigDict, data: Data, trained: dict[str, LocalOnlyParty], key: jax.Array
) -> PyTree:
    """The state of the config's method before its first round, of parties that were trained before.

    The optimizer of private training goes on where the method has one for private examples that lasts
    over rounds: FedMD's of the revisit, as in the released code, and that of parties alone.

    A method's state must be architecture -> party, or have such a field `models`; a party is Variables,
    or has them as `variables` and what goes on as `revisit_state` or `optimizer_state`.

    Args:
      config, data: as `build_experiment` gets them.
      trained: architecture -> its parties after private training, leaves [group, ...].
      key: of what else the method starts from, such as a model of the server's.
    """
    state = PARTY_METHODS[config.algorithm.name](config, data).init(key)

    def put(own, party):
        if isinstance(own, Variables):
            return party.variables
        lasting = {"revisit_state", "optimizer_state"} & set(own._fields)
        states = dict.fromkeys(lasting, party.optimizer_state)
        return own._replace(variables=party.variables, **states)

    if isinstance(state, dict):
        return {name: put(own, trained[name]) for name, own in state.items()}
    own = {name: put(party, trained[name]) for name, party in state.models.items()}
    return state._replace(models=own)


def public_of(data: Data) -> Any:
    """The data's public part, or one line that tells which data have one."""
    if data.public is None:
        raise ValueError(
            f"data.name must be one of {sorted(PUBLIC_PRIVATE)} for methods of parties, which need "
            "public examples."
        )
    return data.public


def party_groups(config: ConfigDict, data: Data) -> dict[str, PartyGroup]:
    """Who has which network: architecture -> its parties."""
    shapes, count = party_shapes(config), data.splits["train"].num_clients
    if len(shapes) != count:
        raise ValueError(
            f"parties.networks must be {count}, one per party (data.num_parties), got {len(shapes)}."
        )
    example = jnp.zeros((1, *data.splits["train"].columns["image"].shape[1:]))
    groups = {}
    for shape in dict.fromkeys(shapes):
        model = from_flax_linen(network_of(shape, public_of(data).num_classes), example)
        clients = [party for party, own in enumerate(shapes) if own == shape]
        groups[shape_name(shape)] = PartyGroup(model, np.array(clients))
    return groups


def party_shapes(config: ConfigDict) -> tuple[Shape, ...]:
    """Every party's network, in their order."""
    networks, divisor = config.parties.networks, config.parties.narrower
    check_integer("parties.narrower", divisor, low=1)
    if isinstance(networks, str):
        return narrower(choice("parties.networks", networks, NETWORKS), divisor)
    shapes = [Shape(tuple(widths), dropout) for widths, dropout in networks]
    for shape in shapes:
        if len(shape.widths) == 1 and shape.dropout:
            raise ValueError(
                f"parties.networks must have dropout 0 for fully connected networks, which have none, "
                f"got {tuple(shape)}."
            )
    return narrower(shapes, divisor)


def digest_training(config: ConfigDict, preprocess: Preprocess) -> LocalTraining:
    """How parties learn the consensus."""
    settings = config.algorithm
    return LocalTraining(
        adam(settings), settings.digest_batch_size, settings.digest_epochs, preprocess
    )


def revisit_training(config: ConfigDict, preprocess: Preprocess) -> LocalTraining:
    """How parties go back to their private examples."""
    settings = config.algorithm
    return LocalTraining(
        adam(settings), settings.revisit_batch_size, settings.revisit_epochs, preprocess
    )


def private_training(config: ConfigDict, preprocess: Preprocess) -> LocalTraining:
    """How parties train in a round of the methods that have no phases of their own."""
    settings = config.algorithm
    return LocalTraining(adam(settings), settings.batch_size, settings.epochs, preprocess)


def adam(settings: ConfigDict) -> OptimizerFactory:
    """Adam with the config's epsilon."""
    check_number("algorithm.epsilon", settings.epsilon, above=0)
    return functools.partial(optax.adam, eps=settings.epsilon)


def _made(
    config: ConfigDict, method: Callable[..., FederatedAlgorithm], *arguments: Any, **others: Any
) -> FederatedAlgorithm:
    """The method, whose errors say that its arguments are from the config's `algorithm`."""
    execution = execution_of(config)
    with named("algorithm: "):
        made = method(*arguments, execution=execution, name=config.algorithm.name, **others)
    if config.get("phases") is not None and config.phases.stopping == "test_data":
        # Renamed here, since batches may depend on the name that a method is given.
        return made._replace(name=f"{made.name}, {PHASES} stopped on test data")
    return made


def extra_shape(config: ConfigDict, setting: str) -> Shape:
    """The network of DS-FL's server or FML's meme: that of the party of this number."""
    shapes, party = party_shapes(config), config.algorithm[setting]
    check_integer(f"algorithm.{setting}", party, low=0)
    if party >= len(shapes):
        raise ValueError(
            f"algorithm.{setting} must be one of the {len(shapes)} parties, whose network it is, "
            f"got {party}."
        )
    return shapes[party]


def _extra_model(config: ConfigDict, data: Data, setting: str) -> Model:
    example = jnp.zeros((1, *data.splits["train"].columns["image"].shape[1:]))
    network = network_of(extra_shape(config, setting), public_of(data).num_classes)
    return from_flax_linen(network, example)


def network_of(shape: Shape, classes: int) -> Any:
    """A shape's network; a single width is a fully connected one's."""
    if len(shape.widths) == 1:
        return FullyConnected(shape.widths[0], classes)
    return FedMDNetwork(shape.widths, shape.dropout, classes)


def shape_name(shape: Shape) -> str:
    """The name that an architecture has in tables."""
    if len(shape.widths) == 1:
        return f"dense_{shape.widths[0]}"
    return f"conv_{'_'.join(map(str, shape.widths))}_dropout_{100 * shape.dropout:g}"
