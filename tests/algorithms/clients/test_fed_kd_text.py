"""FedKD of a teacher and a student that read text: the student is the teacher's first layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from text_examples import ENCODER, IMPRESSIONS, SENTENCES

from fedcodist.algorithms.clients.fed_kd import FedKDHyper, fed_kd
from fedcodist.algorithms.clients.fed_kd_losses import MutualLosses, hidden_distance
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.svd import svd
from fedcodist.core.client_states import device_client_states
from fedcodist.core.local_training import LocalTraining
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import resident_data
from fedcodist.text.encoder_start import first_layers, with_encoder, with_frozen_tables
from fedcodist.text.news import news_recommender
from fedcodist.text.sentence_classifier import sentence_classifier

pytestmark = pytest.mark.usefixtures("compile_quickly")


def one_round(method, columns):
    data = FederatedData.from_arrays(columns, offsets=[0, 1, len(columns["label"])])
    algorithm = independent_pools({"pool": Pool(method, np.arange(2), 2)}, columns)
    programs = build_programs(algorithm, 1)
    rows = jax.tree.map(jnp.asarray, device_client_states(algorithm.client_states, 1))
    seeds, hyper = jnp.zeros(1, jnp.uint32), jax.tree.map(np.float32, algorithm.hyper)
    state, *_ = programs.train(programs.init(seeds), rows, seeds, 0, 1, hyper, resident_data(data))
    return method.variables(jax.tree.map(lambda leaf: leaf[0], state["pool"])).params


def test_candidates_and_history_share_a_map_per_aligned_layer():
    make = lambda encoder: news_recommender(encoder, width=6, queries=5, candidates=3)
    teacher = make(ENCODER.clone(layers=4))
    student = make(ENCODER.clone(layers=2, width=4))
    method = fed_kd(teacher, student, IMPRESSIONS)
    assert [leaf.shape for leaf in method.init_client_state().maps] == [(4, 8)] * 2


@pytest.mark.parametrize("kind", ["classifier", "news"])
def test_networks_of_text_tell_their_padding(kind):
    """Distances that leave padding out do not depend on what padded positions hold."""
    columns, make = SENTENCES, lambda encoder: sentence_classifier(encoder, 3, queries=5)
    if kind == "news":
        columns = IMPRESSIONS
        make = lambda encoder: news_recommender(encoder, width=6, queries=5, candidates=3)
    teacher, student = make(ENCODER), make(ENCODER.clone(layers=1))
    fed_kd(teacher, student, columns, mutual=MutualLosses(without_padding=True))
    batch = {name: jnp.asarray(column) for name, column in columns.items()}
    outputs = [
        jax.eval_shape(
            lambda key, model=model: model.apply(model.init(key), batch)[0], jax.random.key(0)
        )
        for model in (teacher, student)
    ]
    drawn = np.random.default_rng(0)
    values = [
        jax.tree.map(lambda leaf: drawn.normal(size=leaf.shape).astype(np.float32), each)
        for each in outputs
    ]
    tokens = ("candidates", "history") if kind == "news" else ("tokens",)
    real = [np.asarray(columns[name]) != 0 for name in tokens]
    assert not all(each.all() for each in real)
    told = jax.tree.unflatten(jax.tree.structure(outputs[0].is_real), real)
    first, second = (each._replace(is_real=told) for each in values)
    places = iter([])

    def changed(leaf):
        return leaf + 9 * ~next(places)[..., None]

    before = hidden_distance(first, second, [], True)
    hidden = []
    for layer in first.hidden:
        places = iter(real)
        hidden.append(jax.tree.map(changed, layer))
    after = hidden_distance(first._replace(hidden=tuple(hidden)), second, [], True)
    np.testing.assert_allclose(after, before, rtol=1e-5)
    assert np.all(np.isfinite(before)) and before.shape == (len(columns["label"]),)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classifier", "news"])
def test_fed_kd_trains_a_student_that_is_the_teachers_first_layers(kind):
    columns, make = SENTENCES, lambda encoder: sentence_classifier(encoder, 3, queries=5)
    if kind == "news":
        columns = IMPRESSIONS
        make = lambda encoder: news_recommender(encoder, width=6, queries=5, candidates=3)
    encoder = ENCODER.init(jax.random.key(9), jnp.zeros((1, 2), jnp.int32))["params"]
    teacher = with_frozen_tables(with_encoder(make(ENCODER), encoder), encoder)
    first = first_layers(encoder, 1)
    student = with_frozen_tables(with_encoder(make(ENCODER.clone(layers=1)), first), first)
    training = LocalTraining(optax.adam, batch_size=2)
    method = fed_kd(teacher, student, columns, training, hyper=FedKDHyper(0.01, 0.01))
    found = one_round(compressed(method, 1, svd(0.9, 0.9), svd(0.9, 0.9)), columns)
    assert set(found["encoder"]["embeddings"]) == {"norm"}
    assert set(method.init_client_state().teacher.params["encoder"]["embeddings"]) == {"norm"}
    start = {**first, "embeddings": {"norm": first["embeddings"]["norm"]}}
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), found["encoder"], start)
    assert moved["layer0"]["query"]["kernel"] > 0 and moved["embeddings"]["norm"]["bias"] > 0
