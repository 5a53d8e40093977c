"""Networks, data, metrics, methods, loggers and callbacks of one's own, all from configs."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

import fedcodist
from fedcodist.config import defaults
from fedcodist.config.bind import bind, offered
from fedcodist.config.client_methods import server_optimizer, server_schedule
from fedcodist.config.data import load_data
from fedcodist.config.experiment import build_experiment
from fedcodist.config.graph_methods import decentralised_groups
from fedcodist.config.loggers import callbacks_of, checked_callbacks, loggers_of
from fedcodist.config.party_methods import party_groups
from fedcodist.config.referenced_networks import classes_of
from fedcodist.config.registry import ENTRIES, algorithm_entry
from fedcodist.config.settings import check_settings
from fedcodist.configs import digits_mhd, digits_parties
from fedcodist.core.model import variable_shapes
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.core.trees import parameter_count
from fedcodist.run.csv_logger import CSVLogger
from fedcodist.run.stopping import KeepBest, StopEarly

ROOT = Path(fedcodist.__file__).parents[1]
CONFIG = ROOT / "fedcodist" / "configs" / "your_own.py"
MODULE = """
import fedcodist as fc, flax.linen as nn, haiku as hk, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from fedcodist.config.registry import POOLS, Entry
from fedcodist.config.data import Data
from fedcodist.run.client_splits import ClientSplit

def load(rows=12, wrong=None):
    if wrong == "raises": return {}["nothing"]
    image = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    columns = {"image": image, "label": np.arange(rows) % 3}
    data = fc.FederatedData.from_arrays(columns, offsets=[0, rows // 2, rows])
    if wrong == "type": return 3
    if wrong == "splits": return {"test": data}
    if wrong == "arrays": return {"train": columns}
    if wrong == "held_out": return {"train": data, "held_out": 3}
    if wrong == "columns": return {"train": data, "test": columns}
    return {"train": data, "held_out": data, "test": data, "distillation": data}

def label_each(server=0):
    columns = {"image": np.zeros((12, 4), np.float32), "label": np.arange(12) // 2}
    server = {"image": np.zeros((1, 4), np.float32), "label": np.array([server])}
    train = fc.FederatedData.from_arrays(columns, offsets=np.arange(0, 13, 2))
    return {"train": train, "distillation": server}

def targets():
    columns = {"image": np.zeros((8, 4), np.float32), "label": np.arange(8) - 1.5}
    return {"train": fc.FederatedData.from_arrays(columns, offsets=[0, 4, 8])}

def whole(**settings):
    splits = load()
    splits.pop(settings.get("without"), None)
    return Data(splits, np.zeros((2, 4)), half, half, num_classes=7)

def with_client_split(client_split="own_test"):
    splits = load(24)
    columns = np.zeros((2, 4)), of_a_batch, of_a_batch
    return Data(splits, *columns, client_splits={client_split: ClientSplit(splits["test"])})

def deal(labels, seed, parts): return np.array_split(np.arange(len(labels)), parts)
def half(batch, key, positions): return {**batch, "image": batch["image"] / 2}
def of_a_batch(batch): return batch

def plain(): return nn.Sequential([nn.Dense(5), nn.relu, nn.Dense(4)])
def of_classes(num_classes): return nn.Dense(num_classes)
def of_any_name(outputs): return nn.Dense(outputs)
def small(num_classes): return nn.Dense(2)
def model(): return fc.from_flax_linen(nn.Dense(9), jnp.zeros((1, 4)))
def haiku(num_classes): return lambda x: hk.Linear(num_classes)(x)
def nnx_function(num_classes, rngs): return nnx.Linear(4, num_classes, rngs=rngs)
class NNX(nnx.Module):
    def __init__(self, rngs, num_classes):
        self.layer = nnx.Linear(4, num_classes, rngs=rngs)
    def __call__(self, x): return self.layer(x)
class Linen(nn.Module):
    num_classes: int
    @nn.compact
    def __call__(self, x): return nn.Dense(self.num_classes)(x)
def not_told(): return nnx.Linear(4, 3, rngs=nnx.Rngs(0))
def of_two(a, b): return None
def nothing(): return 3
def fails(): raise RuntimeError("too large")

def first_logit(outputs, batch): return outputs[:, 0], jnp.ones(len(outputs))
spread = fc.SummedMetric(lambda outputs, batch: outputs, lambda total: total.max() - total.min())

def my_pools(pools, columns, execution, temperature: float, num_unlabelled=None):
    return fc.independent_pools(pools, columns, execution)._replace(name=f"at {temperature}")
got = {}
def twice(
    model, training, personal: fc.LocalTraining = fc.LocalTraining(),
    epochs: int = 7, client_optimizer: str = "mine", method: str = "mine",
    hyper: fc.FedAvgHyper = fc.FedAvgHyper(),
):
    got["twice"] = training, personal, epochs, client_optimizer, method
    return fc.fed_avg(model, training, hyper=hyper)
def ditto(model, training, proximal_weight=0.5, layer=3, rate=1.0):
    got["ditto"] = proximal_weight, layer
    return fc.fed_avg(model, training)
def fed_avg(pools, columns): return fc.independent_pools(pools, columns)._replace(name="mine")
ENTRY = Entry("entry_of_mine", "Mine", POOLS, my_pools, ("unlabelled",))

class Logger:
    def __init__(self, workdir): self.workdir = workdir
    def __call__(self, records): pass
def number(workdir): return 3
def codist(pools, columns, num_unlabelled, num_rounds, teaching, distillation=fc.Distillation(steps=2)):
    made = fc.periodic_codistillation(
        pools, columns, num_unlabelled, num_rounds, 1, distillation=distillation, teaching=teaching
    )
    return made._replace(name=str(teaching["main"].temperature))
def callback(every, loud=False): return lambda records: (every, loud)
def slow_sgd(learning_rate): return optax.sgd(learning_rate / 2)
def halving(rate, round): return rate / 2**round
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The name of a module of a user's, beside their config."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "ones_own.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield "ones_own"
    sys.path.remove(str(folder))
    del sys.modules["ones_own"]


def config_of(own, network="plain", **settings):
    config = defaults.experiment("mine", 2)
    config.data = dict(name=f"{own}:load")
    config.training = defaults.training(batch_size=2)
    config.pools = defaults.one_pool(f"{own}:{network}", 2, 0.1)
    config.nested_pools = True
    config.algorithm = dict(name="fed_avg")
    config.evaluation = defaults.evaluation(1, 1)
    config.execution = defaults.execution(processes=1)
    config.update(settings)
    return config


def refused(config, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("network", "outputs", "parameters"),
    [
        ("plain", 4, 49),
        ("of_classes", 3, 15),
        ("of_any_name", 3, 15),
        ("haiku", 3, 15),
        ("nnx_function", 3, 15),
        ("NNX", 3, 15),
        ("Linen", 3, 15),
        ("model", 9, 45),
    ],
)
def test_networks_of_ones_own(own, network, outputs, parameters):
    model = build_experiment(config_of(own, network)).algorithm.predictors["main"].model
    count = parameter_count(variable_shapes(model).params)
    assert (model.num_classes, count) == (outputs, parameters)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("small", "has 2 classes, the data has 3"),
        ("not_told", "a function that returns a Flax NNX module must have a parameter rngs"),
        ("of_two", "must be a function of nothing, or of num_classes and rngs, got one of a, b"),
        ("nothing", "it must return a fedcodist.Model, a Flax linen .*, got int"),
        ("fails", r"RuntimeError: too large \(ones_own.py, line \d+\)$"),
        ("plian", "there is no 'plian' in ones_own; did you mean 'plain'"),
    ],
)
def test_networks_that_are_none_are_one_line(own, network, message):
    refused(config_of(own, network), rf"^pools\.main\.model 'ones_own:{network}'.*{message}")


@pytest.mark.parametrize(
    "taken_away",
    [
        {},
        dict(client_test_share=0.5, unseen_clients=5),
        dict(partition=dict(name="iid", num_clients=2, examples=2)),
        dict(partition=dict(name="iid", num_clients=2, validation=0.8)),
    ],
)
@pytest.mark.parametrize(("server", "outputs"), [(0, 6), (8, 9)])
def test_classes_are_those_of_all_examples_of_ones_own_data(own, taken_away, server, outputs):
    for seed in range(2):
        settings = dict(name=f"{own}:label_each", server=server, seed=seed, **taken_away)
        assert classes_of(load_data(ConfigDict(settings))) == outputs


def test_labels_of_ones_own_that_are_no_classes_stop_only_what_counts_them(own):
    settings = dict(name=f"{own}:targets", client_test_share=0.5, unseen_clients=1)
    data = load_data(ConfigDict(settings))
    with pytest.raises(ValueError, match="split 'train' must be whole numbers, got float64"):
        classes_of(data)


def test_methods_that_change_layers_take_linen_modules_of_ones_own(own):
    config = config_of(own)
    config.algorithm = dict(name="hetero_fl", masked=True, scaled=True)
    config.pools.main.share = 0.5
    refused(config, r"^pools\.main\.share needs a chain of layers .* got a Sequential\.$")
    config.pools.main.model = f"{own}:haiku"
    refused(config, r"^pools\.main\.model 'ones_own:haiku' must return a Flax linen module")
    config.pools.main.model = f"{own}:NNX"
    refused(config, r"^pools\.main\.model 'ones_own:NNX' must return a Flax linen module, .*rngs")


def test_data_of_ones_own(own):
    data = load_data(ConfigDict(dict(name=f"{own}:load", rows=20)))
    assert data.splits.keys() == {"train", "held_out", "test"} and len(data.unlabelled) == 20
    batch = {"image": jnp.ones(4)}
    assert data.preprocess(batch, None, None) is batch
    settings = dict(name=f"{own}:load", preprocess=f"{own}:half")
    data = load_data(ConfigDict(settings))
    assert data.evaluation_preprocess(batch, None, None)["image"][0] == 0.5
    data = load_data(ConfigDict(settings | {"partition": dict(name=f"{own}:deal", parts=4)}))
    assert data.splits["train"].client_sizes.tolist() == [3, 3, 3, 3]
    np.testing.assert_array_equal(data.splits["train"].columns["label"], np.arange(12) % 3)
    assert load_data(ConfigDict(dict(name=f"{own}:whole", anything=1))).num_classes == 7
    plain = load_data(ConfigDict(dict(name=f"{own}:load", wrong="columns"))).splits
    assert plain["test"].num_clients == 1
    np.testing.assert_array_equal(plain["test"].columns["image"], plain["train"].columns["image"])
    for settings in (dict(name=f"{own}:whole", anything=1), dict(name="digits_public_private")):
        with pytest.raises(ValueError, match=r"^data\.partition must be None"):
            load_data(ConfigDict(settings | {"partition": dict(name="even", num_clients=2)}))
    digits = dict(name="digits", num_clients=4, concentration=1.0, seed=0)
    data = load_data(ConfigDict(digits | {"preprocess": f"{own}:half"}))
    assert data.preprocess.__name__ == data.evaluation_preprocess.__name__ == "half"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(name="ones_own:whole", without="train"),
            r"^data\.name 'ones_own:whole' must return a split 'train', got \['distillation', ",
        ),
        (dict(wrong="type"), r"^data\.name 'ones_own:load' must return a mapping .*, got int\.$"),
        (dict(wrong="splits"), r"^data\.name .* with the clients as 'train', got \['test'\]\.$"),
        (dict(wrong="arrays"), r"^data\.name .* to FederatedData.*, got dict for 'train', the"),
        (
            dict(wrong="held_out"),
            r"^data\.name 'ones_own:load': splits\['held_out'\] must be FederatedData, or .* int",
        ),
        (
            dict(wrong="raises"),
            r"^data\.name .*: KeyError: 'nothing' \(ones_own.py, line 9",
        ),
        (dict(rowz=3), r"^data\.name .*'rowz', it has the arguments rows, wrong\.$"),
        (
            dict(preprocess="half"),
            r"^data\.preprocess must be package\.module:function, got 'half'\.$",
        ),
        (
            dict(preprocess="ones_own:of_a_batch"),
            r"^data\.preprocess .* must be a function \(batch, key, positions\) -> batch",
        ),
    ],
)
def test_data_that_are_none_are_one_line(own, settings, message):
    config = config_of(own)
    config.data.update(settings)
    refused(config, message)


def test_what_single_methods_of_the_library_get_is_a_setting_of_ones_own_method():
    given = {"alpha": lambda: "a pool's", "temperature": lambda: 3.0}

    def mine(alpha, temperature):
        return alpha, temperature

    made = offered(mine, given, of_the_library=("alpha",))
    assert made == {"temperature": 3.0}
    assert bind(mine, {"alpha": 0.5}, "algorithm.", **made) == (0.5, 3.0)
    assert offered(fedcodist.fed_avg, {"model": lambda: 1}, of_the_library=("model",)) == {
        "model": 1
    }


def test_client_splits_of_ones_own_stay_beside_the_clients_test_examples(own):
    settings = ConfigDict(dict(name=f"{own}:with_client_split", client_test_share=0.25))
    assert set(load_data(settings).client_splits) == {"own_test", "client_test"}
    settings.client_split = "client_test"
    message = r"^data\.client_test_share must be None where data\.name returns .* 'client_test'\.$"
    with pytest.raises(ValueError, match=message):
        load_data(settings)


def test_data_of_ones_own_are_dealt_and_split_as_others_are(own):
    settings = ConfigDict(
        dict(
            name=f"{own}:load",
            rows=40,
            client_test_share=0.25,
            partition=dict(name="iid", num_clients=4, feature_noise=0.1),
        )
    )
    data = load_data(settings)
    assert data.splits["train"].num_clients == 4 and set(data.client_splits) == {"client_test"}
    assert data.client_splits["client_test"].test.client_sizes.tolist() == [2] * 4
    settings.partition.all_splits = True
    with pytest.raises(ValueError, match=r"^data\.partition\.all_splits must be of data\.name="):
        load_data(settings)


def test_a_split_of_ones_own_is_not_replaced_by_validation(own, monkeypatch):
    loaded = importlib.import_module(own).load(rows=40)
    whole = {**loaded, "validation": loaded["test"]}
    monkeypatch.setattr(f"{own}.load", lambda: whole)
    partition = dict(name="iid", num_clients=4, validation=0.25)
    with pytest.raises(
        ValueError, match=r"^data\.partition\.validation must be None, the data have"
    ):
        load_data(ConfigDict(dict(name=f"{own}:load", partition=partition)))
    partition["validation"] = None
    data = load_data(ConfigDict(dict(name=f"{own}:load", partition=partition)))
    assert data.splits["validation"] is not None


def test_parties_networks_read_preprocessed_images():
    config = digits_parties.get_config("fd")
    with config.unlocked():
        config.data.preprocess = f"{__name__}:halved"
    with config.ignore_type():
        config.parties.networks = (((8,), 0.0),) * 6
    (group,) = party_groups(config, load_data(config.data)).values()
    first = jax.tree.leaves(variable_shapes(group.model).params)
    assert any(leaf.shape == (16, 8) for leaf in first)


def halved(batch, key, positions):
    return {**batch, "image": batch["image"][:, ::2, ::2].astype(jnp.float32)}


def test_metrics_of_ones_own(own):
    config = config_of(own, metrics=dict(first=f"{own}:first_logit", spread=f"{own}:spread"))
    config.metrics.best_two = "macro_f_score"
    metrics = build_experiment(config).algorithm.predictors["main"].model.metrics
    assert list(metrics) == ["accuracy", "best_two", "first", "spread"]
    assert isinstance(metrics["spread"], SummedMetric)
    outputs = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(metrics["first"](outputs, {})[0], [1, 3])
    for name, metric, message in (
        ("accuracy", f"{own}:first_logit", "another name than the model's own metrics"),
        ("x_mean", f"{own}:first_logit", "a name that ends in none of"),
        ("x_std", f"{own}:first_logit", "a name that ends in none of"),
        ("round", f"{own}:first_logit", "that is none of"),
        ("a/b", f"{own}:first_logit", "a name without '/'"),
        ("x", "macro", r"one of \['accuracy', .* or package\.module:function, got 'macro'"),
    ):
        refused(
            config_of(own, metrics={name: metric}), rf"^metrics\.{name} must (have|be) .*{message}"
        )


def test_a_codistillation_of_ones_own_gets_the_pools_teaching(own):
    config = config_of(own)
    pool = defaults.codistilled_pool(
        f"{own}:plain", dict(temperature=3.0), fraction=1.0, cohort_size=1
    )
    config.pools = dict(main=pool, other=pool)
    config.algorithm = defaults.distillation(f"{own}:codist", steps=2)
    assert build_experiment(config).algorithm.name == "3.0"


def test_optimizers_and_schedules_of_ones_own(own):
    config = config_of(own)
    config.training.server_optimizer = f"{own}:slow_sgd"
    config.training.server_schedule = f"{own}:halving"
    assert build_experiment(config).algorithm.name == "fed_avg"
    optimizer, schedule = server_optimizer(config), server_schedule(config)
    updates, _ = optimizer(4.0).update(jnp.ones(1), optimizer(4.0).init(jnp.ones(1)))
    assert updates == -2 and schedule(1.0, 2) == 0.25
    config.training.server_optimizer = f"{own}:halving"
    refused(
        config, r"^training\.server_optimizer must be the name of an optax optimizer, or package"
    )
    config.training.server_optimizer, config.training.server_schedule = "sgd", f"{own}:slow_sgd"
    refused(config, r"^schedule must be a function \(learning rate, round\) -> learning rate, got")


def test_methods_of_ones_own(own):
    known = dict(ENTRIES)
    config = config_of(own)
    config.algorithm = dict(name=f"{own}:my_pools", temperature=2.0)
    for _ in range(2):
        assert build_experiment(config).algorithm.name == "at 2.0"
    assert algorithm_entry(config).reads == ("unlabelled",) and known == ENTRIES
    config.algorithm.name = f"{own}:ENTRY"
    assert build_experiment(config).algorithm.name == "at 2.0"
    config.algorithm = dict(name=f"{own}:my_pools", warmth=2.0)
    refused(config, r"^algorithm\.warmth is not a setting of my_pools, which has .*temperature")
    config.algorithm = dict(name=f"{own}:half")
    refused(config, r"^the config lacks 'algorithm\.batch'")
    config.algorithm = dict(name=f"{own}:spread")
    refused(config, r"^algorithm\.name must be a method's function or its Entry")
    config = config_of(own)
    config.training.method = f"{own}:ENTRY"
    refused(
        config, r"^training\.method must be a method of clients, got 'ones_own:ENTRY', one of pools"
    )
    config.training.method = f"{own}:my_pools"
    refused(
        config, r"^training\.method must be .* got 'ones_own:my_pools' with an argument 'pools'"
    )


def test_a_second_local_training_of_ones_own_method_is_the_clients_but_for_its_settings(own):
    config = config_of(own)
    config.data.preprocess = f"{own}:half"
    config.training.update(method=f"{own}:twice", client_optimizer="adam", epochs=2)
    build_experiment(config)
    got = sys.modules[own].got
    training, personal, *_ = got["twice"]
    assert personal == training and personal.optimizer is optax.adam and personal.epochs == 2
    assert personal.preprocess is sys.modules[own].half
    config.training.twice = dict(
        personal_epochs=3, personal_optimizer="sgd", epochs=5, client_optimizer="x", method="y"
    )
    build_experiment(config)
    assert got["twice"] == (
        training,
        training._replace(epochs=3, optimizer=optax.sgd),
        5,
        "x",
        "y",
    )
    config.training.twice = dict(personal_optimizer="sgdd")
    refused(config, r"^training\.twice\.personal_optimizer must be the name of an optax optimizer")


def test_a_method_of_ones_own_may_be_called_as_one_of_the_library(own):
    config = config_of(own)
    config.training.update(method=f"{own}:ditto", proximal_weight=2.0)
    unread = r"^pools\.\*\.(client|server)_learning_rate is not read by ditto\.$"
    with pytest.warns(UserWarning, match=unread) as warned:
        build_experiment(config)
    assert len(warned) == 2 and sys.modules[own].got["ditto"] == (2.0, 3)
    config.training.ditto = dict(layer=1, proximal_weight=-1)  # neither is the library's
    refused(config, r"^training\.proximal_weight is not read beside the group training\.ditto")
    del config.training["proximal_weight"]
    with pytest.warns(UserWarning, match=unread):
        build_experiment(config)
    assert sys.modules[own].got["ditto"] == (-1, 1)
    config = config_of(own)
    config.algorithm = dict(name=f"{own}:fed_avg")
    assert build_experiment(config).algorithm.name == "mine"


def test_loggers_of_ones_own(own, tmp_path, monkeypatch):
    csv, mine = loggers_of(("csv", f"{own}:Logger"), tmp_path)
    assert isinstance(csv, CSVLogger) and mine.workdir == tmp_path
    for name, message in (
        (f"{own}:spread", r"missing a required argument: 'batch'"),
        (f"{own}:Loger", r"there is no 'Loger' in ones_own; did you mean 'Logger'\?"),
        (f"{own}:number", None),
    ):
        with pytest.raises(
            ValueError, match=rf"^loggers\[0\] '{name}'.*{message or 'must return'}"
        ):
            loggers_of((name,), tmp_path)
    with pytest.raises(ValueError, match=r"^loggers\[1\] must be one of \['csv', 'mlflow', "):
        loggers_of(("csv", "wnb"), tmp_path)
    for twice in ("csv", f"{own}:Logger"):
        with pytest.raises(ValueError, match=rf"^loggers\[1\] must be another .* got '{twice}'"):
            loggers_of((twice, twice), tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(
        ImportError, match=r"^loggers 'wandb' .*: pip install 'fedcodist\[wandb\]'$"
    ):
        loggers_of(("wandb",), tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert loggers_of(None, tmp_path) == [] and not list(tmp_path.iterdir())


def test_callbacks_from_a_config(own):
    config = config_of(own)
    config.callbacks = dict(
        stop_early=dict(metric="loss", patience=3),
        keep_best=dict(model="main"),
        later=dict(name="stop_early", patience=9),
        mine=dict(name=f"{own}:callback", every=10),
    )
    check_settings(config)
    made = callbacks_of(config.callbacks)
    mine = made.pop("mine")
    assert made == {
        "stop_early": StopEarly(metric="loss", patience=3),
        "keep_best": KeepBest(model="main"),
        "later": StopEarly(patience=9),
    }
    assert mine(None) == (10, False)
    experiment = build_experiment(config)
    checked_callbacks(config.callbacks, experiment)
    for group, message in (
        (
            dict(stop_early=dict(split="test")),
            r"^callbacks\.stop_early\.split must be one of \['held",
        ),
        (
            dict(stop_early=dict(patienc=1)),
            r"^callbacks\.stop_early\.patienc is not a setting of Stop",
        ),
        (
            dict(stop=dict()),
            r"^callbacks\.stop\.name must be one of \['keep_best', 'stop_early'\] or",
        ),
        (dict(mine=dict(name=f"{own}:callback")), r"^callbacks\.mine\.name .* missing .* 'every'"),
        (
            dict(mine=dict(name=f"{own}:nothing")),
            r"^callbacks\.mine\.name .* must return a function",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            checked_callbacks(ConfigDict(group), experiment)


def test_the_config_to_copy_is_an_experiment(monkeypatch):
    monkeypatch.syspath_prepend(CONFIG.parent)
    spec = importlib.util.spec_from_file_location("your_own", CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    check_settings(config)
    experiment = build_experiment(config)
    model = experiment.algorithm.predictors["main"].model
    assert list(model.metrics) == ["accuracy", "macro_f1", "top_3"]
    assert variable_shapes(model).mutable  # the batch statistics
    sys.modules.pop("your_own")


@pytest.mark.slow
def test_a_copy_of_the_config_runs_outside_the_checkout(tmp_path):
    shutil.copy(CONFIG, tmp_path / "renamed.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "NPROC"))}

    def run(*settings):
        command = [sys.executable, "-m", "fedcodist.commands.run", "--config=renamed.py"]
        return subprocess.run(
            [*command, "--workdir=run", *settings],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )

    settings = ["--config.rounds=4", "--config.callbacks.stop_early.patience=1"]
    settings += ["--config.callbacks.stop_early.min_delta=2.0"]  # more than an F score can gain
    done = run(*settings)
    assert done.returncode == 0, done.stderr
    assert "finished, 1 round of 4: macro_f1 on held_out has not improved" in done.stdout
    folder = tmp_path / "run"
    log = (folder / "my_log.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in log] == [
        *("start of your_own", "round 0, held_out", "round 1, held_out", "round 1, test")
    ]
    assert (folder / "kept" / "main_seed0.safetensors").exists()
    rows = (folder / "metrics.csv").read_text()
    assert "0,main,held_out,0,macro_f1," in rows and "1,main,test,0,top_3," in rows
    again = run(*settings)
    assert again.returncode == 0 and "finished already, 1 round of 4" in again.stdout
    text = (tmp_path / "renamed.py").read_text()
    (tmp_path / "renamed.py").write_text(text.replace("nnx.Dropout(0.2", "nnx.Dropout(0.3"))
    edited = run(*settings)
    assert edited.returncode == 2 and edited.stderr.count("\n") == 1
    assert "belongs to another config: prepared.pools.main.model" in edited.stderr


PARTY = """
import flax.linen as nn
class Flat(nn.Module):
    num_classes: int
    @nn.compact
    def __call__(self, x): return nn.Dense(self.num_classes)(x.reshape(len(x), -1))
def embedding(): return nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(6)])
"""


def test_parties_and_clients_on_a_graph_have_networks_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "of_parties.py").write_text(PARTY)
    monkeypatch.syspath_prepend(tmp_path)
    config = digits_parties.get_config("fd")
    assert config.data.num_parties == 6
    with config.ignore_type():
        config.parties.networks = (*(["of_parties:Flat"] * 5), ((8,), 0.0))
    groups = party_groups(config, load_data(config.data))
    assert {n: g.clients.tolist() for n, g in groups.items()} == {
        "of_parties.Flat": [0, 1, 2, 3, 4],
        "dense_8": [5],
    }
    config = digits_mhd.get_config()
    config.parties.networks = "of_parties:embedding"
    (group,) = decentralised_groups(config, load_data(config.data)).values()
    kernel = variable_shapes(group.model).params["backbone"]["layers_1"]["kernel"]
    assert kernel.shape == (64, 6)
    del sys.modules["of_parties"]
