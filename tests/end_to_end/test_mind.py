"""MIND from its files to measured rankings, on the sample with few of its articles."""

import os
from pathlib import Path

import numpy as np
import optax
import pytest

import fedcodist as fc
from fedcodist.data import FederatedData, load_prepared, manifest, merge_clients
from fedcodist.text.bert import Encoder
from fedcodist.text.candidates import all_candidates, sampled_candidates
from fedcodist.text.news import news_recommender
from tests.datasets.test_mind import article, behavior, layout
from tests.datasets.test_prepare import program

METRICS = ("auc", "mrr", "ndcg_5", "ndcg_10")


def trained_on(folder, rounds, rate, with_teachers=False):
    """Metrics lines of the test split: FedAvg, or FedKD with compressed links, of two clients."""
    splits = load_prepared(folder)
    titles = splits["news"].columns["tokens"]
    clients = merge_clients(splits["train"], 2, seed=0)

    def network(layers):
        pieces = splits["vocabulary"].num_examples
        encoder = Encoder(pieces, width=16, layers=layers, heads=2, dropout=0.0)
        return news_recommender(encoder, width=16, queries=8, dropout=0.0)

    training = fc.LocalTraining(optax.adam, batch_size=16, preprocess=sampled_candidates(titles))
    method = fc.fed_avg(network(1), training, optax.sgd, hyper=fc.FedAvgHyper(rate, 1.0))
    if with_teachers:
        hyper = fc.FedKDHyper(rate, rate)
        method = fc.fed_kd(network(2), network(1), clients.columns, training, hyper=hyper)
        method = fc.compressed(method, rounds, fc.svd(), fc.svd())
    test = splits["test"]
    test = FederatedData.from_arrays(
        test.columns, offsets=[0, test.num_examples], client_ids=["test"]
    )
    pools = {"main": fc.Pool(method, np.arange(2), cohort_size=2)}
    experiment = fc.Experiment(
        fc.independent_pools(pools, clients.columns),
        fc.resident_data(clients),
        {"test": test},
        rounds=rounds,
        evaluate_every=rounds,
        evaluation_batch_size=8,
        evaluation_preprocess=all_candidates(titles),
    )
    records = fc.run_experiment(experiment, show_progress=False).records
    return [record for record in records if record["split"] == "test"]


@pytest.mark.slow
@pytest.mark.skipif("FEDCODIST_DATA" not in os.environ, reason="needs the sample of MIND")
@pytest.mark.parametrize("with_teachers", [False, True])
def test_the_real_sample_is_skipped_counted_trained_and_measured(tmp_path, with_teachers):
    source = Path(os.environ["FEDCODIST_DATA"]) / "mind_sample"
    arguments = ["--source", str(source), "--output", str(tmp_path / "mind"), "--pieces=1000"]
    assert program("mind").main(arguments) == 0
    skipped = manifest(tmp_path / "mind")["arguments"]["skipped"]
    assert skipped["candidates without an article"] == 184_049
    records = trained_on(tmp_path / "mind", rounds=2, rate=0.001, with_teachers=with_teachers)
    models = ["main", "main_teachers"] if with_teachers else ["main"]
    found = [(record["round"], record["model"]) for record in records]
    assert sorted(found) == [(round, model) for round in (0, 2) for model in models]
    for record in records:
        assert all(0 <= record[name] <= 1 for name in METRICS) and record["loss"] > 0


@pytest.mark.slow
def test_what_can_be_learnt_is_learnt(tmp_path):
    """Readers click one kind of news: its rank goes from chance to nearly always first."""
    draw = np.random.default_rng(0)
    kinds = {f"N{n}": ("ball goal team" if n % 2 else "vote law party") for n in range(40)}
    lines = []
    for user in range(200):
        own = [n for n in range(40) if n % 2 == user % 2]
        rest = [n for n in range(40) if n % 2 != user % 2]
        shown = [f"N{draw.choice(own)}-1", *(f"N{n}-0" for n in draw.choice(rest, 5, False))]
        history = " ".join(f"N{n}" for n in draw.choice(own, 5))
        lines.append(behavior(user, f"U{user}", history, " ".join(draw.permutation(shown))))
    source = layout(tmp_path / "source", [article(*each) for each in kinds.items()], lines)
    arguments = ["--source", str(source), "--output", str(tmp_path / "mind"), "--length=6"]
    assert program("mind").main(arguments) == 0
    before, after = trained_on(tmp_path / "mind", rounds=6, rate=0.01)
    assert after["auc"] > 0.95 > before["auc"]
    assert after["mrr"] > 0.95 and after["ndcg_5"] > 0.95 and after["loss"] < before["loss"]
