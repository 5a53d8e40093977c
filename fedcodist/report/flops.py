"""FLOPs of a run, its clients' and its server's, from the networks and the settings.

Counted are the multiplications and additions of matrix products and direct convolutions. Learning from
an example is three forward passes: one, and the gradients of weights and of activations. Left out are
element-wise operations, augmentation, averaging, evaluation, and what padding adds; so the number says
what a method asks for and not how well a program does it. Of parties with networks of their own the
rounds are counted, and not what comes before. FedKD's maps between hidden states are left out too.
A sentence costs what its tokens do; it has as many as clients' sentences have in the mean of all pools.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedcodist.algorithms.graph.graphs import over_time
from fedcodist.algorithms.parties.groups import party_names
from fedcodist.config.config_errors import choice
from fedcodist.config.data import Data, load_data
from fedcodist.config.data_bert import ENCODED
from fedcodist.config.data_text import TEXT, TEXT_MODELS
from fedcodist.config.graph_methods import (
    DECENTRALISED_METHODS,
    decentralised_groups,
    graph_of,
    image_shape,
)
from fedcodist.config.networks import MODELS, narrowed
from fedcodist.config.party_methods import (
    extra_shape,
    network_of,
    party_groups,
    party_shapes,
    public_of,
)
from fedcodist.core.model import variable_shapes
from fedcodist.data.vocabulary import PAD

Config = Mapping[str, Any]
# Where clients compute something else than FedAvg's, `flops_of_run` knows it.
CLIENT_METHODS_COUNTED = (
    "fed_avg",
    "fed_prox",
    "fed_gkd",
    "scaffold",
    "fetch_sgd",
    "fed_dropout",
    "fed_kd",
)
LEARNING = 3  # forward passes that a step costs per example


class Flops(NamedTuple):
    """Of a whole run with one seed.

    Attributes:
      clients: pool -> what all its clients did.
      server: what the server did.
    """

    clients: dict[str, float]
    server: float


def flops_of_run(
    config: Config, examples: Mapping[str, float], distillation_steps: float | None = None
) -> Flops:
    """Counts a run.

    Args:
      config: as in config.json.
      examples: pool -> examples that its clients trained on, each as often as it was visited.
      distillation_steps: mean of a round, where a method stops early; else the config's.

    Raises:
      ValueError: one line; a name in the config that is not known.
    """
    if (name := config["algorithm"]["name"]) not in SERVERS:
        raise ValueError(_not_counted(name))
    server = SERVERS[name]
    forward_of = _forward_of(config)
    is_hetero_fl = config["algorithm"]["name"] == "hetero_fl"  # each pool has a share of its model
    forward = {
        pool: (_forward_of(config, settings["share"]) if is_hetero_fl else forward_of)(
            f"pools.{pool}.model", settings["model"]
        )
        for pool, settings in config["pools"].items()
    }
    training = config["training"]
    if (method := training.get("method", "fed_avg")) not in CLIENT_METHODS_COUNTED:
        raise ValueError(_not_counted(method))
    passes = 1.0
    if training.get("method") == "scaffold" and training["scaffold_option"] == 1:
        passes += 1 / training["epochs"]  # the gradient of all examples
    if training.get("method") == "fed_gkd":
        passes += 1 / LEARNING  # what the teacher says to every example
    trained = forward
    if training.get("method") == "fed_dropout":
        forward_of_part = _forward_of(config, training["fed_dropout"]["share"])
        trained = {
            pool: forward_of_part(f"pools.{pool}.model", settings["model"])
            for pool, settings in config["pools"].items()
        }
    if samples := training.get("samples"):
        forward_of_training = _forward_of_text(config, samples)
        trained = {
            pool: forward_of_training(f"pools.{pool}.model", settings["model"])
            for pool, settings in config["pools"].items()
        }
    if training.get("method") == "fed_kd":
        name = training["fed_kd"]["teacher"]
        own = forward_of("training.fed_kd.teacher", name)
        trained = {pool: own + student for pool, student in forward.items()}
    clients = {pool: LEARNING * trained[pool] * passes * count for pool, count in examples.items()}
    return Flops(clients, server(config, forward, distillation_steps))


def flops_of_parties(config: Config, examples: Mapping[str, float], rounds: int) -> Flops:
    """Counts a run of a method of parties; "clients" are the parties.

    Args:
      config: as in config.json, of a run that has finished.
      examples: party -> private examples that it trained on, each as often as it was visited.
      rounds: of the run.
    """
    settings = ConfigDict(dict(config))
    data = _data(config)
    if settings.algorithm.name in DECENTRALISED_METHODS:
        return Flops(_decentralised(settings, data, examples, rounds), 0.0)
    classes, image = public_of(data).num_classes, data.splits["train"].columns["image"].shape[1:]
    forward_of = functools.cache(
        lambda shape: forward_flops_of((functools.partial(network_of, shape, classes), image))
    )
    shapes = party_shapes(settings)
    groups = party_groups(settings, data)
    place = {
        party: client
        for name, parties in party_names(groups).items()
        for party, client in zip(parties, groups[name].clients.tolist(), strict=True)
    }
    algorithm = config["algorithm"]
    extra, server = 0.0, 0.0  # of an image in one more network; of the server
    asked, learnt = 0.0, 0.0  # public images that a party answers, and learns from
    answers_own = 0.0  # times that a party answers its private images
    match algorithm["name"]:
        case "fed_md":
            size = algorithm["alignment_size"]
            asked = rounds * (public_of(data).train.num_examples if size is None else size)
            learnt = algorithm["digest_epochs"] * asked
        case "ds_fl":
            size = algorithm["open_size"]
            asked = rounds * (public_of(data).train.num_examples if size is None else size)
            learnt = algorithm["distillation_epochs"] * asked
            server = LEARNING * learnt * forward_of(extra_shape(settings, "server"))
        case "fml":
            extra = forward_of(extra_shape(settings, "meme"))
        case "fd":
            answers_own = 1 / algorithm["epochs"]
        case "local_only":
            pass
        case name:
            raise ValueError(_not_counted(name))
    clients = {}
    for party, count in examples.items():
        own = forward_of(shapes[place[party]])
        clients[party] = count * (LEARNING * (own + extra) + answers_own * own)
        clients[party] += (asked + LEARNING * learnt) * own
    return Flops(clients, server)


def _decentralised(
    settings: ConfigDict, data: Data, examples: Mapping[str, float], rounds: int
) -> dict[str, float]:
    """Of methods of clients on a graph. MHD's teachers are taken to be all neighbours equally often."""
    algorithm = settings.algorithm
    is_mhd = algorithm.name == "multi_headed_distillation"
    of_mhd = (settings.parties.heads, settings.parties.projection) if is_mhd else ()
    groups = decentralised_groups(settings, data, *of_mhd)
    image = jax.ShapeDtypeStruct((1, *image_shape(data)), jnp.float32)
    forward, clients = {}, {}
    for name, names in party_names(groups).items():
        model = groups[name].model
        variables = variable_shapes(model)
        apply = lambda variables, x, model=model: model.apply(variables, {"image": x})[0]
        of_one = forward_flops(apply, variables, image)
        for party, client in zip(names, groups[name].clients.tolist(), strict=True):
            forward[client], clients[party] = of_one, client
    edges = over_time(graph_of(settings, len(forward)), max(rounds, 1))
    found = {}
    for party, count in examples.items():
        own = forward[clients[party] if party in clients else groups[party].clients[0]]
        found[party] = LEARNING * own * count
        if is_mhd:
            public = rounds * settings.training.steps * algorithm.public_batch_size
            neighbours = np.nonzero(edges[:, clients[party]])[1]
            asked = sum(forward[int(c)] for c in neighbours) / max(len(neighbours), 1)
            found[party] += public * (LEARNING * own + algorithm.teachers * asked)
        elif algorithm.name == "decentralised_periodic_codistillation":
            public = rounds // algorithm.period * algorithm.examples
            found[party] += public * (1 + LEARNING) * own
        elif algorithm.name not in ("local_only_steps", "decentralised_fed_avg", "centralised"):
            raise ValueError(_not_counted(algorithm.name))
    return found


def _not_counted(name: str) -> str:
    return f"FLOPs of {name!r} are not counted: fedcodist/report/flops.py must know it."


def _forward_of(config: Config, share: float | None = None) -> Callable[[str, str], float]:
    """(setting, its model's name) -> FLOPs on one example of that network or a share of its units."""
    kind = config.get("data", {}).get("name")
    if kind == TEXT:
        return _forward_of_text(config)
    if kind not in ENCODED:
        return lambda setting, name: _forward_of_image(choice(setting, name, MODELS), share)
    data, key = _data(config), jax.random.key(0)
    columns = data.splits["train"].columns
    one = {n: jax.ShapeDtypeStruct((1, *c.shape[1:]), c.dtype) for n, c in columns.items()}
    batch = jax.eval_shape(data.preprocess, one, key, jnp.zeros(1, jnp.int32))

    def of(setting, name):
        assert data.models is not None and data.submodels is not None
        model = choice(setting, name, data.models)()
        if share is not None:
            model = data.submodels[name](share).model
        apply = lambda variables, batch: model.apply(variables, batch)[0]
        return forward_flops(apply, variable_shapes(model), batch)

    return of


def _forward_of_image(
    model: tuple[Callable[[], Any], tuple[int, ...]], share: float | None
) -> float:
    create, shape = model
    return forward_flops_of(model if share is None else (lambda: narrowed(create(), share), shape))


def _forward_of_text(config: Config, samples: int = 0) -> Callable[[str, str], float]:
    data = _data(config)
    length = data.splits["train"].columns["tokens"].shape[1] - 1

    def of(setting, name):
        create = choice(setting, name, TEXT_MODELS)
        assert data.text is not None
        network = create(data.text.vocabulary.size)
        return data.text.expected_length * flops_per_token(network, length, samples)

    return of


def flops_per_token(network: Any, length: int, samples: int = 0) -> float:
    """FLOPs of a network that returns a Readout on one of `length` tokens, its logits included.

    Args:
      network: a Flax linen module that is called with tokens.
      length: tokens of a sentence, all of which attention looks at.
      samples: of sampled softmax, whose logits are those of the samples and of the label; 0 has all.
    """
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    variables = jax.eval_shape(network.init, jax.random.key(0), tokens)
    width, classes = jax.eval_shape(network.apply, variables, tokens).kernel.shape
    logits = 2 * width * (samples + 1 if samples else classes)
    return forward_flops(network.apply, variables, tokens) / length + logits


@functools.cache
def forward_flops_of(model: tuple[Callable[[], Any], tuple[int, ...]]) -> float:
    """FLOPs of a network on one example; `model` is a value of MODELS."""
    create, shape = model
    network, image = create(), jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    variables = jax.eval_shape(network.init, jax.random.key(0), image)
    return forward_flops(network.apply, variables, image)


def forward_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """FLOPs of the matrix products and convolutions of a function of arrays or their shapes.

    Where a function has several versions, as our convolutions have one per platform, the cheapest
    counts: that is the direct one.

    Raises:
      ValueError: a loop of unknown length.
    """
    return _flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def _flops(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, outputs = equation.primitive.name, equation.outvars
        if name == "while":
            raise ValueError("a loop of unknown length has no fixed number of FLOPs.")
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * outputs[0].aval.size * math.prod(shape[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            features = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * outputs[0].aval.size * kernel.size // features
        elif name == "cond":
            total += min(_flops(branch.jaxpr) for branch in equation.params["branches"])
        else:
            length = equation.params["length"] if name == "scan" else 1
            total += length * sum(_flops(inner) for inner in _inner(equation.params))
    return total


def _inner(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        if isinstance(value, jax.extend.core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, jax.extend.core.Jaxpr):
            yield value


# What servers do in a whole run: (config, pool -> forward FLOPs, mean steps of a round) -> FLOPs.


def _nothing(config: Config, forward: Mapping[str, float], steps: float | None) -> float:
    return 0.0


def _codistillation(config: Config, forward: Mapping[str, float], steps: float | None) -> float:
    """Each model's start, teacher and self-teacher at once, and each student on every batch."""
    settings, times = config["algorithm"], config["rounds"]
    if settings["name"] == "periodic_codistillation":
        times //= settings["period"]
    elif settings["skip_at_alpha_one"] and settings["alpha_schedule"] != "linear_to_zero":
        own = [pool["alpha"] for pool in config["pools"].values()]
        if all(alpha == 1 or (alpha is None and settings["alpha"] == 1) for alpha in own):
            times = 0
    examples = times * _images(settings) * _unlabelled_size(config)
    return examples * (1 + LEARNING) * sum(forward.values())


def _fed_df(config: Config, forward: Mapping[str, float], steps: float | None) -> float:
    """All the cohort's models as teachers, those too that drop-worst leaves out."""
    settings, models = config["algorithm"], sum(forward.values())
    teachers = sum(config["pools"][pool]["cohort_size"] * own for pool, own in forward.items())
    steps = settings["steps"] if steps is None else steps
    each = steps * settings["batch_size"] * (teachers + LEARNING * models)
    if (validation := settings.get("validation")) is not None:
        looks = steps / validation.get("every", 100) + bool(validation.get("or_start"))
        examples = _data(config).splits[validation["split"]].num_examples
        each += examples * (looks * models + bool(validation.get("drop_worst")) * teachers)
    return config["rounds"] * each


def _fed_be(config: Config, forward: Mapping[str, float], steps: float | None) -> float:
    """Every unlabelled image is answered once a round; statistics of a mean of students are left out."""
    settings, pools = config["algorithm"], config["pools"]
    teachers = sum(
        own * (1 + settings["samples"] + settings["with_clients"] * pools[pool]["cohort_size"])
        for pool, own in forward.items()
    )
    answered = teachers * _answered(config)
    learnt = LEARNING * _images(settings) * sum(forward.values())
    return config["rounds"] * (answered + learnt)


def _fed_sdd(config: Config, forward: Mapping[str, float], steps: float | None) -> float:
    settings, (one,) = config["algorithm"], forward.values()
    if not settings["steps"]:
        return 0.0
    images = _images(settings)
    taught = _answered(config) if settings["cached"] else images
    students = settings["num_models"] if settings["distilled"] == "all" else 1
    teachers = [
        settings["num_models"] * min(round + 1, settings["rounds_kept"])
        for round in range(settings["warm_up"], config["rounds"])
    ]
    return one * sum(taught * count + images * students * LEARNING for count in teachers)


SERVERS: dict[str, Callable[[Config, Mapping[str, float], float | None], float]] = {
    "fed_avg": _nothing,
    "hetero_fl": _nothing,
    "fed_ensemble": _nothing,
    "periodic_codistillation": _codistillation,
    "merged_codistillation": _codistillation,
    "fed_df": _fed_df,
    "fed_be": _fed_be,
    "fed_sdd": _fed_sdd,
}


def _unlabelled_size(config: Config) -> float:
    """What an unlabelled example costs, in clients' ones: a sentence by its tokens."""
    if config.get("data", {}).get("name") != TEXT:
        return 1.0
    data = _data(config)
    assert data.text is not None
    tokens = data.unlabelled[:1_000_000, 1:]  # there may be gigabytes
    return np.count_nonzero(tokens != PAD) / len(tokens) / data.text.expected_length


def _answered(config: Config) -> int:
    """Images that a teacher answers once a round: all, or the round's own where they are streamed."""
    if config.get("execution", {}).get("stream"):
        return _images(config["algorithm"])
    return len(_data(config).unlabelled)


def _images(settings: Config) -> int:
    return settings["steps"] * settings["batch_size"]


def _data(config: Config) -> Data:
    return _loaded(json.dumps(config["data"], sort_keys=True))


@functools.lru_cache(maxsize=2)  # many runs of a table have the same, which may be large
def _loaded(settings: str) -> Data:
    return load_data(ConfigDict(json.loads(settings)))
