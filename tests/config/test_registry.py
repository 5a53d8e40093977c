"""The registry: one entry for each method, and methods that are registered from outside the package."""

import importlib
import inspect
import sys

import pytest
from rich.console import Console

from fedcodist.config.config_file import load_config_file
from fedcodist.config.experiment import build_experiment
from fedcodist.config.referenced_code import described_references
from fedcodist.config.registry import (
    CLIENTS,
    ENTRIES,
    KINDS,
    METHOD_NAMES,
    PARTIES,
    Entry,
    function_of,
    load_methods,
    register,
)
from fedcodist.config.settings import check_settings
from fedcodist.configs import digits_methods
from fedcodist.report.entries import read_run
from fedcodist.report.ranking import ranked
from fedcodist.report.ranking_table import for_terminal, ranking_table
from fedcodist.report.runs import load_run
from fedcodist.run.experiment import run_experiment

MODULE = '''
from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.config.registry import CLIENTS, POOLS, Entry, register


def shouting(pools, columns, times: int, execution, word: str = "hey", num_unlabelled=None):
    """Pools by themselves."""
    if times < 1:
        raise ValueError(f"times must be at least 1, got {times}.")
    algorithm = independent_pools(pools, columns, execution)
    return algorithm._replace(name=" ".join([word] * times))


def slower(model, training, factor: float, hyper: FedAvgHyper = FedAvgHyper()):
    """FedAvg at another rate."""
    return fed_avg(model, training, hyper=hyper._replace(client_learning_rate=factor))


register(Entry("shouting", "Shouting", POOLS, shouting))
register(Entry("slower", "Slower", CLIENTS, "outside_methods:slower"))
'''


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The name of a module of methods; its methods are removed from the registry after the test."""
    (tmp_path / "outside_methods.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    known, names = dict(ENTRIES), dict(METHOD_NAMES)
    yield "outside_methods"
    sys.modules.pop("outside_methods", None)
    for registered, before in ((ENTRIES, known), (METHOD_NAMES, names)):
        registered.clear()
        registered.update(before)


def config_of(outside, algorithm="shouting", **settings):
    config = digits_methods.get_config("fed_avg")
    config.rounds, config.seeds = 2, 1
    config.evaluation.every, config.evaluation.checkpoint_every = 2, None
    with config.unlocked():
        config.methods = (outside,)
        config.algorithm = dict(name=algorithm, **settings)
    return config


def test_every_entry_has_a_function_a_title_and_a_place():
    for name, entry in ENTRIES.items():
        assert (entry.name, entry.kind in KINDS, METHOD_NAMES[name]) == (name, True, entry.title)
        assert function_of(entry).__name__ == name
        assert entry.paper == "" or entry.paper.startswith("https://")
        names = inspect.signature(function_of(entry)).parameters
        assert ("num_unlabelled" in names) == ("unlabelled" in entry.reads)


def test_an_entry_links_to_the_paper_that_its_module_names():
    for entry in ENTRIES.values():
        assert entry.paper in (inspect.getdoc(inspect.getmodule(function_of(entry))) or "")


def test_the_same_entry_twice_is_fine_and_a_name_that_is_taken_is_one_line(outside):
    config = {"methods": [outside, outside]}
    load_methods(config)
    known = dict(ENTRIES)
    load_methods(config)
    importlib.reload(sys.modules[outside])  # with functions of its own
    assert ENTRIES.keys() == known.keys() and METHOD_NAMES["slower"] == "Slower"
    entry = Entry("fed_prox", "Mine", CLIENTS, "my_package.my_method:fed_prox")
    with pytest.raises(
        ValueError, match=r"^name must be of no other method, got 'fed_prox' of my_"
    ) as e:
        register(entry)
    assert "\n" not in str(e.value) and ENTRIES["fed_prox"].title == "FedProx"
    with pytest.raises(
        ValueError,
        match=r"^title must be of no other method, got 'FedProx' of 'mine', .*'fed_prox'",
    ):
        register(entry._replace(name="mine", title="FedProx"))
    with pytest.raises(ValueError, match=r"^kind must be one of .* got 'server' of 'mine'\.$"):
        register(entry._replace(name="mine", kind="server"))


def test_a_config_file_may_register_its_methods_itself(outside, tmp_path):
    """Its module is `config` to a command, and has its own name where `config.methods` names it."""
    load_config_file(str(tmp_path / "outside_methods.py"))
    load_methods({"methods": [outside]})
    assert ENTRIES["shouting"].make is sys.modules[outside].shouting
    (tmp_path / "other_methods.py").write_text(MODULE)
    with pytest.raises(ValueError, match=r"^methods 'other_methods': .* name must be of no other"):
        load_methods({"methods": ["other_methods"]})


def test_modules_that_cannot_be_imported_are_one_line(outside, tmp_path):
    config = config_of("a_module_that_is_not_there", times=1)
    with pytest.raises(
        ValueError, match=r"^methods 'a_module_that_is_not_there': there is no module"
    ):
        build_experiment(config)
    (tmp_path / "broken_methods.py").write_text("1 / 0\n")
    with pytest.raises(
        ValueError,
        match=r"^methods 'broken_methods': .* division by zero \(broken_methods\.py, line 1\)",
    ):
        build_experiment(config_of("broken_methods", times=1))
    with config.ignore_type():
        config.methods = "outside_methods"
    with pytest.raises(TypeError, match=r"^methods must be a list"):
        check_settings(config)


def test_methods_from_outside_are_built_and_their_settings_checked(outside):
    assert build_experiment(config_of(outside, times=2)).algorithm.name == "hey hey"
    assert build_experiment(config_of(outside, times=1, word="you")).algorithm.name == "you"
    with pytest.raises(ValueError, match=r"^algorithm\.times must be at least 1, got 0\.$"):
        build_experiment(config_of(outside, times=0))
    with pytest.raises(ValueError, match=r"^the config lacks 'algorithm\.times'\.$"):
        build_experiment(config_of(outside))
    with pytest.raises(
        ValueError, match=r"^algorithm\.tones is not a setting of shouting, which has"
    ):
        build_experiment(config_of(outside, times=1, tones=3))
    config = config_of(outside, "fed_avg")
    config.training.method = "slower"
    with pytest.raises(ValueError, match=r"^the config lacks 'training\.factor'\.$"):
        build_experiment(config)
    config.training.slower = dict(factor=0.25)
    hyper = build_experiment(config).algorithm.hyper["main"]
    assert (hyper.client_learning_rate, hyper.server_learning_rate) == (0.25, 1.0)
    config.training.method = "shouting"
    with pytest.raises(
        ValueError, match=r"^training\.method must be one of .*'slower'.*'shouting'"
    ):
        build_experiment(config)


def test_flops_that_nobody_counted_are_a_dash(outside, tmp_path, capsys):
    """`config.methods` may name a module twice: in a run, and where runs are compared."""
    config = config_of(outside, times=2)
    config.methods = (outside, outside)
    folder = tmp_path / "run"
    run_experiment(build_experiment(config), folder, config=config.to_dict(), show_progress=False)
    (entry,) = read_run("run", load_run(folder))
    assert "FLOPs of 'shouting' are not counted" in capsys.readouterr().err
    console = Console(record=True, width=200)
    console.print(for_terminal(ranking_table(ranked([entry], "run", None), "run", [entry])))
    (line,) = [line for line in console.export_text().splitlines() if "main" in line]
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells[-4:-2] == ["-", "-"] and float(cells[2]) > 10


def test_a_method_cannot_read_what_no_run_has():
    with pytest.raises(
        ValueError, match=r"^reads must be of .*'public'.*, got 'publik' of 'mine'\.$"
    ):
        register(Entry("mine", "Mine", PARTIES, "my_module:mine", ("publik",)))
    with pytest.raises(TypeError, match=r"^reads must be a tuple of names, got 'public' of 'mine'"):
        register(Entry("mine", "Mine", PARTIES, "my_module:mine", "public"))
    assert "mine" not in ENTRIES


def test_an_edited_method_that_is_named_by_its_entry_is_another_runs(outside, tmp_path):
    """Also if the entry names its function as text."""
    entry = f'\nENTRY = Entry("named", "Named", POOLS, "{outside}:shouting")\n'
    path, codes = tmp_path / "outside_methods.py", []
    for text in (MODULE, MODULE, MODULE.replace('" ".join', '"-".join')):
        path.write_text(text + entry)
        importlib.invalidate_caches()
        sys.modules.pop(outside, None)
        ENTRIES.pop("shouting", None), ENTRIES.pop("slower", None)
        codes.append(described_references(config_of(outside, f"{outside}:ENTRY", times=2)))
    assert codes[0] == codes[1] != codes[2]


@pytest.mark.parametrize(
    ("line", "edited"),
    [
        ('name=" ".join([word] * times)', 'name="-".join([word] * times)'),
        ("def helped(word):\n    return word", "def helped(word):\n    return word + word"),
    ],
)
def test_an_edited_method_is_another_runs(line, edited, outside, tmp_path):
    """Its own code, and that of a function beside it which it calls."""
    helper = "\n\ndef helped(word):\n    return word\n"
    module = MODULE.replace("\n\ndef shouting", helper + "\n\ndef shouting")
    module = module.replace(
        "algorithm = independent_pools", "word = helped(word)\n    algorithm = independent_pools"
    )
    path, codes = tmp_path / "outside_methods.py", []
    for text in (module, module, module.replace(line, edited)):
        path.write_text(text)
        importlib.invalidate_caches()
        sys.modules.pop(outside, None)
        ENTRIES.pop("shouting", None), ENTRIES.pop("slower", None)
        codes.append(described_references(config_of(outside, times=2)))
    assert codes[0] == codes[1] != codes[2]
    assert set(codes[0]) == {"algorithm.name"}
