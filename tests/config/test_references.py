"""`package.module:function` in configs: what it stands for, and every mistake in one line."""

import sys

import pytest
from ml_collections import ConfigDict

from fedcodist.config.config_file import load_config_file
from fedcodist.config.referenced_code import described_references
from fedcodist.config.references import called, choice_or_reference, function_at, is_reference

MODULE = """
class Outer:
    def inner(self): return 1

def seven(): return 7

def fails(word, *, times=1):
    rows = []
    return rows[times]

number = 3
"""


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A folder of modules on the path; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    (tmp_path / "referenced.py").write_text(MODULE)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_what_has_the_form_of_a_reference():
    for name in ("a:b", "my_package.module:function", "m:Class.method", "_m:_f"):
        assert is_reference(name), name
    for name in ("digits", "a:", ":b", "a b:c", "a:b:c", "a/b:c", "1:2", "", None, 3, ("a:b",)):
        assert not is_reference(name), name


def test_a_reference_stands_for_its_function(beside):
    assert function_at("data.name", "referenced:seven")() == 7
    assert function_at("data.name", "referenced:Outer.inner")(None) == 1
    (beside / "a_package").mkdir()
    (beside / "a_package" / "__init__.py").write_text("")
    (beside / "a_package" / "part.py").write_text("def eight(): return 8\n")
    assert choice_or_reference("x", "a_package.part:eight", {"ours": 1})() == 8
    assert choice_or_reference("x", "ours", {"ours": 1}) == 1


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("not_there:f", "there is no module 'not_there', neither installed nor beside the config"),
        ("referenced.deeper:f", "there is no module 'referenced.deeper', neither installed nor"),
        ("referenced:sevn", "there is no 'sevn' in referenced; did you mean 'seven'?"),
        ("referenced:zzz", "there is no 'zzz' in referenced."),
        ("lacks:f", "the import of lacks failed: ModuleNotFoundError: No module named 'not_there'"),
        (
            "broken:f",
            "the import of broken failed: ZeroDivisionError: division by zero (broken.py, line 2)",
        ),
        ("unreadable:f", "failed: SyntaxError: invalid syntax (unreadable.py, line 1)"),
        ("leaves:f", "failed: it ended the program with sys.exit(0). (leaves.py, line 1)"),
    ],
)
def test_what_cannot_be_found_is_one_line(beside, reference, message):
    (beside / "lacks.py").write_text("import not_there\n")
    (beside / "broken.py").write_text("x = 1\n1 / 0\n")
    (beside / "unreadable.py").write_text("def f(: pass\n")
    (beside / "leaves.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(ValueError, match=rf"^pools\.main\.model '{reference}': ") as error:
        function_at("pools.main.model", reference)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_cannot_be_called_or_chosen_is_one_line(beside):
    with pytest.raises(
        ValueError, match=r"^x must be a function or a class, .*which is of type int"
    ):
        function_at("x", "referenced:number")
    with pytest.raises(
        ValueError, match=r"^x must be one of \['a'\] or package\.module:function, got 'a:'\.$"
    ):
        choice_or_reference("x", "a:", {"a": 1})


def test_what_a_function_raises_is_one_line_with_its_place(beside):
    fails = function_at("data.name", "referenced:fails")
    with pytest.raises(
        ValueError, match=r"^data\.name 'referenced:fails': IndexError: .*line 9\)$"
    ):
        called("data.name", "referenced:fails", fails, "word", times=2)
    with pytest.raises(
        ValueError,
        match=r"^data\.name 'referenced:fails': .*'tims', it has the arguments word, times\.$",
    ):
        called("data.name", "referenced:fails", fails, "word", tims=2)


def test_references_that_results_depend_on(beside):
    config = ConfigDict(
        dict(
            name="referenced:seven",  # a name is no reference
            data=dict(name="referenced:seven", folder="referenced:seven"),
            pools={
                "main": dict(model="referenced:seven"),
                "with-dash": dict(model="referenced:seven"),
                "other": dict(model="digits_small"),
            },
            parties=dict(networks=("digits_small", "referenced:Outer")),
            metrics=dict(mine="referenced:fails"),
            training=dict(
                client_optimizer="referenced:fails",
                server_optimizer="referenced:fails",
                server_schedule="referenced:fails",
            ),
            algorithm=dict(
                name="fed_avg",
                optimizer="referenced:fails",
                distillation_optimizer="referenced:fails",
                generator_optimizer="referenced:fails",
            ),
            loggers=("referenced:fails",),
        )
    )
    found = described_references(config)
    assert sorted(found) == [
        "algorithm.distillation_optimizer",
        "algorithm.generator_optimizer",
        "algorithm.optimizer",
        "data.name",
        "metrics.mine",
        "parties.networks[1]",
        "pools.main.model",
        "pools.with-dash.model",
        "training.client_optimizer",
        "training.server_optimizer",
        "training.server_schedule",
    ]
    assert found["data.name"]["referenced:seven.code"] == [7]
    for module, text in (
        ("referenced", MODULE),
        ("edited", MODULE.replace("return 7", "return 8")),
    ):
        (beside / f"{module}.py").write_text(text)
    config.data.name = "edited:seven"
    assert described_references(config)["data.name"]["edited:seven.code"] == [8]


def test_the_folder_of_a_config_file_is_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_a_config.py").write_text("def nine(): return 9\n")
    (tmp_path / "config.py").write_text("import beside_a_config\n")
    for _ in range(2):
        load_config_file(str(tmp_path / "config.py"))
    assert sys.path.count(str(tmp_path)) == 1
    assert function_at("x", "beside_a_config:nine")() == 9
    del sys.modules["beside_a_config"]
