"""What a federated method is, and what the experiment loop sees of an algorithm.

A *client state* is what one client keeps between its participations; a *pool* is clients who train one
model. In algorithms of parties, who each own a model, `client_states` is empty and there is one cohort,
`parties`; the pools of metrics and of `communication` are the parties.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax

from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult, Reduce
from fedcodist.core.client_states import ClientStates
from fedcodist.core.communication import Communication, tree_bytes
from fedcodist.core.inputs import ClientData, Selection
from fedcodist.core.method_checks import check_method
from fedcodist.core.model import Model, Variables
from fedcodist.core.padded_statistics import collected

PyTree = Any


class PersonalModel(NamedTuple):
    """A model of their own that clients keep in their states, such as FedKD's teachers.

    Attributes:
      model: gives outputs, loss and metrics.
      variables: (state, client_state) -> a client's Variables, also before its first participation. The
        first is the server's state in a FederatedMethod, and the algorithm's in a FederatedAlgorithm.
    """

    model: Model
    variables: Callable[[PyTree, PyTree], Variables]


class SetModel(Protocol):
    """(server, Variables, reset_optimizer) -> server."""

    def __call__(
        self, server: PyTree, variables: Variables, /, reset_optimizer: bool
    ) -> PyTree: ...


class FederatedMethod(NamedTuple):
    """A single-model method (FedAvg, FedProx, ...) as small pure functions.

    Distillation between pools composes with any method: it reads `variables`, changes the
    aggregate's pseudo-gradient before `server_update`, or replaces the model after it.

    Attributes:
      model: the network.
      hyper: default hyper-parameters, a pytree of floats; traced, so other values do not recompile.
      init: key -> server state.
      broadcast: server -> message, what a client downloads; has attributes `params` and `mutable`, the
        model in it.
      client_update: (message, client_state, data, key, hyper) -> ClientResult.
      reduce: how results are summed and what the server makes of the sum.
      server_update: (server, aggregate, round, hyper) -> server. Schedules are functions of round.
      variables: server -> the model's Variables.
      set_model: (server, Variables, reset_optimizer) -> server with that model, and with a fresh server
        optimizer where `reset_optimizer`, a Python bool, says so. Distillation gets in here.
      init_client_state: () -> what a client keeps before its first participation; None if nothing.
      personal_models: name -> PersonalModel that can be evaluated; none in most methods.
      sends_models: whether a client's update is what it received less its model, from which a server
        that needs single models knows them. A gradient or a sketch is not.
      num_clients: how many clients the pool must have, where the method depends on it; else None.
      name: the method's name, for progress and tables.
      gradient: (message, client_state, data, key, hyper) -> the gradient of a client's loss on one batch
        at the model that it received, to look at. None where a method does not tell.
    """

    model: Model
    hyper: PyTree
    init: Callable[[jax.Array], PyTree]
    broadcast: Callable[[PyTree], PyTree]
    client_update: Callable[[PyTree, PyTree, ClientData, jax.Array, PyTree], ClientResult]
    reduce: Reduce
    server_update: Callable[[PyTree, Aggregate, jax.Array, PyTree], PyTree]
    variables: Callable[[PyTree], Variables]
    set_model: SetModel
    init_client_state: Callable[[], PyTree] = lambda: None
    personal_models: Mapping[str, PersonalModel] = {}
    sends_models: bool = True
    num_clients: int | None = None
    name: str = ""
    gradient: Callable[[PyTree, PyTree, ClientData, jax.Array, PyTree], PyTree] | None = None


class HostState(Protocol):
    """What must be saved beside an algorithm's state, since programs keep it outside of them."""

    def state(self) -> PyTree:
        """Arrays; the first axis may grow over a run."""

    def shapes(self) -> PyTree:
        """The shapes of `state`; -1 stands for the length of a first axis that grows."""

    def restore(self, state: PyTree) -> None:
        """Goes on from a checkpoint's `state`."""


class Predictor(NamedTuple):
    """A model, or an ensemble, that can be evaluated.

    Attributes:
      model: gives loss and metrics of the outputs.
      variables: algorithm state -> Variables (stacked, for an ensemble).
      predict: (Variables, batch) -> outputs, in evaluation mode.
      members: names of models that are evaluated by one program one after another, such as the
        parties of one architecture. `variables` is then stacked, leaves [members, ...], `predict`
        gets one member's, and results bear the members' names. Empty for one model.
    """

    model: Model
    variables: Callable[[PyTree], Variables]
    predict: Callable[[Variables, Mapping[str, jax.Array]], Any]
    members: tuple[str, ...] = ()


class FederatedAlgorithm(NamedTuple):
    """A whole algorithm, as the experiment loop sees it. Every function is pure.

    Attributes:
      name: the method's name, for tables.
      hyper: default hyper-parameters, a pytree of floats.
      init: key -> state.
      client_states: pool -> whose states it keeps and what they are at first.
      select: (round, key) -> Selection. It never looks at the model, so it can run ahead on a host
        that streams data. Everything it draws is a function of (round, key), so there is no sampler
        state to carry or to checkpoint.
      round: (state, client_states, Round, hyper) -> (state, client_states, metrics). `client_states`
        are the cohorts', pool -> leaves [cohort, ...]. Metrics are arrays that are averaged over rounds,
        most of them scalars; `<pool>/finite` must be among them for every key of `communication`, of
        what the pool's clients sent, and may have `<pool>/finite_model` beside it, of its new model.
      predictors: name -> Predictor.
      communication: pool -> bytes of one participation, as far as shapes tell. Where they differ from
        round to round, metrics `<pool>/client_bytes_up` and `client_bytes_down` go before.
      num_clients: clients that the data must have, one more than the largest index of any pool.
      data_set_sizes: data set -> examples that it must have, as `select` draws among them.
      notes: lines that the launcher prints before the run, such as what its memory is for.
      personal_models: pool -> name -> PersonalModel of the pool's clients. All clients' models have one
        name in tables, for their mean.
      host_state: what programs keep in the host's memory and look up there, such as MHD's stale
        checkpoints; None for nearly all. It has `state`, `shapes` and `restore`, as HostClientStates.
    """

    name: str
    hyper: PyTree
    init: Callable[[jax.Array], PyTree]
    client_states: Mapping[str, ClientStates]
    select: Callable[[jax.Array, jax.Array], Selection]
    round: Callable[..., tuple[PyTree, PyTree, dict[str, jax.Array]]]
    predictors: Mapping[str, Predictor]
    communication: Mapping[str, Communication]
    num_clients: int
    data_set_sizes: Mapping[str, int] = {}
    notes: tuple[str, ...] = ()
    personal_models: Mapping[str, Mapping[str, PersonalModel]] = {}
    host_state: HostState | None = None


def single_model(model: Model, variables: Callable[[PyTree], Variables]) -> Predictor:
    """The predictor that is one model."""
    return Predictor(model, variables, lambda values, batch: model.apply(values, batch)[0])


def by_member(name: str, predictor: Predictor, tree: PyTree, axis: int = 0) -> dict[str, PyTree]:
    """What belongs to a predictor under its name, or under its members', who lie along an axis."""
    if not predictor.members:
        return {name: tree}
    member = lambda index: jax.tree.map(lambda leaf: leaf.take(index, axis=axis), tree)
    return {own: member(index) for index, own in enumerate(predictor.members)}


def communication_of(
    method: FederatedMethod, columns: Mapping[str, Any], has_server: bool = True
) -> Communication:
    """Counts one participation's bytes from the shapes that a method exchanges.

    The client uploads its update, its mutable state, its weight and what it sends besides.

    Args:
      method: any method.
      columns: the federated data's columns, arrays or shapes.
      has_server: as `check_method` gets it.

    Raises:
      ValueError, TypeError: the method's functions do not fit together.
    """
    with collected():  # no client in particular: an experiment knows their sizes
        message, result = check_method(method, columns, has_server)
    return Communication(
        down=tree_bytes(message),
        up=tree_bytes((result.update, result.mutable, result.weight, result.extra)),
    )


def client_key(root: jax.Array, round: jax.Array, pool: str) -> jax.Array:
    """The key of a pool's clients in a round, the same whether the pool runs alone or not."""
    return keys.derive(root, "client_update", round, pool)
