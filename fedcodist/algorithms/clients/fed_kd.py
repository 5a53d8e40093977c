"""FedKD: each client's private teacher and a small shared student teach each other.

"Communication-efficient federated learning via knowledge distillation" (Wu, Wu, Lyu, Huang, Xie, 2022).
https://arxiv.org/abs/2108.13323

On each batch, with D = L_t^task + L_s^task,

    L_t = L_t^task + KL(student || teacher) / D + L^h / D       (the teacher imitates the student)
    L_s = L_s^task + KL(teacher || student) / D + L^h / D

L^h is the sum of mean squared distances over aligned layers: between W^h times the student's hidden
state and the teacher's hidden state, and between attention maps. D is differentiated: this is the
formula read literally, and the paper does not say whether D gets a gradient. It multiplies the gradient
of a model's task loss by 1 - (KL + L^h) / D^2; `MutualLosses.detach_normaliser` explains when this
matters, and turns it off.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_kd_checks import check_mutual, map_shapes
from fedcodist.algorithms.clients.fed_kd_clients import FedKDClients, FedKDClientState, FedKDMessage
from fedcodist.algorithms.clients.fed_kd_exchange import EXCHANGES, TEACHER
from fedcodist.algorithms.clients.fed_kd_losses import MutualLosses
from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_choice, check_number
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import FederatedMethod, PersonalModel
from fedcodist.core.model import Model, Variables, variable_shapes
from fedcodist.core.optimizer_factories import lasting_state

PyTree = Any
TEACHERS = "teachers"  # the name under which all clients' teachers are evaluated


class FedKDHyper(NamedTuple):
    """Floats of FedKD; traced. The default rates are usual ones of Adam, for untrained networks.

    The paper fine-tunes pre-trained encoders; in news recommendation with 2e-6 (teacher) and 5e-6.

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
    """The student's FedAvg server, and data of the key from which all teachers are drawn."""

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
    """Clients train their teacher and a copy of the student together; the students are averaged.

    The method's model is the student. Clients finally predict with their teachers, which are evaluated
    as `teachers`. All teachers start from the same values. They are client states, on the host if data
    are streamed. Means over clients are unweighted. For FedKD's compression use
    `compressed(fed_kd(...), num_rounds, svd(), svd())`.

    Args:
      teacher, student: networks of [batch, classes] logits, or of `LayerOutputs`. Layers are aligned
        from the top: with L and m layers, the student's l-th and the teacher's l L/m-th. Both or none
        must return hidden states. Attention maps are used if both return some; if the numbers of
        attention heads differ, maps are averaged over heads.
      columns: the federated data's columns (arrays or shapes), for the widths of W^h.
      training: of both models, on the same batches. Each model has its own optimizer, which continues
        over rounds. Embeddings of `fedcodist.text.encoder_start.with_frozen_tables` do not change. SVD
        sends nothing for parameters whose updates by `training.optimizer` are 0.
      exchange: with 'epoch_delta' clients train for `training.epochs` per round, and the changes of
        their students are averaged (the authors' code). With 'step_gradient' a round is one batch and
        the student's gradients are averaged. The server takes a step of `training.optimizer` along
        their mean, and clients download the result. (In algorithm 1 clients download the mean and take
        the step themselves.) Then `training.epochs` is not used.
      fresh_optimizers: whether clients' optimizers start anew in each round. Without hidden states and
        adaptive weights this is FML with both weights 1/2, if FedKD's learning rates of plain SGD are
        half of FML's.
      mutual: how the models learn from each other.
      hyper: learning rates, and the weights of L^d and L^h; 0 leaves a term out.

    Raises:
      ValueError, TypeError: an unknown option, numbers of classes or layers that do not fit, or
        different widths without W^h.
    """
    check_arguments(fed_kd, locals())
    check_choice("exchange", exchange, tuple(EXCHANGES))
    check_mutual(mutual, training)
    for name, value in hyper._asdict().items():
        check_number(f"hyper.{name}", value, low=0)
    shapes = map_shapes(teacher, student, columns, training, mutual)
    exchanged = EXCHANGES[exchange](training)
    if not exchanged.sends_models:  # the server's optimizer is that of `training`
        kept = functools.partial(lasting_state, "training.optimizer", training.optimizer)
        jax.eval_shape(kept, variable_shapes(student).params)
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
        # Clients' changes: the new student is the mean of their students. Clients' gradients: the server
        # optimizer takes a step along their mean.
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
