"""What a federated method is, and what the experiment loop sees of an algorithm.

A *client state* is what one client keeps between its participations. A *pool* is the clients who train
one model. In algorithms of parties, every party has a model: `client_states` is empty, there is one
cohort, `parties`, and metrics and `communication` name the parties as their pools.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult, Reduce
from fedcodist.core.client_states import ClientStates
from fedcodist.core.communication import Communication
from fedcodist.core.inputs import ClientData, Selection
from fedcodist.core.model import Model, Variables

PyTree = Any
SHARED_MODEL = "shared"
PARTIES = "parties"  # the one cohort of parties, and the name of all their models together
FINE_TUNED = "_fine_tuned"  # ends the names of models after one more local training


class PersonalModel(NamedTuple):
    """A model that every client keeps in its state, such as FedKD's teacher.

    Attributes:
      model: gives outputs, loss and metrics.
      variables: (state, client_state) -> a client's Variables, also before its first participation.
        `state` is the server's in a FederatedMethod, and the algorithm's in a FederatedAlgorithm.
    """

    model: Model
    variables: Callable[[PyTree, PyTree], Variables]


class PrivateSends(NamedTuple):
    """What the accounting of privacy has to know of a method made by `fedcodist.privacy.private`.

    Attributes:
      noise_multiplier: the deviation of a sum's noise by the bound of one client's share in it.
      expected_clients: what sums are divided by; None for the number of clients who took part.
      bands: rounds over which noise is correlated; a client may take part once in so many.
    """

    noise_multiplier: float
    expected_clients: int | None
    bands: int = 1


class SetModel(Protocol):
    """The type of `FederatedMethod.set_model`: (server, Variables, reset_optimizer) -> server."""

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
      broadcast: server -> message, what a client downloads. Its attributes `params` and `mutable` are
        the model.
      client_update: (message, client_state, data, key, hyper) -> ClientResult.
      reduce: how results are summed and what the server makes of the sum.
      server_update: (server, aggregate, round, hyper) -> server. Schedules are functions of round.
      variables: server -> the model's Variables.
      set_model: (server, Variables, reset_optimizer) -> server with that model. The server's optimizer
        starts afresh if `reset_optimizer`, a Python bool, is true. Distillation puts its model in here.
      init_client_state: () -> what a client keeps before its first participation; None if nothing.
      personal_models: name -> PersonalModel that can be evaluated; none in most methods.
      sends_models: whether a client's update is the received model minus the trained one. A server that
        needs the clients' single models computes them from it. A gradient or a sketch does not allow it.
      num_clients: how many clients the pool must have, where the method depends on it; else None.
      name: the method's name, for progress and tables.
      gradient: (message, client_state, data, key, hyper) -> the gradient of a client's loss on one batch
        at the model that it received, for diagnostics. None where a method does not define it.
      fine_tune: (server, client_state, data, key, hyper) -> name -> Variables: the models that a client
        has after it has adapted them to its own examples, by the names of `personal_models`; the
        shared one is SHARED_MODEL. Where None, they are those of `client_update`.
      privacy: how private the sums are; None where they are not.
      server_message: server -> what `reduce.finalize` gets for the message, with what the server keeps
        to itself, such as a noise's state. None where that is the message which clients download.
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
    fine_tune: (
        Callable[[PyTree, PyTree, ClientData, jax.Array, PyTree], dict[str, Variables]] | None
    ) = None
    privacy: PrivateSends | None = None
    server_message: Callable[[PyTree], PyTree] | None = None


class HostState(Protocol):
    """What programs keep in the host's memory, and checkpoints hold beside the algorithm's state."""

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
      members: names of models that one program evaluates one after another, such as the parties of
        one architecture. `variables` is then stacked, leaves [members, ...]. `predict` gets one
        member's, and results have the members' names. Empty for one model.
      clients: the clients whose models the members are, ascending; empty where they are nobody's.
    """

    model: Model
    variables: Callable[[PyTree], Variables]
    predict: Callable[[Variables, Mapping[str, jax.Array]], Any]
    members: tuple[str, ...] = ()
    clients: tuple[int, ...] = ()


class ClientModels(NamedTuple):
    """The models that clients would use, which are judged on each client's own examples.

    Attributes:
      clients: int32 [n], client indices in ascending order.
      predictors: name -> Predictor, which gives outputs, loss and metrics. Its `variables` is not used.
      variables: (state, client_state) -> name -> what `predict` gets of one client, Variables or an
        ensemble. `state` is the algorithm's.
      fine_tuned: (state, client_state, data, key, hyper) -> name -> Variables after the client has
        trained on its examples `data` once more; names of `predictors`. None where methods do not
        tell models before local training from those after it.
      client_states: state -> leaves [n, ...], for clients whose models lie in the algorithm's state,
        such as parties. Where None, they are those of the pool in the algorithm's `client_states`.
    """

    clients: np.ndarray
    predictors: Mapping[str, Predictor]
    variables: Callable[[PyTree, PyTree], dict[str, PyTree]]
    fine_tuned: (
        Callable[[PyTree, PyTree, ClientData, jax.Array, PyTree], dict[str, PyTree]] | None
    ) = None
    client_states: Callable[[PyTree], PyTree] | None = None


class PrivateCohorts(NamedTuple):
    """One pool's sums, as the accounting of privacy sees them; one sum a round.

    Attributes:
      clients: int32 [n], the clients who can be drawn.
      noise_multiplier: `PrivateSends`'s; 0 where the pool's method is not private.
      cohort_size: clients per round; the expected number for a Poisson cohort.
      most: the bound on a Poisson cohort; None for cohorts of a fixed size, without replacement.
      cycle: rounds in which every client can be drawn once.
    """

    clients: np.ndarray
    noise_multiplier: float
    cohort_size: int
    most: int | None = None
    cycle: int = 1


class FederatedAlgorithm(NamedTuple):
    """A whole algorithm, as the experiment loop sees it. Every function is pure.

    Attributes:
      name: the method's name, for tables.
      hyper: default hyper-parameters, a pytree of floats.
      init: key -> state.
      client_states: pool -> ClientStates: which clients keep one, and its first value.
      select: (round, key) -> Selection. It never looks at the model, so it can run ahead on a host
        that streams data. Everything it draws is a function of (round, key), so there is no sampler
        state to carry or to checkpoint.
      round: (state, client_states, Round, hyper) -> (state, client_states, metrics). `client_states`
        are the cohorts', pool -> leaves [cohort, ...]. Metrics are arrays that are averaged over rounds,
        most of them scalars. For every key of `communication` they must have `<pool>/finite`: whether
        what the pool's clients sent is finite. `<pool>/finite_model`, of its new model, is optional.
      predictors: name -> Predictor.
      communication: pool -> bytes of one participation, computed from shapes. Where they differ from
        round to round, the metrics `<pool>/client_bytes_up` and `client_bytes_down` replace them.
      num_clients: clients that the data must have, one more than the largest index of any pool.
      data_set_sizes: data set -> examples that it must have, as `select` draws among them.
      notes: lines that the launcher prints before the run, such as how much memory it needs for what.
      personal_models: pool -> name -> PersonalModel of the pool's clients. Tables report the mean over
        clients under this name.
      host_state: what programs keep in the host's memory and look up there, such as MHD's stale
        checkpoints. None for most algorithms.
      client_models: pool -> the models that its clients would use. Those of parties follow from
        `predictors`, see `all_client_models`.
      privacy: pool -> PrivateCohorts, of every pool whose cohorts are drawn by themselves, where any
        pool's method is private; empty where none is.
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
    client_models: Mapping[str, ClientModels] = {}
    privacy: Mapping[str, PrivateCohorts] = {}


def all_client_models(algorithm: FederatedAlgorithm) -> dict[str, ClientModels]:
    """Pool or architecture -> the models that its clients would use; those of parties as PARTIES."""

    def of_members(predictor: Predictor) -> ClientModels:
        return ClientModels(
            np.asarray(predictor.clients, np.int32),
            {PARTIES: predictor},
            lambda state, member: {PARTIES: member},
            client_states=predictor.variables,
        )

    of_parties = {
        name: of_members(predictor)
        for name, predictor in algorithm.predictors.items()
        if predictor.clients
    }
    return {**algorithm.client_models, **of_parties}


def fine_tuned_models(
    method: FederatedMethod,
    server: PyTree,
    client_state: PyTree,
    data: ClientData,
    key: jax.Array,
    hyper: PyTree,
) -> dict[str, Variables]:
    """A client's models after one more local training, by the names of `FederatedMethod.fine_tune`."""
    if method.fine_tune is not None:
        return method.fine_tune(server, client_state, data, key, hyper)
    message = method.broadcast(server)
    result = method.client_update(message, client_state, data, key, hyper)
    models = {
        name: personal.variables(server, result.client_state)
        for name, personal in method.personal_models.items()
    }
    if method.sends_models:
        params = jax.tree.map(jnp.subtract, message.params, result.update)
        models[SHARED_MODEL] = Variables(params, result.mutable)
    return models


def single_model(model: Model, variables: Callable[[PyTree], Variables]) -> Predictor:
    """The Predictor of one model."""
    return Predictor(model, variables, model.outputs)


def by_member(name: str, predictor: Predictor, tree: PyTree, axis: int = 0) -> dict[str, PyTree]:
    """A predictor's results by name: its own, or its members', who lie along `axis` of every leaf."""
    if not predictor.members:
        return {name: tree}
    before = (slice(None),) * axis
    member = lambda index: jax.tree.map(lambda leaf: leaf[(*before, index)], tree)
    return {name_of_member: member(index) for index, name_of_member in enumerate(predictor.members)}


def message_to_reduce(method: FederatedMethod, server: PyTree, message: PyTree) -> PyTree:
    """What `method.reduce.finalize` gets for the message that clients downloaded."""
    return message if method.server_message is None else method.server_message(server)


def client_key(root: jax.Array, round: jax.Array, pool: str) -> jax.Array:
    """The key of a pool's clients in a round, the same whether the pool runs alone or not."""
    return keys.derive(root, "client_update", round, pool)
