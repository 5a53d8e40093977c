"""`Work`: the properties of a run from which methods count their FLOPs."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedcodist.algorithms.graph.graphs import over_time
from fedcodist.algorithms.parties.groups import party_names
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data import Data, load_data
from fedcodist.config.data_bert import ENCODED
from fedcodist.config.data_text import TEXT, TEXT_MODELS
from fedcodist.config.graph_methods import decentralised_groups, graph_of, image_shape
from fedcodist.config.networks import MODELS, WITH_EXITS, narrowed
from fedcodist.config.party_methods import (
    classes_of,
    embedding_width,
    extra_shape,
    module_of,
    party_groups,
    party_shapes,
    public_of,
)
from fedcodist.config.passes import LEARNING
from fedcodist.config.referenced_networks import (
    example_of,
    preprocessed_shapes,
    referenced_model,
    referenced_module,
)
from fedcodist.config.references import is_reference
from fedcodist.config.registry import ENTRIES, GRAPH
from fedcodist.core import keys
from fedcodist.core.model import Model, variable_shapes
from fedcodist.core.readout import Readout
from fedcodist.core.shape_checks import described
from fedcodist.data.vocabulary import PAD
from fedcodist.models.headed import check_heads
from fedcodist.report.forward_flops import flops_per_token, forward_flops, forward_flops_of

Config = Mapping[str, Any]


class Flops(NamedTuple):
    """FLOPs of a whole run with one seed.

    Attributes:
      clients: pool -> FLOPs of all its clients.
      server: FLOPs of the server.
    """

    clients: dict[str, float]
    server: float


class Work:
    """The properties of a run that the `passes` of methods read.

    Attributes:
      config, examples, rounds, steps: as `flops_of_run` gets them.
      settings: the config's `algorithm`.
    """

    def __init__(
        self, config: Config, examples: Mapping[str, float], rounds: int, steps: float | None = None
    ):
        self.config, self.settings = config, config["algorithm"]
        self.examples, self.rounds, self.steps = examples, rounds, steps

    @functools.cached_property
    def data(self) -> Data:
        """The run's data."""
        return _loaded(json.dumps(self.config["data"], sort_keys=True))

    # Of pools.

    def network(
        self, setting: str, name: str, share: float | None = None, depth: int | None = None
    ) -> float:
        """FLOPs of a forward pass on one example by the network that a setting names, by a share of its
        units, or by its first blocks."""
        if depth is not None:
            create, shape = choice(setting, name, WITH_EXITS)
            return forward_flops_of((functools.partial(create, depth), shape))
        return _forward_of(self, setting, name, share)

    @functools.cached_property
    def forward(self) -> dict[str, float]:
        """Pool -> FLOPs of its network on one example; in HeteroFL of the pool's share of the network,
        in DepthFL of its first blocks."""
        part = lambda settings: (settings.get("share"), settings.get("depth"))
        return {
            pool: self.network(f"pools.{pool}.model", settings["model"], *part(settings))
            for pool, settings in self.config["pools"].items()
        }

    @functools.cached_property
    def forward_in_training(self) -> dict[str, float]:
        """As `forward`, while clients train, when a softmax may be sampled."""
        if self.config.get("data", {}).get("name") != TEXT:
            return self.forward
        return {
            pool: self._forward_in_training(f"pools.{pool}.model", settings["model"])
            for pool, settings in self.config["pools"].items()
        }

    def _forward_in_training(self, setting: str, name: str) -> float:
        """FLOPs of a network of text on a sentence while clients train."""
        if is_reference(name):  # it has its own number of samples
            return _forward_of_reference(setting, name, self.data, is_training=True)
        samples = self.config["training"].get("samples") or 0
        return _forward_of_text(self.data, samples)(setting, name)

    def additional_flops(self, per_example: Callable[[str], float]) -> Flops:
        """Flops in addition to the clients' own method; `per_example` maps a pool to FLOPs."""
        return Flops({pool: per_example(pool) * n for pool, n in self.examples.items()}, 0.0)

    @property
    def images(self) -> int:
        """Examples that a student learns from in a round of distillation."""
        return self.settings["steps"] * self.settings["batch_size"]

    @functools.cached_property
    def predicted(self) -> int:
        """Images that a teacher predicts once a round: all, or the round's if data are streamed."""
        is_streamed = self.config.get("execution", {}).get("stream")
        return self.images if is_streamed else len(self.data.unlabelled)

    @functools.cached_property
    def unlabelled_size(self) -> float:
        """The cost of an unlabelled example relative to a client's example; text costs by tokens."""
        if self.config.get("data", {}).get("name") != TEXT:
            return 1.0
        assert self.data.text is not None
        tokens = self.data.unlabelled[:1_000_000, 1:]  # there may be gigabytes
        return np.count_nonzero(tokens != PAD) / len(tokens) / self.data.text.expected_length

    # Of parties and clients on a graph.

    def of_parties(
        self,
        predicted: float = 0.0,
        learned: float = 0.0,
        per_example: float = LEARNING,
        other_flops: Callable[[str], float] = lambda party: 0.0,
        server: float = 0.0,
    ) -> Flops:
        """Flops of parties that predict and learn from these numbers of public examples in the run.

        Args:
          predicted, learned: numbers of public examples that a party predicts and learns from, each
            counted as often as it is visited.
          per_example: forward passes for a private example.
          other_flops: party -> FLOPs of other networks.
          server: FLOPs of the server.
        """
        clients = {}
        for party, count in self.examples.items():
            passes = per_example * count + predicted + LEARNING * learned
            clients[party] = passes * self._forward_of_party[party] + other_flops(party)
        return Flops(clients, server)

    @property
    def num_classes(self) -> int:
        """The size of the label space that all parties share."""
        return classes_of(self.data)

    def public_images(self, setting: str) -> int:
        """Number of public images in a round, from a setting of `algorithm`; all if it is None."""
        size = self.settings[setting]
        return self.num_public if size is None else size

    @property
    def num_public(self) -> int:
        """Number of public examples."""
        return public_of(self.data).train.num_examples

    def network_of_party(self, setting: str, width: int | None = None) -> float:
        """Forward FLOPs of a party's network; a setting of `algorithm` has the party's number.

        The embedding has the width `width`, or by default that of all parties' networks.
        """
        return self._forward_of_shape(extra_shape(ConfigDict(dict(self.config)), setting), width)

    @functools.cached_property
    def head_shape(self) -> tuple[int, int]:
        """Width and classes of the parties' heads."""
        return check_heads("groups", {name: group.model for name, group in self._groups.items()})

    @functools.cached_property
    def prototypes(self) -> int:
        """Number of pairs of a party and a label of which it has examples."""
        train = self.data.splits["train"]
        clients = (train.client(client) for client in range(train.num_clients))
        return sum(len(np.unique(examples["label"])) for examples in clients)

    def mean_of_neighbours(self, party: str) -> float:
        """Mean forward FLOPs of a client's neighbours on the graph, over the run."""
        forward = {self._clients[name]: self._forward_of_party[name] for name in self._clients}
        graph = graph_of(ConfigDict(dict(self.config)), len(forward))
        edges = over_time(graph, max(self.rounds, 1))
        neighbours = np.nonzero(edges[:, self._clients[party]])[1]
        return sum(forward[int(client)] for client in neighbours) / max(len(neighbours), 1)

    @functools.cached_property
    def _groups(self) -> Mapping[str, Any]:
        settings, entry = ConfigDict(dict(self.config)), ENTRIES[self.settings["name"]]
        if entry.kind != GRAPH:
            return party_groups(settings, self.data)
        heads = (settings.parties.heads, settings.parties.projection)
        return decentralised_groups(settings, self.data, *(heads if "heads" in entry.reads else ()))

    @functools.cached_property
    def _clients(self) -> dict[str, int]:
        """Party -> its number."""
        return {
            party: client
            for name, parties in party_names(self._groups).items()
            for party, client in zip(parties, self._groups[name].clients.tolist(), strict=True)
        }

    @functools.cached_property
    def _forward_of_party(self) -> dict[str, float]:
        """Party -> forward FLOPs on an example; group -> the same, if its parties train one model."""
        if ENTRIES[self.settings["name"]].kind != GRAPH:
            shapes = party_shapes(ConfigDict(dict(self.config)))
            return {name: self._forward_of_shape(shapes[i]) for name, i in self._clients.items()}
        image = jax.ShapeDtypeStruct((1, *image_shape(self.data)), jnp.float32)
        forward: dict[str, float] = {}
        for name, names in party_names(self._groups).items():
            model = self._groups[name].model
            apply = lambda variables, x, model=model: model.apply(variables, {"image": x})[0]
            cost = forward_flops(apply, variable_shapes(model), image)
            forward |= dict.fromkeys((name, *names), cost)
        return forward

    def _forward_of_shape(self, shape: Any, width: int | None = None) -> float:
        if is_reference(shape):
            return _forward_of_reference("parties.networks", shape, self.data)
        image = image_shape(self.data)
        classes = classes_of(self.data)
        width = width or embedding_width(ConfigDict(dict(self.config)))
        return forward_flops_of((functools.partial(module_of, shape, classes, width), image))


def _forward_of(work: Work, setting: str, name: str, share: float | None) -> float:
    """FLOPs on one example of the network that a setting names, or of a share of its units."""
    kind = work.config.get("data", {}).get("name")
    if is_reference(name):
        return _forward_of_reference(setting, name, work.data, share)
    if kind == TEXT:
        return _forward_of_text(work.data)(setting, name)
    if kind not in ENCODED:
        return _forward_of_image(choice(setting, name, MODELS), share)
    data = work.data
    assert data.models is not None and data.submodels is not None
    model = choice(setting, name, data.models)()
    return _forward_of_model(model if share is None else data.submodels[name](share).model, data)


def _forward_of_reference(
    setting: str,
    reference: str,
    data: Data,
    share: float | None = None,
    is_training: bool = False,
) -> float:
    """FLOPs of a user's network on one example, or of a share of its units."""
    if share is None:
        model = referenced_model(setting, reference, data)
        with named(f"{setting} {reference!r}: "):
            return _forward_of_model(model, data, is_training)
    network = narrowed(referenced_module(setting, reference, data), share)
    return forward_flops_of((lambda: network, example_of(data).shape[1:]))


def _forward_of_model(model: Model, data: Data, is_training: bool = False) -> float:
    """FLOPs of a model on one of the clients' examples, of prepared text without its padding.

    Raises:
      ValueError: the data are prepared text, and the model's outputs are no Readout.
    """
    arguments = variable_shapes(model), preprocessed_shapes(data)
    flops = forward_flops(model.outputs, *arguments)
    apply = functools.partial(model.apply, train=is_training)
    outputs, _ = jax.eval_shape(
        lambda *a, key: apply(*a, key=key), *arguments, key=keys.key_shape()
    )
    if isinstance(outputs, Readout):  # its loss computes the logits
        samples = outputs.samples
        classes = len(outputs.bias) if samples is None else len(samples) + 1
        flops += 2 * outputs.features.size * classes
    elif data.text is not None:
        raise ValueError(
            "the outputs of a network of text must be a fedcodist.core.readout.Readout for its FLOPs to "
            f"be counted without padding, got {described(outputs)}."
        )
    if data.text is None:
        return flops
    return data.text.expected_length * flops / outputs.weights.size


def _forward_of_image(
    model: tuple[Callable[[], Any], tuple[int, ...]], share: float | None
) -> float:
    create, shape = model
    return forward_flops_of(model if share is None else (lambda: narrowed(create(), share), shape))


def _forward_of_text(data: Data, samples: int = 0) -> Callable[[str, str], float]:
    length = data.splits["train"].columns["tokens"].shape[1] - 1

    def of(setting: str, name: str) -> float:
        create = choice(setting, name, TEXT_MODELS)
        assert data.text is not None
        network = create(data.text.vocabulary.size)
        return data.text.expected_length * flops_per_token(network, length, samples)

    return of


@functools.lru_cache(maxsize=2)  # many runs of a table have the same data, which may be large
def _loaded(settings: str) -> Data:
    return load_data(ConfigDict(json.loads(settings)))
