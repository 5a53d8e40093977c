"""FLOPs of a forward pass, from the program of a network."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp


def forward_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """FLOPs of the matrix products and convolutions of a function of arrays or their shapes.

    If a function has several versions, such as our convolutions with one per platform, the cheapest is
    counted, which is the direct one.

    Raises:
      ValueError: a loop of unknown length.
    """
    return _flops(jax.make_jaxpr(function)(*arguments).jaxpr)


@functools.cache
def forward_flops_of(model: tuple[Callable[[], Any], tuple[int, ...]]) -> float:
    """FLOPs of a network on one example; `model` is a value of MODELS."""
    create, shape = model
    network, image = create(), jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    variables = jax.eval_shape(network.init, jax.random.key(0), image)
    return forward_flops(network.apply, variables, image)


def flops_per_token(network: Any, length: int, samples: int = 0) -> float:
    """FLOPs of a network that returns a Readout on one of `length` tokens, its logits included.

    Args:
      network: a Flax linen module that is called with tokens.
      length: tokens of a sentence; attention reads all of them.
      samples: of a sampled softmax, with logits for the samples and the label; with 0 for all classes.
    """
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    variables = jax.eval_shape(network.init, jax.random.key(0), tokens)
    width, classes = jax.eval_shape(network.apply, variables, tokens).kernel.shape
    logits = 2 * width * (samples + 1 if samples else classes)
    return forward_flops(network.apply, variables, tokens) / length + logits


def _flops(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, outputs = equation.primitive.name, equation.outvars
        if name == "while":
            raise ValueError("a loop of unknown length has no fixed number of FLOPs.")
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * outputs[0].aval.size * math.prod(shape[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            features = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * outputs[0].aval.size * kernel.size // features
        elif name == "cond":
            total += min(_flops(branch.jaxpr) for branch in equation.params["branches"])
        else:
            length = equation.params["length"] if name == "scan" else 1
            total += length * sum(_flops(inner) for inner in _inner(equation.params))
    return total


def _inner(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        if isinstance(value, jax.extend.core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, jax.extend.core.Jaxpr):
            yield value
