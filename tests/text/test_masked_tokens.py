"""Masked tokens: which, what is read in their place, their loss, and that an encoder learns."""

import functools

import bert_reference
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.local_only import LocalOnlyHyper, local_only
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.data.bert_tokens import BEGINNING, END, MASKED, SPECIAL, BertVocabulary
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data
from fedcodist.text.bert import Encoder
from fedcodist.text.masked_tokens import hidden_tokens, masked_language_model

pytestmark = pytest.mark.usefixtures("compile_quickly")

VOCABULARY = BertVocabulary((*SPECIAL, *map(str, range(20))))
BEGINS, ENDS, MASK = (VOCABULARY.number(piece) for piece in (BEGINNING, END, MASKED))
ENCODER = Encoder(VOCABULARY.size, width=8, layers=1, heads=2, positions=40, dropout=0.0)


def sentences(lengths, width, seed=0):
    tokens = np.zeros((len(lengths), width), np.uint16)
    draw = np.random.default_rng(seed)
    for row, length in zip(tokens, lengths, strict=True):
        row[0], row[length + 1] = BEGINS, ENDS
        row[1 : length + 1] = draw.integers(len(SPECIAL), VOCABULARY.size, length)
    return tokens


@functools.cache
def preprocessing(share):
    return jax.jit(hidden_tokens(VOCABULARY, share))


def hide(tokens, key=0, positions=None, share=0.15):
    positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
    batch = preprocessing(share)({"tokens": tokens}, jax.random.key(key), positions)
    return {name: np.asarray(column) for name, column in batch.items()}


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 18), min_size=3, max_size=3),
    st.sampled_from([0.15, 1.0]),
    st.integers(0, 100),
)
def test_as_many_tokens_are_hidden_as_asked_for_and_none_besides(lengths, share, seed):
    tokens = sentences(lengths, 20, seed)
    batch = hide(tokens, seed, share=share)
    for row, length in enumerate(lengths):
        places = batch["places"][row]
        kept = places[places >= 0]
        expected = min(length, max(1, np.round(np.float32(share) * np.float32(length))))
        assert len(kept) == len(set(kept.tolist())) == expected
        assert not np.isin(tokens[row, kept], (0, BEGINS, ENDS)).any()
        np.testing.assert_array_equal(batch["label"][row][: len(kept)], tokens[row, kept])
        assert not batch["label"][row][len(kept) :].any()
        others = np.setdiff1d(np.arange(20), kept)
        np.testing.assert_array_equal(batch["tokens"][row, others], tokens[row, others])
        assert (batch["tokens"][row, kept] != 0).all()


def test_shares_of_mask_any_and_same():
    tokens = sentences([38] * 2000, 40)
    batch = hide(tokens)
    assert batch["places"].shape == (2000, 6) and (batch["places"] >= 0).all()
    shown = np.take_along_axis(batch["tokens"], batch["places"], axis=1)
    is_mask, is_same = shown == MASK, shown == batch["label"]
    # A token of 24 is drawn in place of one in ten: it is the mask or the same in one of 24.
    for share, expected in (
        (is_mask.mean(), 0.8 + 0.1 / 24),
        (is_same.mean(), 0.1 + 0.1 / 24),
        ((~is_mask & ~is_same).mean(), 0.1 * 22 / 24),
    ):
        assert abs(share - expected) < 4 * np.sqrt(0.8 * 0.2 / shown.size)
    counts = np.bincount(batch["places"].ravel(), minlength=40)
    assert counts[0] == counts[39] == 0
    np.testing.assert_allclose(counts[1:39], 12_000 / 38, rtol=0.25)


def test_draws_depend_on_the_key_and_the_position_alone():
    tokens = sentences([9, 9, 9], 12)
    tokens[2] = tokens[0]
    whole = hide(tokens)
    part = hide(tokens[1:], positions=[1, 2])
    for name, column in whole.items():
        np.testing.assert_array_equal(part[name], column[1:])
    assert (hide(tokens, key=1)["places"] != whole["places"]).any()
    assert (whole["places"][2] != whole["places"][0]).any()


@pytest.mark.slow
def test_the_loss_is_that_of_hidden_tokens_in_a_loop():
    model = masked_language_model(ENCODER)
    batch = jax.tree.map(jnp.asarray, hide(sentences([18, 3, 0], 20)))
    noise = np.random.default_rng(0)
    with jax.enable_x64(True):
        start = jax.jit(model.init)(jax.random.key(0)).params
        params = jax.tree.map(
            lambda leaf: jnp.asarray(leaf + 0.4 * noise.normal(size=leaf.shape)), start
        )
        outputs, _ = jax.jit(model.apply)(Variables(params, {}), batch)
        loss = model.loss(outputs, batch)
        per_token = {name: each(outputs, batch) for name, each in model.metrics.items()}
    params = jax.tree.map(np.asarray, params)
    for row, tokens in enumerate(batch["tokens"]):
        hidden = bert_reference.encode(params["encoder"], tokens, heads=2)[0][-1]
        losses, hits = [], []
        for place, label in zip(batch["places"][row], batch["label"][row], strict=True):
            if place >= 0:
                inner = bert_reference.dense(params["transform"], hidden[place])
                inner = np.array([bert_reference.gelu(each) for each in inner])
                inner = bert_reference.normalised(inner, params)
                logits = params["encoder"]["embeddings"]["words"] @ inner + params["bias"]
                losses.append(-np.log(bert_reference.softmax(logits)[label]))
                hits.append(1 + np.argmax(logits[1:]) == label)
        expected = np.mean(losses) if losses else 0
        np.testing.assert_allclose(loss[row], expected, rtol=1e-9)
        for name, values in (("loss", losses), ("accuracy", hits)):
            found, weight = (each[row] for each in per_token[name])
            assert weight == len(losses)
            np.testing.assert_allclose(found, np.mean(values) if values else 0, rtol=1e-9)


def test_gradients_reach_the_table_from_both_ends():
    model = masked_language_model(ENCODER)
    batch = jax.tree.map(jnp.asarray, hide(sentences([18, 3], 20)))
    variables = jax.jit(model.init)(jax.random.key(0))

    def loss(params):
        return jnp.sum(model.loss(model.apply(Variables(params, {}), batch)[0], batch))

    words = jax.jit(jax.grad(loss))(variables.params)["encoder"]["embeddings"]["words"]
    assert np.abs(words).max(axis=1).min() > 0


@pytest.mark.slow
def test_an_isolated_run_learns_what_follows_what(tmp_path):
    # Every sentence counts upwards, so neighbours tell what is hidden.
    first = len(SPECIAL) + np.arange(12)[:, None]
    tokens = np.concatenate([np.full((12, 1), BEGINS), first + np.arange(8)], axis=1)
    tokens = np.concatenate([tokens, np.full((12, 1), ENDS)], axis=1).repeat(8, axis=0)
    data = FederatedData.from_arrays({"tokens": tokens}, offsets=[0, len(tokens)])
    preprocess = hidden_tokens(VOCABULARY)
    training = LocalTraining(optax.adam, 32, epochs=10, preprocess=preprocess)
    experiment = Experiment(
        algorithm=local_only(
            {"encoder": PartyGroup(masked_language_model(ENCODER), np.array([0]))},
            training,
            hyper=LocalOnlyHyper(0.01),
        ),
        data=resident_data(data),
        splits={"train": data},
        rounds=4,
        evaluate_every=4,
        evaluation_preprocess=preprocess,
    )
    outcome = run_experiment(experiment, tmp_path / "run", show_progress=False)
    before, after = (record for record in outcome.records if record["split"] == "train")
    assert after["loss"] < before["loss"] / 2 and after["accuracy"] > 0.5 > before["accuracy"]


def test_a_share_out_of_range_is_one_line():
    for share in (0, 1.5):
        with pytest.raises(ValueError, match=r"^share must be "):
            hidden_tokens(VOCABULARY, share)
