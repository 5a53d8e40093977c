"""Table 1's Stack Overflow half and Figure 3: every config builds, on made-up users."""

import tracemalloc

import jax
import numpy as np
import pytest

from experiments.configs import stackoverflow_domain_shift, stackoverflow_table1
from fedcodist.config import data_text
from fedcodist.config.algorithm import build_algorithm
from fedcodist.config.data import load_data
from fedcodist.config.experiment import build_experiment
from fedcodist.data import FederatedData, load_prepared, save_prepared, text_splits
from fedcodist.run.experiment import check_experiment, run_experiment
from fedcodist.text import lstm

DOMAINS = ("questions", "answers")
FOLDERS = ("text", "c4", "other")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Prepared text of 250 users, and unlabelled text in its vocabulary and in another one."""
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(9)]
    users = {
        f"{user:05d}": {name: [rng.choice(words, 5).tolist()] * 2 for name in DOMAINS}
        for user in range(250)
    }
    splits = text_splits(users, DOMAINS)
    tokens = splits["distillation"].columns["tokens"][:13]
    c4 = {
        "distillation": FederatedData.from_arrays({"tokens": tokens}, offsets=[0, 13]),
        "vocabulary": splits["vocabulary"],
    }
    other = text_splits(users, DOMAINS, vocabulary_size=4)
    folder = tmp_path_factory.mktemp("text")
    for name, each in zip(FOLDERS, (splits, c4, other), strict=True):
        arguments = {"domains": list(DOMAINS)}
        save_prepared(folder / name, each, source="made up", licence="none", arguments=arguments)
    return {name: str(folder / name) for name in FOLDERS}


@pytest.fixture(autouse=True)
def tiny_networks(monkeypatch):
    for name in ("lstm_small", "lstm_large"):
        create = lambda size: lstm.LSTMLanguageModel(size, 4, 3, 1)
        monkeypatch.setitem(data_text.TEXT_MODELS, name, create)


def small(config, folders):
    config.data.folder = folders["text"]
    if config.data.get("unlabelled_folder"):
        config.data.unlabelled_folder = folders["c4"]
    for pool in config.pools.values():
        pool.cohort_size = 1
    return config


RUNS = [
    pytest.param(run, marks=[pytest.mark.slow] * ("143k" not in run))
    for run in stackoverflow_table1.get_runs()
]


@pytest.mark.parametrize("run", RUNS)
def test_table_1(folders, run):
    config = stackoverflow_table1.get_config(run)
    method, sentences, *unlabelled = run.split(",")
    expected = "data/c4_mod" if unlabelled == ["c4_mod"] else None
    assert config.data.unlabelled_folder == expected and config.rounds == 1500
    config = small(config, folders)
    experiment = build_experiment(config)
    check_experiment(experiment)
    assert experiment.data.num_clients == 150  # streamed
    clients = {
        name: rows.clients
        for name, rows in build_algorithm(config, load_data(config.data)).client_states.items()
    }
    assert len(clients["large"]) == {"143k": 1, "296k": 3, "612k": 6}[sentences]
    if method == "fed_avg" and sentences != "296k":
        assert set(clients) == {"large"}
    else:
        np.testing.assert_array_equal(clients["small"], np.arange(150))
    data = load_data(config.data)
    assert len(data.unlabelled) == (13 if expected else 200)
    for tokens in (data.unlabelled, data.splits["train"].columns["tokens"]):
        assert isinstance(tokens, np.memmap)


def test_the_papers_numbers_of_users():
    users = {
        name: int(share * 34_248 + 1e-9) for name, share in stackoverflow_table1.FRACTIONS.items()
    }
    assert users == {"143k": 342, "296k": 684, "612k": 1369}
    shares = stackoverflow_domain_shift.get_config().data.domains
    assert {name: int(share * 75_000) for name, share in shares.items()} == dict.fromkeys(
        DOMAINS, 30_000
    )


@pytest.mark.parametrize("run", stackoverflow_domain_shift.get_runs())
def test_figure_3_is_dense_around_every_codistillation(folders, run):
    config = small(stackoverflow_domain_shift.get_config(run), folders)
    experiment = build_experiment(config)
    check_experiment(experiment)
    expected = {t for p in range(200, 1401, 200) for t in range(p - 2, p + 11)}
    assert set(experiment.evaluate_also) == expected
    assert set(experiment.splits) == {"held_out", "held_out_questions", "held_out_answers"}
    assert set(experiment.final_splits) == {"test", "test_questions", "test_answers"}
    domains = {name: pool.domain for name, pool in config.pools.items()}
    assert domains == {"small": "answers", "large": "questions"}


@pytest.mark.slow
def test_both_domains_are_evaluated_around_a_codistillation(folders):
    config = small(stackoverflow_domain_shift.get_config(), folders)
    config.rounds = 5
    config.algorithm.update(period=3, steps=1, batch_size=4)
    config.evaluation.around.update(before=1, after=1)
    config.evaluation.final_splits = ()
    outcome = run_experiment(build_experiment(config), show_progress=False)
    rounds = {(record["model"], record["split"]): set() for record in outcome.records}
    for record in outcome.records:
        rounds[record["model"], record["split"]].add(record["round"])
    for model in ("small", "large"):
        for split in ("held_out", "held_out_questions", "held_out_answers"):
            assert rounds[model, split] == {0, 2, 3, 4, 5}


@pytest.mark.slow
def test_the_tokens_of_all_users_are_never_in_memory(folders, tmp_path):
    """As many users as Stack Overflow has, of ten sentences each; a tenth trains."""

    def made_up(name, users):
        sentences = np.full((10 * users, 21), 5, np.uint16)
        columns = {"tokens": sentences, "domain": np.zeros(len(sentences), np.int8)}
        ids = [f"{name}{user}" for user in range(users)]
        return FederatedData.from_arrays(columns, offsets=10 * np.arange(users + 1), client_ids=ids)

    splits = dict(load_prepared(folders["text"]))
    splits |= {"train": made_up("a", 34_248), "distillation": made_up("b", 342_477 - 34_248)}
    size = splits["distillation"].columns["tokens"].nbytes
    arguments = {"domains": list(DOMAINS)}
    save_prepared(tmp_path / "all", splits, source="made up", licence="none", arguments=arguments)
    del splits
    config = small(stackoverflow_table1.get_config(), folders)
    config.data.folder = str(tmp_path / "all")
    tracemalloc.start()
    experiment = build_experiment(config)
    selection = experiment.algorithm.select(0, jax.random.key(0))
    experiment.data.read(selection)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 2


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda c, f: c.data.update(unlabelled_folder=f["other"]),
            "must have a split 'distillation' in",
        ),
        (
            lambda c, f: c.data.update(unlabelled_folder="nowhere"),
            r"data\.unlabelled_folder must be a prepared folder, there is no nowhere",
        ),
        (lambda c, f: c.pools.large.update(fraction=0.001), "pool 'large' is empty"),
    ],
)
def test_a_mistake_is_one_line(folders, change, message):
    config = small(stackoverflow_table1.get_config(), folders)
    change(config, folders)
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("around, name", [({"before": -1}, "before"), ({"after": -2}, "after")])
def test_bad_rounds_around(folders, around, name):
    config = small(stackoverflow_domain_shift.get_config(), folders)
    config.evaluation.around.update(around)
    with pytest.raises(ValueError, match=rf"evaluation\.around\.{name} must be at least 0"):
        build_experiment(config)


def test_unknown_runs():
    for config in (stackoverflow_table1, stackoverflow_domain_shift):
        with pytest.raises(ValueError, match="a run of this config is one of"):
            config.get_config("fed_avg,elsewhere")
