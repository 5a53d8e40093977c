"""The models that a run evaluates, and the shapes of their variables."""

import jax

from fedcodist.core import keys
from fedcodist.core.method import FederatedAlgorithm, Predictor, single_model
from fedcodist.core.model import Variables
from fedcodist.core.shape_checks import check_variables
from fedcodist.core.user_functions import traced


def evaluated_models(algorithm: FederatedAlgorithm) -> dict[str, tuple[Predictor, Variables]]:
    """Name -> predictor and the shapes of one model's Variables, personal models included.

    A predictor of several members has them once, with the shapes of one member.

    Raises:
      ValueError, TypeError: names a personal model whose `variables` does not fit its states.
    """
    state = jax.eval_shape(algorithm.init, keys.key_shape())
    models: dict[str, tuple[Predictor, Variables]] = {}
    for name, predictor in algorithm.predictors.items():
        variables = jax.eval_shape(predictor.variables, state)
        if predictor.members:
            of_member = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
            variables = jax.tree.map(of_member, variables)
        models[name] = predictor, variables
    for pool, personal_models in algorithm.personal_models.items():
        client_state = algorithm.client_states[pool].first
        for name, personal in personal_models.items():
            where = f"algorithm.personal_models[{pool!r}][{name!r}].variables"
            variables = traced(where, personal.variables, state, client_state)
            check_variables(where, variables)
            models[name] = single_model(personal.model, lambda state: state), variables
    return models
