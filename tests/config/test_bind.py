"""`bind`: arguments from settings by a function's signature, and messages by the settings' names."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from fedcodist.config.allowed_settings import ALLOWED
from fedcodist.config.bind import accepted, bind, offered
from fedcodist.core.checks import check_number


class Hyper(NamedTuple):
    rate: Any = 0.1
    weight: Any = 1.0


class Steps(NamedTuple):
    batch_size: int
    epochs: int = 1


def method(
    model, first: Steps, second: Steps = Steps(8, 3), count: int = 4, hyper: Hyper = Hyper()
):
    """Returns its arguments, or raises an error about one as the library does."""
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}.")
    if hyper.rate < 0:
        raise TypeError(f"hyper.rate must be at least 0 for count={count}, got {hyper.rate}.")
    return dict(model=model, first=first, second=second, count=count, hyper=hyper)


SETTINGS = {
    "first_batch_size": st.integers(1, 9),
    "first_epochs": st.integers(1, 9),
    "second_batch_size": st.integers(1, 9),
    "second_epochs": st.integers(1, 9),
    "batch_size": st.integers(1, 9),
    "epochs": st.integers(1, 9),
    "count": st.integers(0, 9),
    "rate": st.floats(0, 1),
    "weight": st.floats(0, 1),
}
some_settings = st.fixed_dictionaries({}, optional=SETTINGS)
words = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
prefixes = words.map(lambda word: f"{word}.")


@given(some_settings, st.booleans())
def test_settings_reach_arguments_and_fields_and_defaults_are_left_out(settings, as_config):
    settings = {"batch_size": 5} | settings
    found = bind(method, ConfigDict(settings) if as_config else settings, "x.", model="net")
    field = lambda name, default: settings.get(name, default)
    assert found == dict(
        model="net",
        first=Steps(
            field("first_batch_size", settings["batch_size"]),
            field("first_epochs", field("epochs", 1)),
        ),
        second=Steps(
            field("second_batch_size", settings["batch_size"]),
            field("second_epochs", field("epochs", 3)),
        ),
        count=field("count", 4),
        hyper=Hyper(field("rate", 0.1), field("weight", 1.0)),
    )


@given(some_settings, st.fixed_dictionaries({}, optional=SETTINGS))
def test_what_is_given_goes_before_settings(settings, more):
    settings = {name: value for name, value in settings.items() if name not in more}
    own = {} if "batch_size" in more else {"batch_size": 5}
    found = bind(method, own | settings, "x.", model="net", **more)
    assert found["count"] == (settings | more).get("count", 4)
    for name in Hyper._fields:
        expected = more.get(name, settings.get(name, Hyper._field_defaults[name]))
        assert getattr(found["hyper"], name) == expected


def test_a_setting_of_what_is_given_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^x\.count is not a setting of method, which has batch_size, epochs, rate, weight\.$",
    ):
        bind(method, {"batch_size": 5, "count": 2}, "x.", model="net", count=3)
    # The library's own settings of such names belong to other methods, or to what is given.
    assert "algorithm.temperature" in ALLOWED
    assert (
        bind(lambda temperature: temperature, {"temperature": 2}, "algorithm.", temperature=3) == 3
    )


def test_a_misspelt_setting_is_named_with_what_was_meant():
    for settings, prefix, meant in (
        ({"batch_sise": 5}, "x.", "x.batch_size"),
        ({"batch_sise": 5}, "training.", "training.batch_size"),
        ({"client_optimiser": "sgd"}, "training.", "training.client_optimizer"),
    ):
        with pytest.raises(ValueError, match=rf"; did you mean {meant}\?$"):
            bind(method, settings, prefix, model="net")
    for name in ("modell", "hyperr"):  # `model` is given, and `hyper` is set field by field
        with pytest.raises(ValueError, match=rf"^x\.{name} is not a setting .*, weight\.$"):
            bind(method, {name: 5}, "x.", model="net")


def test_a_group_of_ones_own_method_has_no_settings_of_the_librarys_method_of_that_name():
    def ditto(weight=1.0):
        return weight

    assert "training.ditto.personal_epochs" in ALLOWED
    with pytest.raises(
        ValueError,
        match=r"^training\.ditto\.personal_epochs is not a setting of ditto, which has weight\.$",
    ):
        bind(ditto, {"personal_epochs": 3}, "training.ditto.")


@given(some_settings, prefixes)
def test_what_is_missing_is_named(settings, prefix):
    with pytest.raises(ValueError) as error:
        bind(method, {"batch_size": 5} | settings, prefix)
    assert str(error.value) == f"the config lacks '{prefix}model'."
    settings = {n: v for n, v in settings.items() if not n.endswith("batch_size")}
    with pytest.raises(ValueError) as error:
        bind(method, settings, prefix, model="net")
    assert str(error.value) == f"the config lacks '{prefix}batch_size'."


@given(some_settings, words, prefixes)
def test_what_is_unknown_is_named_with_what_there_is(settings, word, prefix):
    name = f"{word}_unknown"
    with pytest.raises(ValueError) as error:
        bind(method, settings | {name: 1}, prefix, model="net")
    assert str(error.value) == (
        f"{prefix}{name} is not a setting of method, which has batch_size, count, epochs, rate, weight."
    )


def test_settings_of_other_methods_are_left_alone():
    assert "algorithm.alpha" in ALLOWED and "alpha" not in accepted(method)
    settings = {"batch_size": 5, "alpha": 1.0, "my_other_method": ConfigDict({"a": 1})}
    with pytest.warns(UserWarning, match=r"^algorithm\.my_other_method is not read by method\.$"):
        found = bind(method, settings, "algorithm.", model=1)
    assert found == bind(method, {"batch_size": 5}, "x.", model=1)


@given(prefixes, st.integers(-9, -1), st.floats(-9, -1))
def test_messages_begin_with_the_setting(prefix, count, rate):
    with pytest.raises(ValueError) as error:
        bind(method, {"batch_size": 5, "count": count}, prefix, model=1)
    assert str(error.value) == f"{prefix}count must be at least 0, got {count}."
    with pytest.raises(TypeError) as error:
        bind(method, {"batch_size": 5, "count": 2, "rate": rate}, prefix, model=1)
    message = f"{prefix}rate must be at least 0 for {prefix}count=2, got {rate}."
    assert str(error.value) == message
    # An argument that is no setting keeps its name.
    with pytest.raises(ValueError, match=r"^count must be at least 0"):
        bind(method, {"batch_size": 5}, prefix, model=1, count=count)


def test_offers_are_made_where_they_are_taken():
    made = []
    offers = {
        name: lambda about, name=name: made.append(name) or about
        for name in ("model", "rate", "second", "second_epochs", "other")
    }
    assert offered(method, offers, 7) == {"model": 7, "rate": 7, "second": 7}
    # `second` is given as a whole, so its fields are not.
    assert made == ["model", "rate", "second"]


def test_an_argument_goes_before_a_field_of_its_name():
    def both(weight: Any = None, hyper: Hyper = Hyper()):
        return weight, hyper

    assert bind(both, {"weight": 3}, "x.") == (3, Hyper())


def _looks_up(steps: int):
    return {"one": 1}[str(steps)]


def _fails(steps: int):
    raise RuntimeError(f"no {steps}\nat all")


def _refuses(steps: int):
    raise ValueError("a whole number of cycles is needed")


def _calls_the_library(steps: int):
    check_number("hyper.rate", -steps, low=0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_looks_up, r"^algorithm '.*:_looks_up': KeyError: '3' \(test_bind.py, line \d+\)$"),
        (_fails, r"^algorithm '.*:_fails': RuntimeError: no 3 at all \(test_bind.py, line"),
        (_refuses, r"^algorithm '.*:_refuses': a whole .* is needed \(test_bind.py, line"),
        (_calls_the_library, r"^hyper.rate must be at least 0, got -3"),
    ],
)
def test_an_error_in_a_function_of_ones_own_names_its_line(function, message):
    with pytest.raises(ValueError, match=message) as error:
        bind(function, {"steps": 3}, "algorithm.")
    assert "\n" not in str(error.value)
