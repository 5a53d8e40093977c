"""Which round, pool and seed an error of an update names that is not finite."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedcodist.run.divergence import TrainingDiverged, check_finite


def algorithm_of(pools):
    """What is read of an algorithm: the names of its pools."""
    return SimpleNamespace(communication=dict.fromkeys(pools))


def test_the_round_in_which_it_first_happened_is_named():
    history = {
        "a/finite": np.array([[True, True, False], [True, True, True]]),
        "b/finite": np.array([[True, True, True], [True, False, False]]),
    }
    algorithm = algorithm_of("a")
    with pytest.raises(TrainingDiverged, match="in round 13, pool 'a', seed 5:"):
        check_finite(10, history, np.array([5, 6]), algorithm)
    algorithm = algorithm_of("b")
    with pytest.raises(TrainingDiverged, match="in round 12, pool 'b', seed 6:"):
        check_finite(10, history, np.array([5, 6]), algorithm)
    # A model that became non-finite later may have been taught by it.
    for order in ("ab", "ba"):
        algorithm = algorithm_of(order)
        with pytest.raises(TrainingDiverged, match="in round 12, pool 'b', seed 6:"):
            check_finite(10, history, np.array([5, 6]), algorithm)


def test_what_clients_sent_must_be_told():
    with pytest.raises(KeyError, match="a/finite"):
        check_finite(
            0,
            {"a/loss": np.full((1, 1), np.nan)},
            np.array([5]),
            algorithm_of("a"),
        )


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_in_one_round_what_clients_sent_goes_before_the_models(order):
    """Models may be mixed with those of another pool by then."""
    finite = np.full((2, 3), True)
    history = {f"{pool}/{what}": finite for pool in "ab" for what in ("finite", "finite_model")}
    broken = np.array([[True, True, True], [True, False, False]])
    history |= {"a/finite_model": broken, "b/finite": broken, "b/finite_model": broken}
    algorithm = algorithm_of(order)
    with pytest.raises(TrainingDiverged, match="in round 2, pool 'b', seed 6:"):
        check_finite(0, history, np.array([5, 6]), algorithm)
    history |= {"b/finite": finite, "b/finite_model": finite}
    what = "non-finite model or server state in round 2, pool 'a', seed 6:"
    with pytest.raises(TrainingDiverged, match=what):
        check_finite(0, history, np.array([5, 6]), algorithm)
