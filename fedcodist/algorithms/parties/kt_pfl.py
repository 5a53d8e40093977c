"""KT-pFL: each party learns its own mixture of all parties' soft predictions, with trained weights.

Zhang, Guo, Ma, Wang, Xu and Wu, "Parameterized Knowledge Transfer for Personalized Federated Learning",
NeurIPS 2021, https://arxiv.org/abs/2111.02862.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.parties.groups import (
    PartyGroup,
    all_clients,
    by_architecture,
    check_groups,
    check_widths,
    in_client_order,
    party_names,
    same_for_all,
)
from fedcodist.algorithms.parties.knowledge_coefficients import Coefficients, updated_coefficients
from fedcodist.algorithms.parties.open_examples import (
    OpenExamples,
    checked_size,
    drawing,
    open_communication,
    view_of_round,
)
from fedcodist.algorithms.parties.party import (
    PARTIES,
    AfterRound,
    PartiesResult,
    PartyResult,
    PartyUpdate,
    assemble,
    init_models,
    run_parties,
    training_loss,
    training_metrics,
)
from fedcodist.algorithms.parties.shared_examples import PUBLIC, inference, shared_examples
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.batches import TARGET, beside_targets
from fedcodist.core.checks import check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.local_training import LocalTraining, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.trees import is_finite
from fedcodist.distillation.divergences import kl_divergence, softened

PyTree = Any
# A party's model, and the mixture of predictions that it learns
Pupil = tuple[Variables, jax.Array]


class KTpFLState(NamedTuple):
    """Parties' models by architecture, leaves [group, ...], and the knowledge coefficients.

    Row n of `coefficients` [parties, parties] has the weights of all parties, in the order of clients,
    in party n's mixture.
    """

    models: dict[str, Variables]
    coefficients: jax.Array


class KTpFLHyper(NamedTuple):
    """Floats of KT-pFL; traced.

    Attributes:
      learning_rate, distillation_learning_rate: of private and of open examples.
      coefficient_rate: of the server's gradient step on the knowledge coefficients.
      uniform_weight: rho, which pulls coefficients towards equal weights.
      temperature: T of soft predictions, for sending and for training.
      sharpness: factor before the softmax of `rows='softmax'`; not used by 'simplex'.
    """

    learning_rate: Any = 0.02
    distillation_learning_rate: Any = 0.02
    coefficient_rate: Any = 0.1
    uniform_weight: Any = 0.7
    temperature: Any = 10.0
    sharpness: Any = 5.0


def kt_pfl(
    groups: Mapping[str, PartyGroup],
    open_examples: OpenExamples,
    local: LocalTraining = LocalTraining(batch_size=16),
    distillation: LocalTraining = LocalTraining(batch_size=256),
    coefficients: Coefficients = Coefficients(),
    hyper: KTpFLHyper = KTpFLHyper(),
    execution: Execution = Execution(),
    name: str = "kt_pfl",
) -> FederatedAlgorithm:
    """In a round parties train locally and send soft predictions, and each learns its mixture of them.

    The mixture of party n is sum_m c_nm softmax(z_m / T), with knowledge coefficients c, which are all
    1/N before the first round. A party minimises KL(mixture || softmax(z / T)), without a factor T^2. In
    every round the server takes one gradient step on c, on the predictions of this round. Optimizers are
    fresh in every round.

    We did not have the paper's text: order, loss and step are not verified. The authors' code differs:
    it uses `Coefficients('mse', 'softmax', first=True)`; it adapts the step size to the gradient by
    powers of 5, which is not offered; its epochs of local training grow from 1 to 10 over rounds; it
    divides the distillation loss by the number of classes; it evaluates models after local training.

    Args:
      groups: architecture -> its parties.
      open_examples: how many there are, and how many a round takes.
      local: training on private examples.
      distillation: training on the open ones.
      coefficients: how the server trains them.
      hyper: learning rates, rho, T and sharpness.
      execution, name: as in `fed_md`.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(kt_pfl, locals())
    groups = check_groups(groups)
    num_classes = next(iter(groups.values())).model.num_classes
    first = next(iter(groups))
    check_widths(groups, num_classes, f"groups[{first!r}].model.num_classes")
    check_training("local", local)
    check_training("distillation", distillation)
    checked_size(open_examples)
    _check_floats(hyper)
    count = len(all_clients(groups))

    def init(key: jax.Array) -> KTpFLState:
        return KTpFLState(init_models(groups, key), jnp.full((count, count), 1 / count))

    def round_(
        state: KTpFLState, client_states: PyTree, round: Round, hyper: KTpFLHyper
    ) -> AfterRound:
        columns, preprocess = view_of_round(round, distillation.preprocess)
        sizes = round.inputs.cohorts[PARTIES].sizes
        divergence = softened(kl_divergence("forward"), hyper.temperature, scaled=False)

        # Local training, then soft predictions of the open examples, which the party sends.
        def train(
            model: Model, message: None, variables: Variables, data: ClientData, key: jax.Array
        ) -> PartyResult:
            trained = train_client(model, local, variables, data, key, hyper.learning_rate)
            examples, size = shared_examples(columns, data), open_examples.inference_batch_size
            logits = inference(model, trained.variables, examples, preprocess, size)
            metrics = training_metrics(trained)
            soft = jax.nn.softmax(logits / hyper.temperature)
            return PartyResult(trained.variables, metrics, reports=soft)

        # Distillation: KL of the party's own soft predictions from its mixture.
        def learn(
            model: Model, message: None, party: Pupil, data: ClientData, key: jax.Array
        ) -> PartyResult:
            variables, mixture = party

            def loss(outputs: Any, batch: Batch) -> jax.Array:
                return divergence(checked_logits(outputs), batch[TARGET])

            examples = shared_examples(columns | {TARGET: mixture}, data)
            rate = hyper.distillation_learning_rate
            training = distillation._replace(preprocess=beside_targets(preprocess))
            taught = train_client(model, training, variables, examples, key, rate, loss_hook=loss)
            metrics = {
                "distillation_loss": training_loss(taught),
                "finite": is_finite(taught.variables),
            }
            return PartyResult(taught.variables, metrics)

        def run(update: PartyUpdate, models: Mapping[str, PyTree], purpose: str) -> PartiesResult:
            key = keys.derive(round.key, purpose, round.index)
            return run_parties(groups, update, None, models, round, key, execution)

        trained = run(train, state.models, "client_update")
        predictions = in_client_order(groups, trained.reports)
        # The server: one gradient step on c, and a mixture for every party.
        stepped = updated_coefficients(state.coefficients, predictions, sizes, coefficients, hyper)
        used = stepped if coefficients.first else state.coefficients
        mixtures = by_architecture(
            groups, jnp.tensordot(used, predictions, axes=1, precision="highest")
        )
        # Every party downloads its mixture and learns from it.
        pairs = {name: (models, mixtures[name]) for name, models in trained.states.items()}
        taught = run(learn, pairs, "distillation")
        metrics = trained.metrics | taught.metrics | _shown(groups, used)
        return KTpFLState(taught.states, stepped), client_states, metrics

    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, name: state.models[name],
        same_for_all(groups, open_communication(open_examples, num_classes)),
        drawing(open_examples),
        {PUBLIC: open_examples.num_public},
    )


def _shown(groups: Mapping[str, PartyGroup], coefficients: jax.Array) -> dict[str, jax.Array]:
    """Every party's row of the coefficients, as a metric."""
    rows = by_architecture(groups, coefficients)
    return {
        f"{party}/coefficients": rows[name][index]
        for name, parties in party_names(groups).items()
        for index, party in enumerate(parties)
    }


def _check_floats(hyper: KTpFLHyper) -> None:
    for field in ("learning_rate", "distillation_learning_rate", "coefficient_rate"):
        check_number(f"hyper.{field}", getattr(hyper, field), low=0)
    check_number("hyper.uniform_weight", hyper.uniform_weight, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)
    check_number("hyper.sharpness", hyper.sharpness, low=0)
