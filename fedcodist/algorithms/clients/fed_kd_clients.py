"""FedKD's clients: each has a private teacher, and a copy of the student, which is exchanged."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.clients.fed_avg import client_result, uniform_weight
from fedcodist.algorithms.clients.fed_kd_exchange import MAPS, STUDENT, TEACHER, Exchange
from fedcodist.algorithms.clients.fed_kd_losses import MutualLosses, Outputs, mutual_losses
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.inputs import ClientData
from fedcodist.core.joint_model import joint_model, joint_variables, part_of
from fedcodist.core.local_training import gradient_of_a_batch, train_client
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.optimizer_factories import lasting_state

PyTree = Any


class FedKDMessage(NamedTuple):
    """What a client downloads: the student, and FedKDServer's key."""

    params: PyTree
    mutable: PyTree
    key: jax.Array


class FedKDClientState(NamedTuple):
    """The client state, which never leaves the client.

    Attributes:
      teacher: its Variables.
      maps: W^h of the aligned layers, [student's width, teacher's width].
      optimizers: (state of the optimizer of teacher and maps, state of the student's). The second is ()
        if gradients are exchanged; both are () if optimizers are fresh in each round.
      has_started: bool; false before the first participation, when all other fields are zeros.
    """

    teacher: Variables
    maps: list[jax.Array]
    optimizers: tuple[PyTree, PyTree]
    has_started: jax.Array


class FedKDClients(NamedTuple):
    """A client's training in a round.

    Attributes:
      teacher, student: the networks.
      map_shapes: of W^h, one for each aligned layer.
      exchange: whether the student's change or its gradient is sent.
      fresh_optimizers: whether optimizers start anew in each round.
      mutual: how the models learn from each other.
    """

    teacher: Model
    student: Model
    map_shapes: list[tuple[int, int]]
    exchange: Exchange
    fresh_optimizers: bool
    mutual: MutualLosses

    def update(
        self,
        message: FedKDMessage,
        client_state: FedKDClientState,
        data: ClientData,
        key: jax.Array,
        hyper: Any,
    ) -> ClientResult:
        """FederatedMethod.client_update."""
        return self.train(message, self._started(message, client_state), data, key, hyper)

    def train(
        self,
        message: FedKDMessage | Variables,
        client_state: FedKDClientState,
        data: ClientData,
        key: jax.Array,
        hyper: Any,
    ) -> ClientResult:
        """As `update`, of a client that has started."""
        # Teacher and W^h are the client state; the student is downloaded.
        variables = self._variables(message, client_state)
        states = self.exchange.resumed(client_state.optimizers, message.params)
        if self.fresh_optimizers:
            states = self._first_optimizers(variables.params)

        # Algorithm 1, on each batch: the teacher takes a step along the gradient of L_t, and the student
        # along that of L_s. With the exchange of gradients the student's gradient is kept instead.
        rates: Any = (hyper.teacher_learning_rate, hyper.student_learning_rate)
        trained = train_client(
            self._pair(hyper),
            self.exchange.training,
            variables,
            self.exchange.examples(data, key),
            key,
            rates,
            optimizer_state=states,
        )

        # The teacher stays here; the student's change, or its gradient, is sent.
        client_state = FedKDClientState(
            part_of(trained.variables, TEACHER),
            trained.variables.params[MAPS],
            self._kept(trained.optimizer_state),
            client_state.has_started,
        )
        of_student = trained._replace(variables=part_of(trained.variables, STUDENT))
        result = client_result(message, of_student, uniform_weight(data), client_state)
        return result._replace(update=self.exchange.update(result.update, trained.optimizer_state))

    def gradient(
        self,
        message: FedKDMessage,
        client_state: FedKDClientState,
        data: ClientData,
        key: jax.Array,
        hyper: Any,
    ) -> PyTree:
        """FederatedMethod.gradient, the student's."""
        variables = self._variables(message, self._started(message, client_state))
        pair = self._pair(hyper)
        return gradient_of_a_batch(pair, self.exchange.training, variables, data, key)[STUDENT]

    def teacher_of(self, server: Any, client_state: FedKDClientState) -> Variables:
        """A client's teacher; the initial one before its first participation."""
        first = lambda: self.teacher.init(jax.random.wrap_key_data(server.key))
        return jax.lax.cond(client_state.has_started, lambda: client_state.teacher, first)

    def first_state(self, message: FedKDMessage) -> FedKDClientState:
        """The client state at the first participation: the initial teacher, and identities as W^h."""
        teacher = self.teacher.init(jax.random.wrap_key_data(message.key))
        return self.first_state_of(teacher, message.params)

    def first_state_of(self, teacher: Variables, student: PyTree) -> FedKDClientState:
        """The client state of a teacher and the student's parameters before any training."""
        maps = [jnp.eye(*shape) for shape in self.map_shapes]
        params = {TEACHER: teacher.params, MAPS: maps, STUDENT: student}
        optimizers = self._kept(self._first_optimizers(params))
        return FedKDClientState(teacher, maps, optimizers, jnp.asarray(True))

    def _started(self, message: FedKDMessage, client_state: FedKDClientState) -> FedKDClientState:
        """The client state, or the initial one at the first participation."""
        return jax.lax.cond(
            client_state.has_started, lambda: client_state, lambda: self.first_state(message)
        )

    def _variables(
        self, message: FedKDMessage | Variables, client_state: FedKDClientState
    ) -> Variables:
        """Those of both models, and W^h."""
        student = Variables(message.params, message.mutable)
        pair = joint_variables({TEACHER: client_state.teacher, STUDENT: student})
        return pair._replace(params=pair.params | {MAPS: client_state.maps})

    def _first_optimizers(self, params: PyTree) -> PyTree:
        optimizer = self.exchange.training.optimizer
        return lasting_state("training.optimizer", lambda rate: optimizer((rate, rate)), params)

    def _kept(self, states: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        return ((), ()) if self.fresh_optimizers else self.exchange.kept(states)

    def _pair(self, hyper: Any) -> Model:
        """The joint model, which returns `Outputs` and whose loss is L_t + L_s."""
        losses = mutual_losses(
            self.teacher, self.student, self.mutual, hyper.output_weight, hyper.hidden_weight
        )
        loss = lambda outputs, batch: jnp.add(*losses(outputs, batch))
        return teacher_and_student(self.teacher, self.student, loss)


def teacher_and_student(
    teacher: Model, student: Model, loss: Callable[[Outputs, Batch], jax.Array]
) -> Model:
    """The joint model, which returns `Outputs`, with parameters {'teacher', 'maps', 'student'}."""
    # With this key, dropout in the student is the same as in FedAvg.
    pair = joint_model({TEACHER: teacher, STUDENT: student}, loss, keeps_key=STUDENT)

    def apply(
        variables: Variables, batch: Batch, *, mask: jax.Array, **arguments: Any
    ) -> tuple[Outputs, PyTree]:
        outputs, mutable = pair.apply(variables, batch, mask=mask, **arguments)
        maps = variables.params[MAPS]
        return Outputs(outputs[TEACHER], outputs[STUDENT], maps, mask), mutable

    return pair._replace(apply=apply)
