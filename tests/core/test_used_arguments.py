"""Arguments on which a traced function's results depend, by tracing alone and by NaN that spreads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.core.used_arguments import used_arguments


def loop(a, b, c, count):
    """b reaches the carry of c only, in a second pass that of a."""
    return jax.lax.fori_loop(
        0, count, lambda _, carry: (carry[0] + carry[2], b, carry[1]), (a, c, c)
    )


def scanned(a, b, c, count):
    return jax.lax.scan(lambda carry, x: (carry + x[0], x[1]), a, (b, c))


def branches(a, b, c, count):
    return jax.lax.cond(count > 1, lambda: (a, b), lambda: (a + c, c))


@jax.custom_vjp
def called(a, b):
    return a * 2, b


called.defvjp(lambda a, b: (called(a, b), None), lambda _, gradient: gradient)


def calls(a, b, c, count):
    return jax.checkpoint(lambda a, b: jax.jit(called)(a, b))(a, b)


@pytest.mark.parametrize("function", [loop, scanned, branches, calls])
@pytest.mark.parametrize("which", [0, 1])
def test_what_a_result_depends_on_is_used_and_nothing_else(function, which):
    arguments = [jnp.ones(3) for _ in "abc"]
    if function is loop:
        expected = [[True, True, True, True], [False, True, True, True]][which]
    else:
        expected = {
            scanned: [[True, True, False, False], [False, False, True, False]],
            branches: [[True, False, True, True], [False, True, True, True]],
            calls: [[True, False, False, False], [False, True, False, False]],
        }[function][which]
    jaxpr = jax.make_jaxpr(function)(*arguments, 4)
    needed = [index == which for index in range(len(jaxpr.jaxpr.outvars))]
    assert used_arguments(jaxpr, needed) == expected
    # A NaN in what is said to be of no use does not reach the result.
    for place, is_used in enumerate(expected[:3]):
        if is_used or function is scanned:
            continue
        spoilt = [
            jnp.full(3, jnp.nan) if index == place else a for index, a in enumerate(arguments)
        ]
        assert np.isfinite(function(*spoilt, 4)[which]).all()
