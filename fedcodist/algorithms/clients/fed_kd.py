"""FedKD (Wu et al., 2022): private teachers and one small student that travels teach each other.

https://arxiv.org/abs/2108.13323

On each batch, with D = L_t^task + L_s^task,

    L_t = L_t^task + KL(student || teacher) / D + L^h / D       (the teacher imitates the student)
    L_s = L_s^task + KL(teacher || student) / D + L^h / D

where L^h sums the mean squared distances of aligned layers, W^h times the student's hidden state from
the teacher's, and attention map from attention map. D is differentiated as the paper writes it, which
multiplies the gradient of a model's task by 1 - (KL + L^h) / D^2; `MutualLosses.detach_normaliser` says
when that matters, and turns it off.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_kd_checks import check_choice, check_mutual, map_shapes
from fedcodist.algorithms.clients.fed_kd_clients import FedKDClients, FedKDClientState, FedKDMessage
from fedcodist.algorithms.clients.fed_kd_exchange import EXCHANGES, TEACHER
from fedcodist.algorithms.clients.fed_kd_losses import MutualLosses
from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import FederatedMethod, PersonalModel
from fedcodist.core.model import Model, Variables

PyTree = Any
TEACHERS = "teachers"  # of all clients, as they are evaluated


class FedKDHyper(NamedTuple):
    """Floats of FedKD; traced. Rates are Adam's usual ones, for networks that start untrained.

    The paper fine-tunes pre-trained encoders, in news recommendation at 2e-6 (teacher) and 5e-6.

    Attributes:
      teacher_learning_rate: of teachers and their maps W^h.
      student_learning_rate: of the student.
      output_weight: of L^d, the divergence between the two models' predictions.
      hidden_weight: of L^h, the distance between their hidden states and attentions.
    """

    teacher_learning_rate: Any = 1e-3
    student_learning_rate: Any = 1e-3
    output_weight: Any = 1.0
    hidden_weight: Any = 1.0


class FedKDServer(NamedTuple):
    """FedAvg's server of the student, and data of the key from which all teachers are drawn."""

    averaging: Any
    key: jax.Array


def fed_kd(
    teacher: Model,
    student: Model,
    columns: Mapping[str, Any],
    training: LocalTraining = LocalTraining(optax.adam, batch_size=32),
    exchange: str = "epoch_delta",
    fresh_optimizers: bool = False,
    mutual: MutualLosses = MutualLosses(),
    hyper: FedKDHyper = FedKDHyper(),
) -> FederatedMethod:
    """Clients train their teacher and a copy of the student together; students are averaged.

    The method's model is the student. The teachers, which predict in the end, are evaluated as
    `teachers`; they start from the same values and are client states, on the host where data are
    streamed. Means over clients are plain. What FedKD sends is sent by
    `compressed(fed_kd(...), num_rounds, svd(), svd())`.

    Args:
      teacher, student: networks of [batch, classes] logits, or of `LayerOutputs`. Layers are aligned
        from the top: of L and m layers, the student's l-th and the teacher's l L/m-th; hidden states of
        both or of none, attention maps where both have some. Different numbers of heads are averaged.
      columns: the federated data's columns (arrays or shapes), for the widths of W^h.
      training: of both models, on the same batches; optimizers are two, and go on from round to
        round. Embeddings stay as they are where models are those of
        `fedcodist.text.bert.with_frozen_tables`; for what `training.optimizer` makes updates of 0,
        SVD sends nothing.
      exchange: 'epoch_delta', clients train for `training.epochs` a round and their students' changes
        are averaged (the authors' code); or 'step_gradient', a round is one batch and gradients of the
        student are averaged, along whose mean the server takes a step of `training.optimizer`, which is
        what clients download (in algorithm 1 they download the mean and take the step themselves).
      fresh_optimizers: whether clients' optimizers start anew in each round. Without hidden states and
        adaptive weights that is FML with weights of a half, at half the learning rates.
      mutual: how the models learn from each other.
      hyper: learning rates, and weights with which to leave a term out.

    Raises:
      ValueError, TypeError: one line; an unknown option, numbers of classes or layers that do not fit,
        or different widths without W^h.
    """
    check_arguments(fed_kd, locals())
    check_choice("exchange", exchange, tuple(EXCHANGES))
    check_mutual(mutual)
    for name, value in hyper._asdict().items():
        check_number(f"hyper.{name}", value, low=0)
    shapes = map_shapes(teacher, student, columns, training, mutual)
    exchanged = EXCHANGES[exchange](training)
    averaging = fed_avg(student, training, exchanged.server_optimizer)
    clients = FedKDClients(teacher, student, shapes, exchanged, fresh_optimizers, mutual)

    def init(key: jax.Array) -> FedKDServer:
        drawn = keys.derive(key, "init", TEACHER)  # of all teachers
        return FedKDServer(averaging.init(key), jax.random.key_data(drawn))

    def broadcast(server: FedKDServer) -> FedKDMessage:
        params, mutable = averaging.variables(server.averaging)
        return FedKDMessage(params, mutable, server.key)

    def server_update(
        server: FedKDServer, aggregate: Aggregate, round: jax.Array, hyper: FedKDHyper
    ) -> FedKDServer:
        # The server takes a step along the mean of what clients sent: to the mean of the students where
        # they sent changes, of the optimizer where they sent gradients.
        rate = exchanged.server_rate(hyper.student_learning_rate)
        rates = FedAvgHyper(rate, rate)
        stepped = averaging.server_update(server.averaging, aggregate, round, rates)
        return server._replace(averaging=stepped)

    def set_model(server: FedKDServer, new: Variables, reset_optimizer: bool) -> FedKDServer:
        averaged = averaging.set_model(server.averaging, new, reset_optimizer)
        return server._replace(averaging=averaged)

    def init_client_state() -> FedKDClientState:
        message = jax.eval_shape(lambda key: broadcast(init(key)), jax.random.key(0))
        room = jax.eval_shape(clients.first_state, message)
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), room)

    return FederatedMethod(
        name="fed_kd",
        model=student,
        hyper=hyper,
        init=init,
        broadcast=broadcast,
        client_update=clients.update,
        reduce=averaging.reduce,
        server_update=server_update,
        variables=lambda server: averaging.variables(server.averaging),
        set_model=set_model,
        init_client_state=init_client_state,
        personal_models={TEACHERS: PersonalModel(teacher, clients.teacher_of)},
        sends_models=exchanged.sends_models,
        gradient=clients.gradient,
    )
