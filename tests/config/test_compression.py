"""The compressors that configs name: what they lose does not grow over rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from fedcodist.compression.count_sketch import count_sketch
from fedcodist.compression.error_feedback import with_error_feedback
from fedcodist.config import defaults
from fedcodist.config.compression import COMPRESSORS
from fedcodist.config.data import load_data
from fedcodist.config.experiment import build_experiment
from fedcodist.configs import digits_compression, digits_heterogeneous
from fedcodist.core.inputs import Round
from fedcodist.run.sources import resident_data

UPDATE = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(49, 49)), jnp.float32)}
ROUNDS = 60


def restored(compressor):
    """[rounds, entries]: what the receiver gets of one dense update that is sent in every round."""

    @jax.jit
    def send(memory, key, progress):
        message, memory = compressor.compress(UPDATE, memory, key, progress)
        return compressor.decompress(message, UPDATE)["w"].ravel(), memory

    memory, received = compressor.init(UPDATE), []
    for round in range(ROUNDS):
        values, memory = send(memory, jax.random.key(round), jnp.float32(round / ROUNDS))
        received.append(np.asarray(values))
    return np.stack(received)


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name != "none"])
def test_messages_do_not_grow(name):
    config = digits_compression.get_config("fed_avg,count_sketch")
    settings = config.training.compression
    assert set(defaults.compression()) <= set(settings)
    norms = np.linalg.norm(restored(COMPRESSORS[name](settings)), axis=1)
    assert norms[-20:].max() < 4 * np.linalg.norm(UPDATE["w"])


def test_a_sketch_with_error_feedback_grows():
    """Why configs have none: the largest estimates of a dense update are collisions."""
    largest = np.abs(restored(with_error_feedback(count_sketch(3, 160, 120)))).max(axis=1)
    assert largest[20] > 1e3 * np.abs(UPDATE["w"]).max()


def test_parties_links_are_those_of_their_config():
    config = digits_heterogeneous.get_config("fed_kd_parties")
    config.rounds = 2
    config.seeds = 1
    experiment = build_experiment(config)
    config.algorithm.compression.uplink = "none"
    other = build_experiment(config)
    data = load_data(config.data).splits["train"]
    sizes = []
    for each in (experiment, other):
        resident = jax.tree.map(jnp.asarray, resident_data(data))
        inputs = resident.read(each.algorithm.select(0, jax.random.key(0)))
        each_round = lambda each=each, inputs=inputs: each.algorithm.round(
            each.algorithm.init(jax.random.key(0)),
            {},
            Round(0, jax.random.key(0), inputs),
            each.algorithm.hyper,
        )
        metrics = jax.eval_shape(each_round)[2]
        sizes.append({name.rpartition("/")[2] for name in metrics if "bytes" in name})
    assert sizes == [{"client_bytes_up", "client_bytes_down"}, {"client_bytes_down"}]


@pytest.mark.parametrize(
    ("run", "change", "message"),
    [
        (
            "fml",
            {"uplink": "svd"},
            r"^algorithm\.compression must be of a method of parties with .* such as fed_kd_parties",
        ),
        ("fed_kd_parties", {"uplink": "zip"}, "algorithm.compression.uplink must be one of"),
        (
            "fed_kd_parties",
            {"uplink": "top_k", "downlink": "none", "share": 0.1, "range_finder": 4},
            r"^algorithm\.compression\.range_finder must not be set unless uplink or downlink is 'svd'",
        ),
        ("fed_kd_parties", {"end": 1.5}, "algorithm.compression.end must be"),
    ],
)
def test_bad_settings_of_parties_are_named(run, change, message):
    config = digits_heterogeneous.get_config(run)
    settings = digits_heterogeneous.METHODS["fed_kd_parties"]["compression"]
    with config.unlocked(), config.ignore_type():
        config.algorithm.compression = ConfigDict({**settings, **change})
    with pytest.raises(ValueError, match=message) as raised:
        build_experiment(config)
    assert "\n" not in str(raised.value)
