"""FedKD (Wu et al., 2022): private teachers and one small student that travels teach each other."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, client_result, fed_avg
from fedcodist.algorithms.clients.fed_kd_losses import (
    MutualLosses,
    Outputs,
    aligned,
    by_input,
    mutual_losses,
)
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.layer_outputs import as_layers
from fedcodist.core.local_training import (
    LocalTraining,
    OptimizerFactory,
    drawn_examples,
    gradient_of_a_batch,
    last_gradient,
    lasting_state,
    train_client,
)
from fedcodist.core.method import FederatedMethod, PersonalModel
from fedcodist.core.model import Model, Variables

PyTree = Any
TEACHER, STUDENT, MAPS = "teacher", "student", "maps"
TEACHERS = "teachers"  # of all clients, as they are evaluated
EXCHANGES = ("epoch_delta", "step_gradient")


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


class FedKDMessage(NamedTuple):
    """What a client downloads: the student, and FedKDServer's key."""

    params: PyTree
    mutable: PyTree
    key: jax.Array


class FedKDClientState(NamedTuple):
    """What never leaves a client.

    Attributes:
      teacher: its Variables.
      maps: W^h of the aligned layers, [student's width, teacher's width].
      optimizers: states of the teacher's (and maps') and of the student's; () for the latter where
        gradients are exchanged, and for both where optimizers are fresh.
      has_started: bool; before, all else is but room.
    """

    teacher: Variables
    maps: list[jax.Array]
    optimizers: tuple[PyTree, PyTree]
    has_started: jax.Array


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

    On each batch, with D = L_t^task + L_s^task,

        L_t = L_t^task + KL(student || teacher) / D + L^h / D       (the teacher imitates the student)
        L_s = L_s^task + KL(teacher || student) / D + L^h / D

    where L^h sums the mean squared distances of aligned layers, W^h times the student's hidden state
    from the teacher's, and attention map from attention map. D is differentiated as the paper writes it,
    which multiplies the gradient of a model's task by 1 - (KL + L^h) / D^2;
    `MutualLosses.detach_normaliser` says when that matters, and turns it off. What FedKD sends is
    sent by `compressed(fed_kd(...), num_rounds, svd(), svd())`. The method's model is the student, and
    the teachers, which predict in the end, are evaluated as `teachers`. They start from the same values
    and are client states, on the host where data are streamed. Means over clients are plain.

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
    _check("exchange", exchange, EXCHANGES)
    _check("mutual.adaptive", mutual.adaptive, ("batch", "sample", "none"))
    _check("mutual.kl_reduction", mutual.kl_reduction, ("batchmean", "elementmean"))
    _check("mutual.hidden_map", mutual.hidden_map, ("learned", "identity"))
    for name in ("detach_targets", "detach_normaliser", "without_padding"):
        _check(f"mutual.{name}", getattr(mutual, name), (False, True))
    for name, value in hyper._asdict().items():
        check_number(f"hyper.{name}", value, low=0)
    widths = _widths(teacher, student, columns, training, mutual)
    by_step = exchange == "step_gradient"
    averaging = fed_avg(student, training, training.optimizer if by_step else optax.sgd)
    training = training._replace(optimizer=two_optimizers(training.optimizer, by_step))
    if by_step:
        training = training._replace(epochs=1)
    pair = teacher_and_student(teacher, student)

    def init(key):
        return FedKDServer(
            averaging.init(key), jax.random.key_data(keys.derive(key, "init", TEACHER))
        )

    def kept(states):
        if fresh_optimizers:
            return (), ()
        return (states[0], ()) if by_step else states

    def fresh(params):
        both = lambda rate: training.optimizer((rate, rate))
        return lasting_state("training.optimizer", both, params)

    def broadcast(server):
        params, mutable = averaging.variables(server.averaging)
        return FedKDMessage(params, mutable, server.key)

    def first_client_state(message):
        first_teacher = teacher.init(jax.random.wrap_key_data(message.key))
        maps = [jnp.eye(*shape) for shape in widths]
        params = {TEACHER: first_teacher.params, MAPS: maps, STUDENT: message.params}
        return FedKDClientState(first_teacher, maps, kept(fresh(params)), jnp.asarray(True))

    def received(message, client_state):
        """The client's state, its first one before it started, and the pair's variables."""
        client_state = jax.lax.cond(
            client_state.has_started, lambda: client_state, lambda: first_client_state(message)
        )
        params = {
            TEACHER: client_state.teacher.params,
            MAPS: client_state.maps,
            STUDENT: message.params,
        }
        mutable = {TEACHER: client_state.teacher.mutable, STUDENT: message.mutable}
        return client_state, Variables(params, mutable)

    def total_loss(hyper):
        losses = mutual_losses(teacher, student, mutual, hyper.output_weight, hyper.hidden_weight)
        return lambda outputs, batch: jnp.add(*losses(outputs, batch))

    def gradient(message, client_state, data, key, hyper):
        _, variables = received(message, client_state)
        whole = gradient_of_a_batch(pair, training, variables, data, key, total_loss(hyper))
        return whole[STUDENT]

    def client_update(message, client_state, data, key, hyper):
        client_state, variables = received(message, client_state)
        states = client_state.optimizers
        if by_step:
            data = drawn_examples(data, training.batch_size, keys.derive(key, "batch"))
            states = (states[0], jax.tree.map(jnp.zeros_like, message.params))
        if fresh_optimizers:
            states = fresh(variables.params)
        rates: Any = (hyper.teacher_learning_rate, hyper.student_learning_rate)
        trained = train_client(
            pair,
            training,
            variables,
            data,
            key,
            rates,
            loss_hook=total_loss(hyper),
            optimizer_state=states,
        )
        params, mutable = trained.variables
        client_state = FedKDClientState(
            Variables(params[TEACHER], mutable[TEACHER]),
            params[MAPS],
            kept(trained.optimizer_state),
            client_state.has_started,
        )
        of_student = trained._replace(variables=Variables(params[STUDENT], mutable[STUDENT]))
        result = client_result(message, of_student, weight=1.0, client_state=client_state)
        return result._replace(update=trained.optimizer_state[1]) if by_step else result

    def server_update(server, aggregate, round, hyper):
        rate = hyper.student_learning_rate if by_step else 1.0
        rates = FedAvgHyper(rate, rate)
        return server._replace(
            averaging=averaging.server_update(server.averaging, aggregate, round, rates)
        )

    def teacher_of(server, client_state):
        first = lambda: teacher.init(jax.random.wrap_key_data(server.key))
        return jax.lax.cond(client_state.has_started, lambda: client_state.teacher, first)

    def init_client_state():
        message = jax.eval_shape(lambda key: broadcast(init(key)), jax.random.key(0))
        shapes = jax.eval_shape(first_client_state, message)
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)

    return FederatedMethod(
        name="fed_kd",
        model=student,
        hyper=hyper,
        init=init,
        broadcast=broadcast,
        client_update=client_update,
        reduce=averaging.reduce,
        server_update=server_update,
        variables=lambda server: averaging.variables(server.averaging),
        set_model=lambda server, new, reset_optimizer: server._replace(
            averaging=averaging.set_model(server.averaging, new, reset_optimizer)
        ),
        init_client_state=init_client_state,
        personal_models={TEACHERS: PersonalModel(teacher, teacher_of)},
        sends_models=not by_step,
        gradient=gradient,
    )


def teacher_and_student(teacher: Model, student: Model) -> Model:
    """The two models as one of `Outputs`, with parameters {'teacher', 'maps', 'student'}."""

    def apply(variables, batch, *, key=None, mask=None, **arguments):
        params, mutable = variables
        found = {
            part: model.apply(
                Variables(params[part], mutable[part]),
                batch,
                # The student drops the units that it would drop in FedAvg.
                key=keys.derive(key, TEACHER) if part == TEACHER else key,
                mask=mask,
                **arguments,
            )
            for part, model in ((TEACHER, teacher), (STUDENT, student))
        }
        outputs = Outputs(found[TEACHER][0], found[STUDENT][0], params[MAPS], mask)
        return outputs, {part: each[1] for part, each in found.items()}

    return student._replace(apply=apply)


def two_optimizers(factory: OptimizerFactory, keeps_gradient: bool) -> OptimizerFactory:
    """(teacher's rate, student's) -> one optimizer that is one for each, the maps being the teacher's.

    With `keeps_gradient` the student stays, and its optimizer's state is its last gradient.
    """

    def create(rates):
        teachers, students = factory(rates[0]), factory(rates[1])
        if keeps_gradient:
            students = last_gradient()
        private = lambda tree: {TEACHER: tree[TEACHER], MAPS: tree[MAPS]}

        def init(params):
            return teachers.init(private(params)), students.init(params[STUDENT])

        def update(gradient, states, params):
            teachers_update, teachers_state = teachers.update(
                private(gradient), states[0], private(params)
            )
            students_update, students_state = students.update(
                gradient[STUDENT], states[1], params[STUDENT]
            )
            return teachers_update | {STUDENT: students_update}, (teachers_state, students_state)

        return optax.GradientTransformation(init, update)

    return create


def _widths(
    teacher: Model,
    student: Model,
    columns: Mapping[str, Any],
    training: LocalTraining,
    mutual: MutualLosses,
) -> list[tuple[int, int]]:
    """The shapes of W^h, none for the identity; raises one line where the models do not fit."""
    one = {n: jax.ShapeDtypeStruct((1, *c.shape[1:]), c.dtype) for n, c in columns.items()}
    batch = jax.eval_shape(training.preprocess, one, jax.random.key(0), jnp.zeros(1, jnp.int32))

    def outputs(model):
        call = lambda key, batch: as_layers(model.apply(model.init(key), batch)[0])
        return jax.eval_shape(call, jax.eval_shape(lambda: jax.random.key(0)), batch)

    of_teacher, of_student = outputs(teacher), outputs(student)
    if of_teacher.logits.shape != of_student.logits.shape or of_teacher.logits.ndim != 2:
        raise ValueError(
            "teacher and student must have as many classes, logits [batch, classes], got "
            f"{list(of_teacher.logits.shape)} and {list(of_student.logits.shape)}."
        )
    widths = []
    for layers in aligned("hidden states", of_teacher.hidden, of_student.hidden):
        for target, state in by_input("hidden states", *layers):
            if target.shape[:-1] != state.shape[:-1]:
                raise ValueError(
                    "student's hidden states must be of the teacher's shapes but for the width, got "
                    f"{list(state.shape)} for {list(target.shape)}."
                )
            if mutual.hidden_map == "identity" and target.shape != state.shape:
                raise ValueError(
                    "mutual.hidden_map must be 'learned' where widths differ, got 'identity' for a "
                    f"student's {state.shape[-1]} and a teacher's {target.shape[-1]}."
                )
        widths.append((state.shape[-1], target.shape[-1]))  # one for all inputs
    if of_teacher.attention and of_student.attention:
        for layers in aligned("attention maps", of_teacher.attention, of_student.attention):
            for target, state in by_input("attention maps", *layers):
                if target.shape[2:] != state.shape[2:]:
                    raise ValueError(
                        "student's attention maps must be of the teacher's positions, got "
                        f"{list(state.shape)} for {list(target.shape)}."
                    )
    if mutual.without_padding:
        _check_real(of_teacher, of_student)
    return [] if mutual.hidden_map == "identity" else widths


def _check_real(of_teacher: Any, of_student: Any) -> None:
    """Raises one line unless both models tell which tokens are real, in each input that layers read."""
    for whose, outputs in (("teacher", of_teacher), ("student", of_student)):
        layers = outputs.hidden or outputs.attention
        inputs = len(jax.tree.leaves(layers[0])) if layers else 0
        if not inputs or len(jax.tree.leaves(outputs.is_real)) != inputs:
            raise ValueError(
                f"mutual.without_padding must be False for a {whose} that does not tell padding "
                "(LayerOutputs.is_real, for each input that its layers read), got True."
            )


def _check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}.")
