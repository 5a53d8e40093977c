"""Every setting of every config has a check, and a value of another type is an error that names it."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from fedcodist.config.allowed_settings import ALLOWED
from fedcodist.config.config_errors import as_settings
from fedcodist.config.settings import check_settings
from fedcodist.core.checks import check_boolean, check_text

CONFIGS = sorted(
    f"{folder.replace('/', '.')}.{path.stem}"
    for folder in ("experiments/configs", "fedcodist/configs")
    for path in Path(folder).glob("[!_]*.py")
)
# A config's own notes, and the tuner's, which checks them itself.
FREE = {"notes", "tuning.space", "algorithm.validation"}
ENORMOUS = 10**400  # more than a float holds


def configs_of(name):
    module = importlib.import_module(name)
    return [module.get_config(run) for run in getattr(module, "get_runs", lambda: [])()]


def paths_of(config, prefix=""):
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from paths_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def pattern_of(path):
    """A path as in the table, where a star stands for the name of a pool or a domain."""
    first, _, rest = path.partition(".")
    if first == "pools":
        return f"pools.*.{rest.partition('.')[2]}"
    return "data.domains.*" if path.startswith("data.domains.") else path


def config_with(path, value):
    """A config with this one setting."""
    groups = path.replace("*", "small").split(".")
    for name in reversed(groups):
        value = {name: value}
    config = ConfigDict(value)
    assert list(config) == groups[:1]
    return config, ".".join(groups)


def refusal(config):
    with pytest.raises((ValueError, TypeError)) as error:
        check_settings(config)
    message = str(error.value)
    assert "\n" not in message and len(message) < 250, message
    return message


@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_of_every_config_is_allowed_and_in_the_table(name):
    for config in configs_of(name):
        check_settings(config)
        unknown = {path for path in paths_of(config) if pattern_of(path) not in ALLOWED}
        assert unknown <= FREE


def takes(path, value):
    try:
        check_settings(config_with(path, value)[0])
    except (ValueError, TypeError):
        return False
    return True


BOOLEANS = [path for path, check in ALLOWED.items() if check is check_boolean]
TEXTS = [path for path, check in ALLOWED.items() if check is check_text]
WHOLE = [
    path for path in ALLOWED if takes(path, 2) and not takes(path, 1.5) and path not in BOOLEANS
]
NUMBERS = [path for path in ALLOWED if takes(path, 1.0) or takes(path, 0.5)]
PATTERNS = [path for path in ALLOWED if path.endswith((".private", ".shared"))]

LISTS = [path for path in ALLOWED if path not in PATTERNS and takes(path, ())]


def test_a_part_of_a_network_is_a_pattern_or_several():
    assert len(PATTERNS) == 5
    assert all(takes(path, value) for path in PATTERNS for value in ("head", ("head", "norm*")))


def test_kinds_are_told_apart():
    kinds = [set(paths) for paths in (BOOLEANS, TEXTS, WHOLE, NUMBERS)]
    assert all(len(kind) > 15 for kind in kinds)
    kinds += [set(PATTERNS), set(LISTS)]
    assert sum(map(len, kinds)) == len(set.union(*kinds)) > len(ALLOWED) - 20


@pytest.mark.parametrize(
    ("paths", "values", "told"),
    [
        (ALLOWED, [object(), {1, 2}, 3 + 1j, {}, {"a": 1}, b"a"], "must be"),
        (BOOLEANS, ["no", "", 0, 1, None, 1.5, [True], np.nan], "must be True or False"),
        (TEXTS, [0, 1.5, True, None, ["a"], []], "must be text"),
        (WHOLE, [True, "3", "no", 1e12, 2.5, np.nan, np.inf], "must be an integer of at least"),
        (WHOLE, [2**31, 10**20, ENORMOUS], "must be at most"),
        (WHOLE, [-1, -ENORMOUS], "must be at least"),
        (NUMBERS, [True, "no", "0.5", np.nan, np.inf, -np.inf, 1e39, -1, ENORMOUS], "must be"),
        (NUMBERS, [[0.5], []], "must be"),
        (PATTERNS, [0, 1.5, True, None, [3], ["head", None]], "must be text"),
    ],
    ids=["all", "booleans", "texts", "integers", "large", "small", "numbers", "lists", "patterns"],
)
def test_values_of_another_kind(paths, values, told):
    for path in paths:
        for value in values:
            config, setting = config_with(path, value)
            message = refusal(config)
            assert message.startswith(setting) and told in message, (path, message)


@pytest.mark.parametrize("value", [[1], 3, "all", None, [], True, 1.5], ids=repr)
@pytest.mark.parametrize("group", ["pools", "pools.small", "pools.small.teaching", "data"])
def test_a_group_is_a_group(group, value):
    config, _ = config_with(group, value)
    assert refusal(config).startswith(f"{group} must be a group of settings, got ")


@pytest.mark.parametrize(
    "group", ["phases", "training.compression", "training.secure_sum", "evaluation.around"]
)
def test_some_groups_may_be_none(group):
    check_settings(config_with(group, None)[0])
    assert refusal(config_with(group, [1])[0]).startswith(f"{group} must be a group")


@pytest.mark.parametrize("value", [object(), {1}, np.float32(1), np.zeros(3), b"a", [object()]])
def test_what_json_cannot_hold(value):
    assert refusal(ConfigDict({"mine": {"note": value}})).startswith("mine.note must be numbers")


def test_what_json_cannot_give_back():
    for value in (np.nan, np.inf, [1, np.nan]):
        assert refusal(ConfigDict({"note": value})).startswith("note must be finite")
    endless = []
    endless.append(endless)
    assert "note must be" in refusal(ConfigDict({"note": endless}))


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("evaluation.evry", "evaluation.every"),
        ("execution.rematerialize", "execution.rematerialise"),
        ("parties.network", "parties.networks"),
        ("phases.stoping", "phases.stopping"),
        ("training.privacy.quantil", "training.privacy.quantile"),
        ("training.compression.range_findr", "training.compression.range_finder"),
        ("algorithm.privacy.cilp", "algorithm.privacy.clip"),
        ("data.client_test_shares", "data.client_test_share"),
    ],
)
def test_a_misspelt_setting_of_the_librarys_groups_is_named(path, nearest):
    with pytest.raises(ValueError, match=rf"^{path} is no setting; did you mean {nearest}\?$"):
        check_settings(with_setting(path, True))


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("training.privcy", "training.privacy"),
        ("training.secure_sums", "training.secure_sum"),
        ("training.compresion", "training.compression"),
        ("training.fed_ndt", "training.fed_ntd"),
        ("algorithm.validaton", "algorithm.validation"),
        ("data.partiton", "data.partition"),
        ("metric", "metrics"),
        ("logger", "loggers"),
        ("callback", "callbacks"),
        ("pools.small.teachng", "pools.small.teaching"),
    ],
)
def test_a_misspelt_group_is_named(path, nearest):
    """Without it the run would go on as usual, such as unprotected."""
    with pytest.raises(ValueError, match=rf"^{path} is no setting; did you mean {nearest}\?$"):
        check_settings(with_setting(path, {"clip": 1.0}))
    # It may be that of a method of one's own in another run of the config.
    message = (
        r"^training\.my_method is not read in this run: neither the library nor its method has"
    )
    with pytest.warns(UserWarning, match=message):
        check_settings(with_setting("training.my_method", {"clip": 1.0}))


def test_groups_of_the_library_and_of_methods_are_no_surprise(recwarn):
    check_settings(with_setting("training.fed_prox", {"proximal_weight": 1.0}))
    check_settings(with_setting("training.privacy", {"clip": 1.0}))
    own = with_setting("training.my_method", {"clip": 1.0})
    own.training.method = "my_module:my_method"
    check_settings(own)
    assert not recwarn.list


@pytest.mark.parametrize(
    "also",
    [{"training.method": "ditto", "training.ditto": {"personal_epochs": 1}}, {"parties": {}}],
    ids=["a method with a group", "parties"],
)
def test_a_misspelt_setting_that_no_method_of_ones_own_reads_is_named(also):
    config = ConfigDict({"training": {"momntum": 0.9}})
    check_settings(config)  # a method of one's own may read it
    for path, value in also.items():
        group, _, name = path.rpartition(".")
        (config[group] if group else config)[name] = (
            ConfigDict(value) if name != "method" else value
        )
    message = r"^training\.momntum is no setting; did you mean training\.momentum\?$"
    with pytest.raises(ValueError, match=message):
        check_settings(config)


def test_ones_own_data_partition_and_method_have_settings_of_their_own():
    config = ConfigDict({"data": {"name": "mine:load", "rows": 3}})
    check_settings(config)
    config.data.name = "digits"
    with pytest.raises(ValueError, match=r"^data\.rows is no setting; did you mean data\."):
        check_settings(config)
    # They may have the names of settings of the library, with other values.
    own = {"crop": (8, 6), "domains": "all", "mean": "auto", "partition": None}
    check_settings(ConfigDict({"data": {"name": "mine:load", **own}}))
    for setting, value in (("seed", 0.5), ("client_test_share", 2), ("division_per_seed", 1)):
        with pytest.raises((TypeError, ValueError), match=f"^data.{setting} must be"):
            check_settings(ConfigDict({"data": {"name": "mine:load", setting: value}}))
    with pytest.raises(ValueError, match=r"^data\.scale must be finite"):
        check_settings(ConfigDict({"data": {"name": "mine:load", "scale": float("nan")}}))
    partition = {"name": "mine:deal", "rows": 3}
    check_settings(ConfigDict({"data": {"name": "digits", "partition": partition}}))
    training = {"method": "mine:fed_kd2", "fed_kd2": {"weight": 1.0}}
    check_settings(ConfigDict({"training": training}))


@pytest.mark.parametrize("group", ["data", "training", "algorithm"])
def test_what_is_no_group_is_named(group):
    config = ConfigDict({"evaluation": {"every": 3}, "more": {"x": 1}, group: 3})
    with pytest.raises(TypeError, match=f"^{group} must be a group of settings, got 3"):
        check_settings(config)


def test_what_may_be_none():
    check_settings(ConfigDict({"training": {"momentum": None}, "data": {"crop": None}}))


def with_setting(path, value):
    config = ConfigDict()
    for name in reversed(path.split(".")):
        value = {name: value}
    config.update(value)
    return config


def test_what_a_config_adds_is_its_own():
    check_settings(ConfigDict({"mine": {"note": ("a", 1, None, True, [2.5])}, "notes": ()}))


def test_a_misspelt_setting_outside_of_groups_is_named():
    for name, nearest in (
        ("logger", "loggers"),
        ("round", "rounds"),
        # A misplaced group: the run would not be private.
        ("privacy", "algorithm.privacy or training.privacy"),
        ("batch_size", "algorithm.batch_size or evaluation.batch_size or training.batch_size"),
    ):
        with pytest.raises(ValueError, match=rf"^{name} is no setting; did you mean {nearest}\?$"):
            check_settings(ConfigDict({name: 3}))


def test_a_pool_without_a_name():
    assert refusal(ConfigDict({"pools": {"": {}}})) == "pools must have names that are not empty."


def test_a_pool_whose_name_metrics_could_not_tell():
    assert "'a/b'" in refusal(ConfigDict({"pools": {"a/b": {}}}))


CONFIG = ConfigDict(
    {
        "rounds": 3,
        "algorithm": {"direction": "up", "public_batch_size": 3},
        "pools": {"small": {"cohort_size": 3, "teaching": {"decay": 1}}},
        "evaluation": {"every": 3, "checkpoint_every": 3},
        "training": {"fed_gkd": {"models_kept": 2}},
        "execution": {},
    }
)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("direction must be 'a'.", "algorithm.direction must be 'a'."),
        ("pools['small'].cohort_size must be", "pools.small.cohort_size must be"),
        ("teaching['small'].decay must be", "pools.small.teaching.decay must be"),
        ("evaluate_every must be", "evaluation.every must be"),
        ("num_rounds must be", "rounds must be"),
        ("rounds needs distillation.direction=3.", "rounds needs algorithm.direction=3."),
        ("rounds needs direction=3.", "rounds needs direction=3."),
        (
            "checkpoint_every must be a multiple of evaluate_every=2, got 3.",
            "evaluation.checkpoint_every must be a multiple of evaluation.every=2, got 3.",
        ),
        (
            "evaluation.checkpoint_every must be a multiple of evaluate_every=2, got 3.",
            "evaluation.checkpoint_every must be a multiple of evaluation.every=2, got 3.",
        ),
        ("distillation.batch_size must be", "algorithm.public_batch_size must be"),
        ("evaluation.every must be", "evaluation.every must be"),
        ("something else is wrong", "something else is wrong"),
    ],
)
def test_arguments_are_told_by_the_settings_that_they_come_from(message, told):
    with pytest.raises(ValueError) as error, as_settings(CONFIG):
        raise ValueError(message)
    assert str(error.value) == told


def test_what_a_config_lacks_is_told_by_its_path():
    for lacking in (lambda: CONFIG.pools.small.model, lambda: CONFIG.pools.small["model"]):
        with pytest.raises(ValueError) as error, as_settings(CONFIG):
            lacking()
        assert str(error.value) == "the config lacks 'pools.small.model'."
    with pytest.raises(AttributeError), as_settings(CONFIG):
        _ = (1).nothing
