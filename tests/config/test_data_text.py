"""Text in experiments: pools by domain, splits by domain, the table of domains, the demo."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from changed_splits import change_split
from ml_collections import ConfigDict

from experiments.configs import text_domain_shift
from fedcodist.config import data_text
from fedcodist.config.algorithm import build_algorithm
from fedcodist.config.data import load_data
from fedcodist.config.data_text import TEXT
from fedcodist.config.experiment import _around_codistillations, build_experiment
from fedcodist.config.registry import METHOD_NAMES, METHODS
from fedcodist.data import save_prepared, text_splits
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.vocabulary import EOS, PAD
from fedcodist.report import tables_domains, work
from fedcodist.report.entries import read_run
from fedcodist.report.flops import flops_of_run
from fedcodist.report.runs import Run, Series, load_run
from fedcodist.run.experiment import run_experiment
from fedcodist.run.export import save_model
from fedcodist.text import lstm
from fedcodist.text.next_token import language_model
from tests.end_to_end.conftest import clean_environment

pytestmark = pytest.mark.usefixtures("compile_quickly")

ROOT = Path(__file__).parents[2]
DOMAINS = ("prose", "code")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Users who write words of one kind in prose and of another in code."""
    rng = np.random.default_rng(0)
    words = {"prose": [f"word{i}" for i in range(8)], "code": [f"name{i}" for i in range(8)]}
    users = {
        f"user{user}": {
            domain: [rng.choice(words[domain], int(rng.integers(4, 12))).tolist() for _ in range(6)]
            for domain in DOMAINS
        }
        for user in range(40)
    }
    path = tmp_path_factory.mktemp("text") / "prepared"
    save_prepared(
        path,
        text_splits(users, DOMAINS),
        source="made up",
        licence="none",
        arguments={"domains": list(DOMAINS)},
    )
    return path


@pytest.fixture(autouse=True)
def tiny_networks(monkeypatch):
    monkeypatch.setitem(
        data_text.TEXT_MODELS, "lstm_small", lambda size: lstm.LSTMLanguageModel(size, 4, 3, 1)
    )
    monkeypatch.setitem(
        data_text.TEXT_MODELS, "lstm_large", lambda size: lstm.LSTMLanguageModel(size, 6, 5, 1)
    )


def config_of(folder, method="merged_codistillation"):
    config = text_domain_shift.get_config(f"{method},python_source")
    config.data.folder = str(folder)
    config.rounds = 2
    config.algorithm.update(steps=2, batch_size=4, period=1)
    config.evaluation.update(every=2, checkpoint_every=2, batch_size=20)
    for pool in config.pools.values():
        pool.cohort_size = 2
    return config


def test_pools_are_of_one_domain_and_disjoint(folder):
    config = config_of(folder)
    data = load_data(config.data)
    algorithm = build_algorithm(config, data)
    clients = data.splits["train"]
    users = {}
    for pool, domain in (("small", "prose"), ("large", "code")):
        ids = clients.client_ids[algorithm.client_states[pool].clients].tolist()
        assert len(ids) == int(0.45 * 24) and all(each.startswith(f"{domain}/") for each in ids)
        users[pool] = {each.split("/")[1] for each in ids}
        for each in ids:
            examples = clients.get_client(each)
            assert (examples["domain"] == DOMAINS.index(domain)).all()
    assert not users["small"] & users["large"]


def test_unseen_clients_leave_every_pool_the_users_of_its_domain(folder):
    config = config_of(folder)
    with config.unlocked():
        config.data.update(client_test_share=0.25, unseen_clients=6)
    data = load_data(config.data)
    clients, pools = data.splits["train"], data.text.pools
    assert sum(map(len, pools.values())) == clients.num_clients == 2 * int(0.45 * 24) - 6
    for domain, pool in pools.items():
        assert all(each.startswith(f"{domain}/") for each in clients.client_ids[pool])
    algorithm = build_algorithm(config, data)
    np.testing.assert_array_equal(algorithm.client_states["small"].clients, pools["prose"])
    config.data.unseen_clients = 19
    with pytest.raises(
        ValueError, match=r"^data\.unseen_clients must leave .* data\.domains .*\.$"
    ):
        load_data(config.data)


def test_unlabelled_text_is_of_both_domains_and_of_other_users(folder):
    data = load_data(config_of(folder).data)
    assert data.inputs == "tokens" and data.unlabelled.shape[1] == 21
    words = {data.text.vocabulary.decode([token])[0][:4] for token in data.unlabelled[:, 1]}
    assert words == {"word", "name"}
    # A sentence of five words has six targets: they and its end.
    lengths = (data.splits["train"].columns["tokens"] > 1).sum(axis=1)
    assert data.text.expected_length == pytest.approx(lengths.mean())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fed_avg", "periodic_codistillation", "merged_codistillation"])
def test_a_run_and_its_table(folder, tmp_path, method, capsys):
    config = config_of(folder, method)
    experiment = build_experiment(config)
    settings = {key: value for key, value in config.to_dict().items() if key != "execution"}
    outcome = run_experiment(experiment, tmp_path / "run", settings, {}, show_progress=False)
    for pool in ("small", "large"):
        variables = outcome.variables[pool]
        first_seed = jax.tree.map(lambda leaf: leaf[0], variables)
        save_model(tmp_path / "run" / f"{pool}_seed0.safetensors", first_seed)
    last = {(r["model"], r["split"]): r for r in outcome.records if r["round"] == 2}
    for split in ("test", "test_prose", "test_code", "held_out_prose", "held_out_code"):
        record = last["small", split]
        assert 0 <= record["accuracy"] <= 1 and 1 < np.exp(record["loss"]) < 40
    # Every token counts the same in all domains.
    splits = experiment.final_splits
    for metric, first in (("accuracy", EOS + 1), ("loss", PAD + 1)):
        values = [last["small", f"test_{domain}"][metric] for domain in DOMAINS]
        counts = [
            np.count_nonzero(splits[f"test_{domain}"].columns["tokens"][:, 1:] >= first)
            for domain in DOMAINS
        ]
        expected = np.average(values, weights=counts)
        assert last["small", "test"][metric] == pytest.approx(expected)
    assert tables_domains.main([str(tmp_path / "run"), "--samples=1"]) == 0
    printed = capsys.readouterr().out
    assert "prose" in printed and "mixed" in printed and "[code] name" in printed
    found = tables_domains.cells(load_run(tmp_path / "run"), "test")
    record = last["large", "test_code"]
    cell = found["large", "test_code"]
    assert cell.accuracy == pytest.approx(record["accuracy"])
    assert cell.perplexity == pytest.approx(np.exp(record["loss"]))
    assert cell.deviation is None
    entries = {entry.model: entry for entry in read_run(method, load_run(tmp_path / "run"))}
    assert entries["large"].values == (pytest.approx(100 * last["large", "test"]["accuracy"]),)
    assert entries["small"].client_flops > 0 and entries["small"].megabytes > 0
    assert (entries["small"].server_flops > 0) == (method != "fed_avg")


def test_runs_of_one_name_are_told_apart_by_their_folders():
    def run(folder, **training):
        config = {"algorithm": {"name": "fed_avg"}, "training": training, "run": "fed_avg,sites"}
        return Run(Path(folder), config, {}, {}, {}, True, ())

    runs = [run("a"), run("b"), run("c", method="fed_prox")]
    assert tables_domains.names_of(runs) == [
        "FedAvg, sites (a)",
        "FedAvg, sites (b)",
        "FedProx, sites",
    ]
    assert tables_domains.names_of([run("0/a"), run("1/a"), run("b")]) == [
        "FedAvg, sites (0/a)",
        "FedAvg, sites (1/a)",
        "FedAvg, sites (b)",
    ]


def test_a_number_of_samples_below_zero_is_one_line(capsys):
    with pytest.raises(SystemExit):
        tables_domains.main(["run", "--samples=-1"])
    assert "--samples must be at least 0, got -1." in capsys.readouterr().err


@pytest.mark.slow
def test_a_sampled_softmax_trains_and_all_words_are_evaluated(folder):
    losses = []
    for samples in (0, 5):
        config = config_of(folder)
        config.training.samples = samples
        outcome = run_experiment(build_experiment(config), show_progress=False)
        losses.append([r["loss"] for r in outcome.records if r["split"] == "held_out_code"])
    exact, sampled = np.array(losses)
    assert sampled[0] == exact[0] and not np.allclose(sampled[-2:], exact[-2:], rtol=1e-5)
    np.testing.assert_allclose(sampled, exact, rtol=0.1)


def test_a_run_costs_what_its_tokens_do(folder):
    config = config_of(folder)
    data = load_data(config.data)
    tokens = {"clients": data.splits["train"].columns["tokens"], "unlabelled": data.unlabelled}
    mean = {name: np.count_nonzero(own[:, 1:]) / len(own) for name, own in tokens.items()}
    classes = data.text.vocabulary.size
    body = {"small": 2 * (7 * 12 + 3 * 4), "large": 2 * (11 * 20 + 5 * 6)}
    logits = {"small": 2 * 4, "large": 2 * 6}
    each = {pool: body[pool] + logits[pool] * classes for pool in body}
    examples = {"small": 30.0, "large": 7.0}
    found = flops_of_run(config.to_dict(), examples)
    for pool in each:
        clients = 3 * each[pool] * mean["clients"] * examples[pool]
        assert found.clients[pool] == pytest.approx(clients)
    taught = 2 * 2 * 4  # rounds, steps, sentences
    server = 4 * taught * mean["unlabelled"] * sum(each.values())
    assert found.server == pytest.approx(server)
    config.training.samples = 5
    sampled = flops_of_run(config.to_dict(), examples)
    expected = 3 * (body["small"] + 6 * logits["small"]) * mean["clients"] * examples["small"]
    assert sampled.clients["small"] == pytest.approx(expected) and sampled.server == found.server


@pytest.mark.parametrize("samples", [0, 5])
def test_a_network_of_ones_own_costs_as_much_as_the_same_one_by_name(folder, monkeypatch, samples):
    config = config_of(folder)
    config.training.samples = samples
    data = load_data(config.data)
    size = data.text.vocabulary.size
    create = lambda *widths: language_model(
        lstm.LSTMLanguageModel(size, *widths, 1), size, samples=samples
    )
    model = create(4, 3)
    logits = lambda *arguments, **more: (model.apply(*arguments, **more)[0].features, {})
    own = SimpleNamespace(
        small=lambda: model,
        large=lambda: create(6, 5),
        logits=lambda: model._replace(apply=logits),
    )
    monkeypatch.setitem(sys.modules, "own_networks", own)
    by_name = flops_of_run(config.to_dict(), {"small": 30.0, "large": 7.0})
    for pool in config.pools:
        config.pools[pool].model = f"own_networks:{pool}"
    found = flops_of_run(config.to_dict(), {"small": 30.0, "large": 7.0})
    assert found.clients == pytest.approx(by_name.clients)
    assert found.server == pytest.approx(by_name.server)
    # Of data of one's own the positions that are padding are not known.
    each, padded = (
        work._forward_of_model(model, some) for some in (data, data._replace(text=None))
    )
    assert padded / 20 == pytest.approx(each / data.text.expected_length)
    config.pools.small.model = "own_networks:logits"
    message = (
        r"^pools\.small\.model 'own_networks:logits': .* must be a .*Readout .*, got float32\[.*\.$"
    )
    with pytest.raises(ValueError, match=message):
        flops_of_run(config.to_dict(), {"small": 30.0, "large": 7.0})


def test_the_mixed_set_is_its_two_parts(folder):
    splits = load_data(config_of(folder).data).splits
    for name in ("test", "held_out"):
        parts = [splits[f"{name}_{domain}"].num_examples for domain in DOMAINS]
        assert sum(parts) == splits[name].num_examples


@pytest.mark.parametrize(
    ("split", "column"),
    [("train", "tokens"), ("distillation", "tokens"), ("train", "domain"), ("held_out", "domain")],
)
def test_columns_that_are_missing_are_named(folder, monkeypatch, split, column):
    change_split(
        monkeypatch,
        data_text,
        split,
        lambda columns: {k: v for k, v in columns.items() if k != column},
    )
    message = rf"^data\.folder .* must have a column '{column}' in split '{split}', got \['.*'\]\.$"
    with pytest.raises(ValueError, match=message):
        load_data(config_of(folder).data)


def test_unlabelled_text_without_tokens_is_named(folder, monkeypatch):
    config = config_of(folder)
    config.data.unlabelled_folder = str(folder)
    whole = data_text.prepared_folder

    def other(setting, path):
        splits = whole(setting, path)
        if setting == "data.folder":
            return splits
        columns = {"domain": splits["distillation"].columns["domain"]}
        return splits | {"distillation": FederatedData.of_one_client(columns)}

    monkeypatch.setattr(data_text, "prepared_folder", other)
    message = (
        r"^data\.unlabelled_folder .* must have a column 'tokens' in split 'distillation', got"
    )
    with pytest.raises(ValueError, match=message):
        load_data(config.data)


def test_a_domain_without_examples_is_missing_only_where_it_is_read(folder, monkeypatch):
    config = config_of(folder)
    only_prose = lambda columns: {
        k: v[np.array(columns["domain"]) == 0] for k, v in columns.items()
    }
    change_split(monkeypatch, data_text, "test", only_prose)
    splits = load_data(config.data).splits
    assert "test_code" not in splits
    assert splits["test_prose"].num_examples == splits["test"].num_examples > 0
    config.evaluation.final_splits = ("test", "test_code")
    message = r"^evaluation\.final_splits must be one of .*'test_prose'.*, got 'test_code'\.?$"
    with pytest.raises(ValueError, match=message):
        build_experiment(config)
    change_split(monkeypatch, data_text, "train", only_prose)
    with pytest.raises(ValueError, match=r"^data\.domains: .* users of domain 'code' .* but 0 "):
        load_data(config.data)


def test_networks_of_ones_own_are_models_of_the_vocabularys_size(folder, monkeypatch):
    module = lambda num_classes: lstm.LSTMLanguageModel(num_classes, 4, 3, 1)
    own = SimpleNamespace(
        model=lambda num_classes: language_model(module(num_classes), num_classes),
        module=module,
        nnx=lambda num_classes, rngs: None,
    )
    monkeypatch.setitem(sys.modules, "own_networks", own)
    config = config_of(folder, "fed_avg")
    config.pools.small.model = "own_networks:model"
    size = load_data(config.data).text.vocabulary.size
    assert build_experiment(config).algorithm.predictors["small"].model.num_classes == size
    for name, got in (("module", "LSTMLanguageModel"), ("nnx", "a function of rngs, .* module")):
        config.pools.small.model = f"own_networks:{name}"
        message = (
            rf"^pools\.small\.model .*: for prepared text .*language_model makes, got {got}\.$"
        )
        with pytest.raises(ValueError, match=message):
            build_experiment(config)


def test_every_codistillation_is_evaluated_in_both_domains():
    for run in text_domain_shift.get_runs():
        config = text_domain_shift.get_config(run)
        found = _around_codistillations(config)
        # None of them is the last round: tables show the gain that is left some rounds later.
        middles = range(config.algorithm.period, config.rounds + 1, config.algorithm.period)
        assert (
            len(middles) == 3
            and config.rounds - middles[-1] > 4
            and {t + by for t in middles for by in range(-1, 5)} <= set(found)
        )
        domains = run.split(",")[1]
        expected = {f"held_out_{domain}" for domain in text_domain_shift.TEXTS[domains]}
        assert set(config.evaluation.splits) == expected


def made_up_run(accuracies, around):
    """A run of 9 rounds, codistilled every third; `accuracies`: (seed, round) -> of the small model."""
    config = {"rounds": 9, "algorithm": {"period": 3}, "evaluation": {"around": around}}
    records = {}
    for (seed, round), accuracy in accuracies.items():
        own = records.setdefault(Series("small", "held_out_code", seed), {})
        own[round] = {"accuracy": accuracy}
    return Run(Path("run"), config, records, {}, {}, True, ())


def test_what_a_codistillation_changes():
    # A gain of 0.1 at rounds 3 and 6: seed 0 loses all of it later, seed 1 half. None is after round 9.
    gained = lambda seed, round: (
        {0: 0.1, 1: 0.05 * seed, 2: 0.0}[round % 3] if round in (3, 4, 6, 7) else 0.0
    )
    accuracies = {(s, t): 0.2 + gained(s, t) for s in range(2) for t in range(2, 10)}
    run = made_up_run(accuracies, {"before": 1, "after": 1})
    (change,) = tables_domains.changes(run).values()
    np.testing.assert_allclose(change.at_once, [0.1, 0.1])
    np.testing.assert_allclose(change.later, [0.0, 0.05])
    table = tables_domains.change_table({"PeriodicCodist": tables_domains.changes(run)})
    assert table.columns[2]._cells == ["+10.00 ± 0.00\n+2.50 ± 3.54"]
    for around in (None, {"before": 0, "after": 1}):
        assert tables_domains.changes(made_up_run(accuracies, around)) == {}


@pytest.mark.slow
def test_the_demo_prints_its_table_and_continuations(tmp_path):
    command = [sys.executable, "-m", "fedcodist.commands.demo_text", "--rounds=2"]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path}"],
        cwd=ROOT,
        env=clean_environment(None),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("accuracy in vocabulary (%) and perplexity, test")[2]
    for name in ("prose", "code", "mixed"):
        assert name in table
    for name in (METHOD_NAMES[method] for method in METHODS):
        assert f"{name}, small" in table and f"{name}, large" in table


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: set_domains(c, verse=0.5), "data.domains: .* got 'verse'"),
        (lambda c: set_domains(c, prose=0.9, code=0.9), "data.domains: 21 users"),
        (lambda c: c.pools.small.update(domain="verse"), "pools.small.domain must be one of"),
        (
            lambda c: c.pools.small.update(fraction=0.5),
            r"pools\.small\.fraction must be left out: a pool has all clients of its domain",
        ),
        (lambda c: c.pools.small.update(model="cnn_small"), "pools.small.model must be one of"),
        (lambda c: c.algorithm.update(mixup_beta=2.0), "algorithm.mixup_beta 0 for text"),
        (lambda c: c.training.update(samples=-1), "samples must be at least 0"),
        (
            lambda c: c.data.update(folder="nowhere"),
            "data.folder must be a prepared folder, there is no nowhere",
        ),
    ],
)
def test_a_mistake_is_one_line(folder, change, message):
    config = config_of(folder)
    with config.ignore_type():
        change(config)
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


def set_domains(config, **shares):
    config.data.domains = ConfigDict(shares)


def test_every_run_of_the_config():
    for run in text_domain_shift.get_runs():
        config = text_domain_shift.get_config(run)
        assert {pool.domain for pool in config.pools.values()} == set(config.data.domains)
    with pytest.raises(ValueError, match="a run of this config is one of"):
        text_domain_shift.get_config("fed_avg,elsewhere")


def test_what_the_table_refuses(tmp_path, capsys):
    assert tables_domains.main([str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    for data, message in (("digits", "is no run on prepared text"), (TEXT, "is not finished")):
        config = {"rounds": 2, "seed": 0, "data": {"name": data}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert tables_domains.main([str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
