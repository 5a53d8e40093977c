"""The interfaces of federated methods, and of algorithms as the experiment loop sees them.

A *client state* is what one client keeps between its participations. A *pool* is the clients who train
one model. In algorithms of parties every party has a model of its own. Then `client_states` is empty and
the only cohort is `parties`. Metrics and `communication` use the parties' names in place of pools.
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
FINE_TUNED = "_fine_tuned"  # suffix of the names of models after one more local training


class PersonalModel(NamedTuple):
    """A model that every client keeps in its state, such as FedKD's teacher.

    Attributes:
      model: gives outputs, loss and metrics.
      variables: (state, client_state) -> a client's Variables; defined before its first participation
        too. `state` is the server's in a FederatedMethod, and the algorithm's in a FederatedAlgorithm.
    """

    model: Model
    variables: Callable[[PyTree, PyTree], Variables]


class PrivateSends(NamedTuple):
    """What privacy accounting has to know about a method made by `fedcodist.privacy.private`.

    Attributes:
      noise_multiplier: a sum's noise standard deviation, divided by the bound on one client's share.
      expected_clients: the number that sums are divided by; None: how many clients took part.
      bands: rounds over which noise is correlated; in so many rounds a client may take part once.
      is_adaptive: whether the bound on updates changes from round to round.
      tells_metrics: whether clients send training metrics, which are not protected.
    """

    noise_multiplier: float
    expected_clients: int | None
    bands: int = 1
    is_adaptive: bool = False
    tells_metrics: bool = True


class SetModel(Protocol):
    """The type of `FederatedMethod.set_model`: (server, Variables, reset_optimizer) -> server."""

    def __call__(
        self, server: PyTree, variables: Variables, reset_optimizer: bool, /
    ) -> PyTree: ...


class FederatedMethod(NamedTuple):
    """A single-model method (FedAvg, FedProx, ...) as small pure functions.

    Distillation between pools composes with any method: it reads `variables`, changes the
    aggregate's pseudo-gradient before `server_update`, or replaces the model after it.

    Attributes:
      model: the network.
      hyper: default hyper-parameters, a pytree of floats; traced, so other values do not recompile.
      init: key -> server state. If a part of it depends on what clients keep or on earlier rounds, such
        as SCAFFOLD's variate, the state has a method `without_clients() -> server state`, which begins
        this part anew for a run that starts from this state.
      broadcast: server -> message, what a client downloads. Its attributes `params` and `mutable` are
        the model.
      client_update: (message, client_state, data, key, hyper) -> ClientResult.
      reduce: how results are summed, and how the server turns the sum into an Aggregate.
      server_update: (server, aggregate, round, hyper) -> server. Schedules are functions of round.
      variables: server -> the model's Variables.
      set_model: (server, Variables, reset_optimizer) -> server with that model. The server's optimizer
        starts afresh if `reset_optimizer`, a Python bool, is true. Distillation at the server uses it.
      init_client_state: () -> client state before the first participation; None if clients keep none.
      personal_models: name -> PersonalModel that can be evaluated; none in most methods.
      sends_models: whether a client's update is the received model minus the trained one. A server that
        needs the individual models computes them from updates, but cannot from gradients or sketches.
      num_clients: how many clients the pool must have, if the method depends on it; else None.
      name: the method's name, for progress and tables.
      gradient: (message, client_state, data, key, hyper) -> the gradient of a client's loss on one batch
        at the received model, for diagnostics. None if a method does not define it.
      fine_tune: (server, client_state, data, key, hyper) -> name -> Variables: a client's models after
        it has adapted them to its own examples. Names are those of `personal_models`, and SHARED_MODEL
        for the shared model. None: they are the models after `client_update`.
      privacy: for privacy accounting; None if the method's sums are not private.
      num_rounds: the most rounds of a run, if something in the method changes over the run, such as a
        compressor's threshold; else None.
      after_sending: (client_state, extra, sent) -> client state of a client that sends `sent` in place
        of its own `extra`, such as a clipped one. It is for methods whose server must agree with what
        clients keep. None: the same client state.
      server_message: server -> the message that `reduce.finalize` gets. It may also hold what only the
        server knows, such as the state of its noise. None: it is the message that clients download.
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
    num_rounds: int | None = None
    after_sending: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None
    server_message: Callable[[PyTree], PyTree] | None = None


def after_sending_within(
    method: FederatedMethod,
) -> Callable[[PyTree, PyTree, PyTree], PyTree] | None:
    """`after_sending` for a method whose client state holds that of `method` in its field `inner`."""
    inner = method.after_sending
    if inner is None:
        return None
    return lambda state, extra, sent: state._replace(inner=inner(state.inner, extra, sent))


class HostState(Protocol):
    """State in the host's memory, which checkpoints hold beside the algorithm's state."""

    def state(self) -> PyTree:
        """Arrays; the first axis may grow over a run."""

    def shapes(self) -> PyTree:
        """The shapes of `state`; -1 stands for the length of a first axis that grows."""

    def restore(self, state: PyTree) -> None:
        """Continues from a checkpoint's `state`."""

    def clear(self) -> None:
        """Begins a run without a checkpoint: forgets earlier runs of the process."""


class Predictor(NamedTuple):
    """A model, or an ensemble, that can be evaluated.

    Attributes:
      model: gives loss and metrics of the outputs.
      variables: algorithm state -> Variables (stacked, for an ensemble).
      predict: (Variables, batch) -> outputs, in evaluation mode.
      members: names of models that one program evaluates one after another, such as the parties of
        one architecture. `variables` is then stacked, leaves [members, ...]. `predict` gets one
        member's, and results have the members' names. Empty for one model.
      clients: the clients to whom the members belong, ascending; empty if they belong to no client.
    """

    model: Model
    variables: Callable[[PyTree], Variables]
    predict: Callable[[Variables, Mapping[str, jax.Array]], Any]
    members: tuple[str, ...] = ()
    clients: tuple[int, ...] = ()


class ClientModels(NamedTuple):
    """The models that clients would use, which are evaluated on each client's own examples.

    Attributes:
      clients: int32 [n], client indices in ascending order.
      predictors: name -> Predictor, which gives outputs, loss and metrics. Its `variables` is not used.
      variables: (state, client_state) -> name -> one client's argument of `predict`, Variables or an
        ensemble. `state` is the algorithm's.
      fine_tuned: (state, client_state, data, key, hyper) -> name -> Variables after the client has
        trained on its examples `data` once more; names are those of `predictors`. None if methods do
        not distinguish models before and after local training.
      client_states: state -> leaves [n, ...], for clients whose models lie in the algorithm's state,
        such as parties. None: they are those of the pool in the algorithm's `client_states`.
    """

    clients: np.ndarray
    predictors: Mapping[str, Predictor]
    variables: Callable[[PyTree, PyTree], dict[str, PyTree]]
    fine_tuned: (
        Callable[[PyTree, PyTree, ClientData, jax.Array, PyTree], dict[str, PyTree]] | None
    ) = None
    client_states: Callable[[PyTree], PyTree] | None = None


class PrivateCohorts(NamedTuple):
    """One pool's sums, as privacy accounting sees them; one sum per round.

    Attributes:
      clients: int32 [n], the clients who can be drawn.
      noise_multiplier: that of `PrivateSends`; 0 if the pool's method is not private.
      cohort_size: clients per round; the expected number for a Poisson cohort.
      most: a Poisson cohort's largest size; None for cohorts of a fixed size, without replacement.
      cycle: rounds in which every client can be drawn once.
      select: what draws these cohorts. An algorithm with another `select` is refused.
    """

    clients: np.ndarray
    noise_multiplier: float
    cohort_size: int
    most: int | None = None
    cycle: int = 1
    select: Callable[[jax.Array, jax.Array], Selection] | None = None


class FederatedAlgorithm(NamedTuple):
    """A whole algorithm, as the experiment loop sees it. Every function is pure.

    Attributes:
      name: the method's name, for tables.
      hyper: default hyper-parameters, a pytree of floats.
      init: key -> state.
      client_states: pool -> ClientStates: which clients keep a state, and its initial value.
      select: (round, key) -> Selection. It never looks at the model, so it can run ahead on a host
        that streams data. Everything it draws is a function of (round, key), so there is no sampler
        state to carry or to checkpoint.
      round: (state, client_states, Round, hyper) -> (state, client_states, metrics). `client_states`
        are the cohorts', pool -> leaves [cohort, ...]. Metrics are arrays that are averaged over rounds,
        most of them scalars. For every key of `communication` they must have `<pool>/finite`: whether
        everything that the pool's clients sent is finite. `<pool>/finite_model`, whether its new model
        is finite, is optional.
      predictors: name -> Predictor.
      communication: pool -> bytes of one participation, computed from shapes. Where they differ from
        round to round, the metrics `<pool>/client_bytes_up` and `client_bytes_down` replace them.
      num_clients: clients that the data must have, one more than the largest index of any pool.
      data_set_sizes: data set -> examples that it must have, as `select` draws among them.
      notes: lines that the launcher prints before the run, such as how much memory it needs.
      personal_models: pool -> name -> PersonalModel of the pool's clients. Tables report the mean over
        clients under this name.
      host_state: state that programs look up in the host's memory, such as MHD's stale checkpoints.
        None for most algorithms.
      client_models: pool -> the models that its clients would use. Those of parties follow from
        `predictors`, see `all_client_models`.
      privacy: pool -> PrivateCohorts, for every pool whose cohorts are drawn independently. Empty if no
        pool's method is private.
      num_rounds: the most rounds of a run, if a schedule was made for so many; else None.
      restart: a run's last state -> the state with which another run begins (`Experiment.start`). What
        depends on the earlier run's rounds, such as FedSDD's buffer of models, begins anew. None: the
        same state.
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
    num_rounds: int | None = None
    restart: Callable[[PyTree], PyTree] | None = None


def all_client_models(algorithm: FederatedAlgorithm) -> dict[str, ClientModels]:
    """Pool or architecture -> the models that its clients would use; PARTIES names parties' models."""

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
    """A predictor's results by name: its own name, or its members', which lie along `axis` of leaves."""
    if not predictor.members:
        return {name: tree}
    before = (slice(None),) * axis
    member = lambda index: jax.tree.map(lambda leaf: leaf[(*before, index)], tree)
    return {name_of_member: member(index) for index, name_of_member in enumerate(predictor.members)}


def message_to_reduce(method: FederatedMethod, server: PyTree, message: PyTree) -> PyTree:
    """The message for `method.reduce.finalize`; `message` is the one that clients downloaded."""
    return message if method.server_message is None else method.server_message(server)


def client_key(root: jax.Array, round: jax.Array, pool: str) -> jax.Array:
    """The key of a pool's clients in a round, the same whether the pool runs alone or not."""
    return keys.derive(root, "client_update", round, pool)
