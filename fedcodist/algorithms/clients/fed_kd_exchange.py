"""FedKD's two exchanges: clients send the student's change or its gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.core import keys
from fedcodist.core.inputs import ClientData
from fedcodist.core.joint_model import joint_optimizer
from fedcodist.core.local_training import LocalTraining, drawn_examples, last_gradient
from fedcodist.core.optimizer_factories import OptimizerFactory

PyTree = Any
TEACHER, STUDENT, MAPS = "teacher", "student", "maps"


class Exchange(NamedTuple):
    """How a round works with one exchange. "States" are (teacher's, student's) optimizer states.

    Attributes:
      training: of both models in a round, with an optimizer of (teacher's rate, student's rate).
      examples: (data, key) -> the client's examples of a round.
      resumed: (states in the client state, student's parameters) -> states at the start of a round.
      kept: states after a round -> states in the client state.
      update: (the student's change, states after a round) -> the update that a client sends.
      server_optimizer: learning rate -> optimizer that steps along the mean of the clients' updates.
      server_rate: the student's learning rate -> the server's.
      sends_models: whether a client's student can be computed from its update.
    """

    training: LocalTraining
    examples: Callable[[ClientData, jax.Array], ClientData]
    resumed: Callable[[tuple[PyTree, PyTree], PyTree], tuple[PyTree, PyTree]]
    kept: Callable[[tuple[PyTree, PyTree]], tuple[PyTree, PyTree]]
    update: Callable[[PyTree, tuple[PyTree, PyTree]], PyTree]
    server_optimizer: OptimizerFactory
    server_rate: Callable[[Any], Any]
    sends_models: bool


def epoch_delta(training: LocalTraining) -> Exchange:
    """Clients train for some epochs, and the students' changes are averaged (the authors' code)."""
    return Exchange(
        training._replace(optimizer=two_optimizers(training.optimizer, training.optimizer)),
        examples=lambda data, key: data,
        resumed=lambda states, params: states,
        kept=lambda states: states,
        update=lambda change, states: change,
        server_optimizer=optax.sgd,
        server_rate=lambda rate: 1.0,
        sends_models=True,
    )


def step_gradient(training: LocalTraining) -> Exchange:
    """A round is one batch, and the student's gradients are averaged (algorithm 1).

    Clients do not change the student. The server takes a step along the mean gradient.
    """
    optimizer = two_optimizers(training.optimizer, lambda rate: last_gradient())
    no_gradient = lambda params: jax.tree.map(jnp.zeros_like, params)
    return Exchange(
        training._replace(optimizer=optimizer, epochs=1),
        examples=lambda data, key: drawn_examples(
            data, training.batch_size, keys.derive(key, "batch")
        ),
        resumed=lambda states, params: (states[0], no_gradient(params)),
        kept=lambda states: (states[0], ()),
        update=lambda change, states: states[1],
        server_optimizer=training.optimizer,
        server_rate=lambda rate: rate,
        sends_models=False,
    )


EXCHANGES = {"epoch_delta": epoch_delta, "step_gradient": step_gradient}


def two_optimizers(
    teachers_factory: OptimizerFactory, students_factory: OptimizerFactory
) -> OptimizerFactory:
    """(teacher's rate, student's) -> one optimizer of both models; the teacher's part trains W^h too."""

    def create(rates: tuple[Any, Any]) -> optax.GradientTransformation:
        of_teacher, students = teachers_factory(rates[0]), students_factory(rates[1])
        teachers = joint_optimizer({TEACHER: of_teacher, MAPS: of_teacher})
        private = lambda tree: {TEACHER: tree[TEACHER], MAPS: tree[MAPS]}

        def init(params: PyTree) -> tuple[PyTree, PyTree]:
            return teachers.init(private(params)), students.init(params[STUDENT])

        def update(
            gradient: PyTree, states: tuple[PyTree, PyTree], params: PyTree
        ) -> tuple[PyTree, tuple[PyTree, PyTree]]:
            teachers_update, teachers_state = teachers.update(
                private(gradient), states[0], private(params)
            )
            students_update, students_state = students.update(
                gradient[STUDENT], states[1], params[STUDENT]
            )
            return teachers_update | {STUDENT: students_update}, (teachers_state, students_state)

        return optax.GradientTransformation(init, update)

    return create
