"""The pages of results from made-up records: settings, samples, intervals, claims, the document."""

import csv
import functools
import importlib
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments.configs import cifar100_large_model, cifar100_table1
from experiments.studies import archive
from experiments.studies import document as results
from experiments.studies import samples as samples_lib
from experiments.studies.codistillation import figure_4_tuning, paper_numbers
from experiments.studies.codistillation.claims import claims, gain
from experiments.studies.codistillation.findings import find, verdict
from experiments.studies.codistillation.page import codistillation
from experiments.studies.codistillation.paper_numbers import FIGURE_4, MODELS, run_name
from experiments.studies.fed_sdd.tables import ORDERINGS, REPORTED, SCALED, STANDS_FOR, tables
from experiments.studies.index import index
from experiments.studies.pages import Page, first_screen, read_notes
from experiments.studies.settings import OWN, UNREAD, flat, settings, without
from experiments.studies.verdicts import (
    DID_NOT_HOLD,
    HELD,
    OPEN,
    UNDECIDED,
    Verdict,
    anchor,
    decided,
)
from fedcodist.config.experiment import build_experiment
from fedcodist.config.registry import CODISTILLATION, METHOD_NAMES, METHODS
from fedcodist.configs import digits_codist
from fedcodist.report import styles
from fedcodist.report.intervals import contrast

ROOT = Path(results.__file__).resolve().parents[2]
TABLE = "cifar100_table1"
MERGED = "merged_codistillation,4700,in_domain"
PERIODIC = "periodic_codistillation,4700,in_domain"
PERCENT = st.floats(1, 99)


def record(
    folder,
    run,
    accuracies,
    *,
    experiment=TABLE,
    seeds=(0,),
    rounds=1500,
    finished=True,
    date="2026-01-01",
    notes=(),
    file=None,
    commit="c0ffee1234",
    **changes,
):
    """Writes a record; `accuracies` are in %, model -> one for all seeds or a list.

    `changes` are of the config's settings, its groups' by name.
    """
    shares = {
        model: [v / 100 for v in (value if isinstance(value, list) else [value] * len(seeds))]
        for model, value in accuracies.items()
    }
    content = {
        "experiment": experiment,
        "run": run,
        "command": f"python -m experiments.main --run '{run}' | tee log",
        "config": {
            "name": experiment,
            "run": run,
            "seed": seeds[0],
            "seeds": len(seeds),
            "rounds": rounds,
            "notes": list(notes),
            "evaluation": {"every": len(seeds)},
            **merged(made_up_settings(run, accuracies), changes),
        },
        "commit": commit,
        "seeds": list(seeds),
        "rounds": rounds,
        "full_rounds": 1500,
        "finished": finished,
        "last_round": rounds if finished else rounds // 3,
        "device": "cpu",
        "date": date,
        "seconds": 90.0 if finished else None,
        "final": {
            model: {
                split: {"accuracy": values, "loss": [1.0] * len(values)}
                for split in (("test", "held_out") if finished else ("held_out",))
            }
            for model, values in shares.items()
        },
        "curve": {
            model: {
                "held_out": {
                    "round": [0, rounds],
                    "accuracy": [[0.01] * len(values), values],
                }
            }
            for model, values in shares.items()
        },
        "notes": list(notes),
    }
    path = folder / experiment / f"{file or run.replace(',', '-') + str(seeds) + str(rounds)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def made_up_settings(run, models):
    """The part of a config by which runs are distinguished."""
    method, *rest = run.split(",")
    size = rest[0] if rest and rest[0] in cifar100_table1.FRACTIONS else "4700"
    fractions = {"small": 1.0, "large": cifar100_table1.FRACTIONS[size]}
    return {
        "algorithm": {"name": method if method in METHODS else "merged_codistillation"},
        "data": {
            "unlabelled_folder": "data/cifar10" if "cifar10" in rest else None,
            "num_unlabelled": 600 if "600" in rest else None,
        },
        "pools": {
            model: {"fraction": fractions.get(model, 1.0), "client_learning_rate": 0.1}
            for model in models
        },
    }


def merged(config, changes):
    both = {**config, **changes}
    inner = {
        name: merged(config[name], changes[name])
        for name in config.keys() & changes.keys()
        if isinstance(config[name], dict)
    }
    return {**both, **inner}


def whole_table(folder, change=lambda run, model, accuracy: accuracy, skip=(), **changes):
    """The paper's numbers with three seeds that differ by 0.1, and figure 4's first points."""
    wiggle = lambda value: [value - 0.1, value, value + 0.1]
    runs = {(TABLE, run): values for run, values in paper_numbers.TABLE_1.items()}
    runs |= {(FIGURE_4, f"{method},600"): (33.5, 33.0) for method in CODISTILLATION}
    for (experiment, run), values in runs.items():
        models = MODELS if not run.startswith("fed_avg") or "4700" in run else ("large",)
        accuracies = {
            model: wiggle(change(run, model, values[MODELS.index(model)])) for model in models
        }
        if run not in skip:
            record(folder, run, accuracies, experiment=experiment, seeds=(0, 1, 2), **changes)
    return folder


def as_ours(folder):
    """Made-up records in place of the project's, so that pages say what is missing."""
    return results.load_results(folder)._replace(is_ours=True)


def texts_of(folder):
    """Every text that is written, by its path below the folder."""
    texts = results.render(as_ours(folder), folder / "RESULTS.md").texts
    return {str(path.relative_to(folder)): text for path, text in texts.items()}


def text_of(folder, page="codistillation"):
    return texts_of(folder)[f"docs/results/{page}.md"]


def plots_of(folder):
    document = results.render(as_ours(folder), folder / "RESULTS.md")
    return {path.name: draw for path, draw in document.plots.items()}


def runs_of(folder):
    """The lines of the list of runs, column -> cell."""
    return list(csv.DictReader(io.StringIO(texts_of(folder)["runs.csv"])))


def section(text, heading):
    """The text between a heading and the next of its level or above."""
    level = heading.split(" ")[0]
    (rest,) = text.split(f"\n{heading}\n")[1:]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, flags=re.MULTILINE)[0]


def row(text, start):
    """The cells of the table rows that start with these cells."""
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith(f"| {start} |")
    ]


# Intervals


def students_quantile(freedom):
    """t with 97.5 % of Student's distribution below it, by Simpson's rule and bisection."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = math.exp(log_scale) / math.sqrt(freedom * math.pi)
    density = lambda x: scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)

    def below(t, steps=4000):
        width = t / steps
        inner = sum((4 if i % 2 else 2) * density(i * width) for i in range(1, steps))
        return 0.5 + width / 3 * (density(0) + inner + density(t))

    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 0.975 else (low, middle)
    return low


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 4.302653), (4, 2.776445), (10, 2.228139)])
def test_the_reference_quantile_is_the_tables(freedom, quantile):
    assert students_quantile(freedom) == pytest.approx(quantile, abs=1e-5)


def test_welch_with_equal_spreads_has_the_pooled_degrees_of_freedom():
    estimate = contrast([[33.0, 34.0, 35.0]], [[30.0, 31.0, 32.0]], 10_000)
    assert estimate.value == pytest.approx(3.0)
    assert estimate.half_width == pytest.approx(2.776445 * math.sqrt(2 / 3), abs=1e-5)
    assert estimate.kind == "Welch"


def test_welch_with_unequal_spreads_and_sizes():
    ours, theirs = [33.0, 35.5, 34.1, 33.2], [31.0, 31.2]
    pieces = [statistics.variance(each) / len(each) for each in (ours, theirs)]
    freedom = sum(pieces) ** 2 / (pieces[0] ** 2 / 3 + pieces[1] ** 2 / 1)
    half_width = students_quantile(freedom) * math.sqrt(sum(pieces))
    assert contrast([ours], [theirs], 10_000).half_width == pytest.approx(half_width, rel=1e-4)


def test_a_difference_of_differences_adds_the_variances():
    samples = [[1.0, 2.0], [3.0, 5.0], [1.0, 4.0], [2.0, 2.5]]
    pieces = [statistics.variance(each) / 2 for each in samples]
    freedom = sum(pieces) ** 2 / sum(piece**2 for piece in pieces)
    estimate = contrast(samples[:2], samples[2:], 10_000)
    assert estimate.value == pytest.approx(1.5 + 4.0 - 2.5 - 2.25)
    half_width = students_quantile(freedom) * math.sqrt(sum(pieces))
    assert estimate.half_width == pytest.approx(half_width, rel=1e-4)


def test_single_seeds_have_the_binomial_interval():
    estimate = contrast([[50.0]], [[50.0]], 10_000)
    assert estimate.half_width == pytest.approx(1.96 * math.sqrt(2 * 0.5 * 0.5 / 10_000) * 100)
    assert estimate.kind == "one seed"
    assert contrast([[40.0, 41.0, 42.0]], [[50.0]], 10_000).kind == "one seed"
    assert contrast([[50.0]], [[50.0]], 40_000).half_width == pytest.approx(estimate.half_width / 2)


def test_single_seeds_have_the_spread_of_other_runs_too():
    ours, theirs = [40.0, 41.0, 42.0], [50.0]
    variance = (41 * 59 + 50 * 50) / 10_000 + 0.7**2 * (1 / 3 + 1)
    estimate = contrast([ours], [theirs], 10_000, seeds_deviation=0.7)
    assert estimate.half_width == pytest.approx(1.96 * math.sqrt(variance))
    # Several seeds of each know their own spread.
    several = ([ours], [[50.0, 51.0]], 10_000)
    assert contrast(*several, seeds_deviation=0.7) == contrast(*several)


def test_no_spread_at_all():
    assert contrast([[30.0, 30.0]], [[29.0, 29.0]], 100).half_width == 0


@given(st.lists(PERCENT, min_size=2, max_size=5), st.lists(PERCENT, min_size=2, max_size=5))
def test_a_contrast_is_antisymmetric_and_shift_free(ours, theirs):
    one, other = contrast([ours], [theirs], 100), contrast([theirs], [ours], 100)
    moved = contrast([[x + 10 for x in ours]], [[x + 10 for x in theirs]], 100)
    assert one.value == pytest.approx(-other.value, abs=1e-9)
    assert one.half_width == pytest.approx(other.half_width)
    assert one.half_width == pytest.approx(moved.half_width, rel=1e-4, abs=1e-4)


# Settings


def set_at(config, keys, value):
    for key in keys[:-1]:
        config = config.setdefault(key, {})
    config[keys[-1]] = value


def record_of(config):
    """A record of a config alone."""
    others = dict.fromkeys(archive.Record._fields)
    return archive.Record(**{**others, "config": config})


@pytest.mark.parametrize("method", METHODS)
def test_an_experiment_can_be_built_without_what_its_method_does_not_read(method):
    config = digits_codist.get_config(method)
    given = flat(config.to_dict())
    removed = given.keys() - without(given, UNREAD[method]).keys() - {"algorithm.name"}
    removed = [key for key in removed if key.startswith(("algorithm.", "pools."))]
    assert len(removed) > {"fed_avg": 20, "merged_codistillation": 0}.get(method, 4)
    for key in removed:
        group = config
        for name in key.split(".")[:-1]:
            group = group[name]
        del group[key.split(".")[-1]]
    assert build_experiment(config).algorithm.name == method


@pytest.mark.parametrize("method", METHODS)
def test_every_pattern_is_of_settings_that_configs_have(method):
    run = run_name(method, 4700, "in_domain")
    present = flat(cifar100_table1.get_config(run).to_dict())
    for pattern in (*OWN, *UNREAD[method]):
        assert len(without(present, (pattern,))) < len(present), pattern


@given(st.sampled_from(METHODS), st.dictionaries(st.sampled_from("abc"), st.integers()))
def test_what_is_not_read_changes_no_settings(method, values):
    one, other = ({"algorithm": {"name": method}, "rounds": 3} for _ in range(2))
    for pattern, (name, value) in itertools.product(UNREAD[method], values.items()):
        set_at(other, pattern.replace("*", name).split("."), value)
    if "name" in other.get("algorithm", {}):
        other["algorithm"]["name"] = method
    assert settings(record_of(one)) == settings(record_of(other))


# Pooling


def sample(folder, run=MERGED, model="small", **options):
    return samples_lib.sample(archive.load_records(folder), TABLE, run, model, **options)


def samples(folder, run=MERGED, model="small"):
    return samples_lib.samples(archive.load_records(folder), TABLE, run, model)


def test_records_of_other_seeds_are_one_sample(tmp_path):
    record(tmp_path, MERGED, {"small": [30.0, 32.0], "large": 20.0}, seeds=(0, 1))
    record(tmp_path, MERGED, {"small": 37.0, "large": 20.0}, seeds=(5,), notes=["again"])
    one = sample(tmp_path)
    assert one.seeds == (0, 1, 5)
    assert one.values == pytest.approx((30, 32, 37))
    assert one.mean == pytest.approx(33)
    assert one.deviation == pytest.approx(math.sqrt((9 + 1 + 16) / 2))


def test_a_seed_counts_once_the_newest(tmp_path):
    record(tmp_path, MERGED, {"small": 30.0}, date="2026-01-01", file="a")
    record(tmp_path, MERGED, {"small": 40.0}, date="2026-01-03", file="b", commit="d")
    record(tmp_path, MERGED, {"small": 50.0}, date="2026-01-02", file="c", commit="e")
    assert sample(tmp_path).values == pytest.approx((40,))


def test_other_settings_are_never_pooled(tmp_path):
    record(tmp_path, MERGED, {"small": [30.0, 31.0]}, seeds=(0, 1), algorithm={"alpha": 0.5})
    record(tmp_path, MERGED, {"small": 99.0}, seeds=(2,), algorithm={"alpha": 0.9})
    assert sample(tmp_path).values == pytest.approx((30, 31))
    table = section(text_of(tmp_path), "## Runs with several settings")
    found = sorted(cells[1:3] for cells in row(table, f"`{MERGED}`"))
    assert found == [["algorithm.alpha=0.5", "30.50 ± 0.71"], ["algorithm.alpha=0.9", "99.00"]]


def test_the_longest_run_is_shown_not_the_best(tmp_path):
    record(tmp_path, MERGED, {"small": [50.0, 51.0]}, seeds=(0, 1), rounds=300)
    record(tmp_path, MERGED, {"small": 30.0}, rounds=1500)
    assert [one.rounds for one in samples(tmp_path)] == [1500, 300]
    assert sample(tmp_path).values == pytest.approx((30,))
    assert samples(tmp_path)[1].values == pytest.approx((50, 51))


def test_the_newest_of_equal_settings_is_shown_not_the_best(tmp_path):
    record(tmp_path, MERGED, {"small": 50.0}, date="2026-01-01", file="a", alpha=0.1)
    record(tmp_path, MERGED, {"small": 30.0}, date="2026-01-02", file="b", alpha=0.2)
    record(tmp_path, MERGED, {"small": 60.0}, date="2026-01-01", file="c", alpha=0.3)
    assert sample(tmp_path).values == pytest.approx((30,))


def test_the_settings_of_the_config_file_are_shown_before_newer_ones(tmp_path):
    config = json.loads(cifar100_table1.get_config(MERGED).to_json_best_effort())
    own = ("algorithm", "data", "nested_pools", "pools", "training")
    of_file = {name: config[name] for name in own}
    other = merged(of_file, {"algorithm": {"alpha": 0.123}})
    record(tmp_path, MERGED, {"small": 30.0}, date="2026-01-01", file="a", **of_file)
    record(tmp_path, MERGED, {"small": [50.0, 51.0]}, seeds=(0, 1), date="2026-01-02", **other)
    assert sample(tmp_path).values == pytest.approx((30,))
    record(tmp_path, MERGED, {"small": 60.0}, rounds=2000, file="c", **other)
    assert sample(tmp_path).values == pytest.approx((60,))


def test_runs_with_earlier_settings_of_distillation_have_tables_and_verdicts_of_their_own(tmp_path):
    of_file = {}
    for run in ("fed_avg,4700", PERIODIC):
        config = json.loads(cifar100_table1.get_config(run).to_json_best_effort())
        own = ("algorithm", "data", "nested_pools", "pools", "training")
        of_file[run] = {name: config[name] for name in own}
    seeds = {"seeds": (0, 1, 2)}
    record(
        tmp_path, "fed_avg,4700", {"small": 30.0, "large": 20.0}, **seeds, **of_file["fed_avg,4700"]
    )
    record(tmp_path, PERIODIC, {"small": 30.0, "large": 20.0}, **seeds, **of_file[PERIODIC])
    assert "earlier studies" not in text_of(tmp_path)
    small = {"small": {"teaching": {"learning_rate": 0.5}}}
    earlier = merged(of_file[PERIODIC], {"pools": small})
    record(tmp_path, PERIODIC, {"small": 30.0, "large": 25.0}, file="e", **seeds, **earlier)
    other = merged(
        of_file[PERIODIC], {"training": {"batch_size": 7}}
    )  # not a setting of distillation
    record(tmp_path, PERIODIC, {"small": 30.0, "large": 29.0}, file="o", **seeds, **other)

    text = text_of(tmp_path)
    (gain,) = row(section(text, "## Table 1: CIFAR-100"), "PeriodicCodist | 4,700 | large")
    (of_earlier,) = row(
        section(text, "## Settings of the earlier studies"), "PeriodicCodist | 4,700 | large"
    )
    assert (gain[3], of_earlier[3]) == ("+0.00 ± 0.00", "+5.00 ± 0.00")
    judged = codistillation(
        as_ours(tmp_path).records, results.load_results(tmp_path).notes["codistillation"]
    ).verdicts
    by_text = {each.text: each.word for each in judged}
    claim = (
        "PeriodicCodist with images of CIFAR-10 leaves the large model as it is, at 4,700 examples"
    )
    assert by_text[claim] == OPEN and f"Settings of the earlier studies: {claim}" not in by_text


def test_a_run_with_baselines_is_shown_before_a_longer_one_without(tmp_path):
    slow = {"pools": {"large": {"client_learning_rate": 0.01}}}
    record(tmp_path, "fed_avg,4700", {"small": 20.0, "large": 10.0}, rounds=300)
    record(tmp_path, MERGED, {"small": 31.0, "large": 11.0}, rounds=300)
    record(tmp_path, MERGED, {"small": 32.0, "large": 12.0}, file="slow", rounds=300, **slow)
    record(tmp_path, MERGED, {"small": 33.0, "large": 13.0}, rounds=1500)
    # The small model of the slow one has a baseline, but a cell is of one run.
    assert sample(tmp_path).mean == pytest.approx(31)
    assert sample(tmp_path, model="large").mean == pytest.approx(11)
    record(tmp_path, "fed_avg,4700", {"small": 20.0, "large": 10.0}, rounds=1500)
    assert sample(tmp_path).mean == pytest.approx(33)


def test_fed_avg_runs_that_differ_in_what_fed_avg_does_not_read_are_pooled(tmp_path):
    for seed in (0, 1):
        own = {"alpha": seed, "teaching": {"temperature": seed}}
        record(
            tmp_path,
            "fed_avg,4700",
            {"small": 30.0 + seed, "large": 20.0},
            seeds=(seed,),
            algorithm={"alpha": seed, "period": seed},
            data={"num_unlabelled": 600 + seed},
            pools={"small": own, "large": own},
        )
    assert sample(tmp_path, "fed_avg,4700").values == pytest.approx((30, 31))
    assert sample(tmp_path, "fed_avg,4700", "large").seeds == (0, 1)
    assert "Runs with several settings" not in text_of(tmp_path)


def test_the_learning_rate_of_the_other_pool_is_no_setting_of_fed_avgs_model(tmp_path):
    for seed in (0, 1):
        large = {"large": {"client_learning_rate": 0.1 + seed}}
        accuracies = {"small": 30.0, "large": 20.0 + seed}
        record(tmp_path, "fed_avg,4700", accuracies, seeds=(seed,), pools=large)
    assert sample(tmp_path, "fed_avg,4700").seeds == (0, 1)
    assert len(samples(tmp_path, "fed_avg,4700", "large")) == 2


def test_a_methods_own_settings_are_told_apart_by_what_it_reads(tmp_path):
    for seed in (0, 1):
        own = {"algorithm": {"alpha": seed}, "seeds": (seed,)}
        record(tmp_path, PERIODIC, {"small": 30.0}, **own)
        record(tmp_path, MERGED, {"small": 30.0}, **own)
    assert [one.seeds for one in samples(tmp_path, PERIODIC)] == [(0, 1)]
    assert sorted(one.seeds for one in samples(tmp_path, MERGED)) == [(0,), (1,)]


def test_unfinished_runs_enter_no_sample(tmp_path):
    record(tmp_path, MERGED, {"small": 30.0, "large": 20.0}, finished=False)
    record(tmp_path, "fed_avg,3100", {"large": 7.0})
    assert sample(tmp_path) is None
    assert sample(tmp_path, split="held_out") is None
    text = text_of(tmp_path)
    table = section(text, "### Unlabelled images: in-domain")
    assert row(table, "MergedCodist")[0][3] == "unfinished"
    assert f'--only "{MERGED}"' in section(text, "## Not run")
    assert "20.00" not in table and "30.00" not in table
    (line,) = (line for line in runs_of(tmp_path) if line["run"] == MERGED)
    assert (line["rounds"], line["full rounds"], line["finished"]) == ("500", "1500", "no")
    assert line["held-out accuracy in %, mean over seeds"] == "small 30.00, large 20.00"
    assert line["test accuracy in %, mean over seeds"] == ""


def test_fed_avgs_small_model_is_one_baseline_with_each_seed_once(tmp_path):
    pools = lambda fraction: {"small": {"fraction": 1.0}, "large": {"fraction": fraction}}
    accuracies = {"small": 10.0, "large": 1.0}
    record(tmp_path, "fed_avg,3100", accuracies, date="2026-02-01", pools=pools(0.1))
    accuracies = {"small": [30.0, 31.0], "large": 2.0}
    record(tmp_path, "fed_avg,4700", accuracies, seeds=(0, 1), pools=pools(0.15))
    accuracies = {"small": 35.0, "large": 3.0}
    record(tmp_path, "fed_avg,6300", accuracies, seeds=(2,), pools=pools(0.2))
    for run, large in (("fed_avg,3100", 1), ("fed_avg,4700", 2), ("fed_avg,6300", 3)):
        assert sample(tmp_path, run).values == pytest.approx((30, 31, 35))
        assert sample(tmp_path, run, "large").mean == pytest.approx(large)


def test_the_baseline_of_another_length_is_another(tmp_path):
    record(tmp_path, "fed_avg,4700", {"small": 30.0, "large": 2.0}, rounds=300)
    record(tmp_path, "fed_avg,6300", {"large": 3.0}, rounds=1500)
    assert sample(tmp_path, "fed_avg,6300").rounds == 300


def test_curves_are_means_over_the_seeds_where_all_have_them(tmp_path):
    record(tmp_path, MERGED, {"small": [30.0, 34.0]}, seeds=(0, 1))
    one = samples_lib.curve(archive.load_records(tmp_path), TABLE, MERGED, "small", "held_out")
    assert one.rounds == (0, 1500)
    assert one.means == pytest.approx((1, 32))
    assert one.deviations == pytest.approx((0, math.sqrt(8)))


# Claims


@pytest.mark.parametrize(
    ("value", "half_width", "expected", "word"),
    [
        (2.0, 1.9, "above 0", HELD),
        (2.0, 2.1, "far above 0", UNDECIDED),
        (-2.0, 1.9, "above 0", DID_NOT_HOLD),
        (-2.0, 1.9, "below 0 from some weight on", HELD),
        (2.0, 1.9, "below 0", DID_NOT_HOLD),
        (0.0, 0.0, "above 0", UNDECIDED),
        (0.5, 0.4, "about 0", HELD),
        (0.5, 0.6, "about 0", UNDECIDED),
        (-0.1, 0.4, "about 0", HELD),
        (3.0, 1.9, "about 0, if the graph is complete", DID_NOT_HOLD),
        (5.0, 1.0, "about 0 or above", HELD),
        (-5.0, 3.0, "about 0 or above", DID_NOT_HOLD),
        (4.0, 0.9, "a little above 0", HELD),
        (4.0, 1.1, "a little above 0", UNDECIDED),
        (12.0, 1.0, "a little above 0", DID_NOT_HOLD),
        (5.0, 0.9, "at most 6", HELD),
        (8.0, 1.9, "at most 6", DID_NOT_HOLD),
        (12.0, 1.9, "at least 10", HELD),
        (9.0, 1.9, "at least 10", UNDECIDED),
        (4.5, 1.2, "at least 10", DID_NOT_HOLD),
        (50.0, None, "above 0", UNDECIDED),
    ],
)
def test_a_difference_is_judged_by_its_whole_interval(value, half_width, expected, word):
    assert decided(value, half_width, expected) == word


@given(st.floats(-9, 9), st.floats(0.1, 9), st.sampled_from(["above 0", "below 0"]))
def test_a_sign_and_its_opposite_are_never_both_held(value, half_width, expected):
    opposite = {"above 0": "below 0", "below 0": "above 0"}[expected]
    mirrored = {HELD: DID_NOT_HOLD, DID_NOT_HOLD: HELD, UNDECIDED: UNDECIDED}
    assert decided(value, half_width, opposite) == mirrored[decided(value, half_width, expected)]


def verdicts(folder):
    """Claim -> verdict."""
    read = archive.load_records(folder)
    return {
        claim.text: verdict([find(comparison, read) for comparison in claim.comparisons])
        for claim in claims()
    }


def finding(folder, text):
    """The one of the comparison with this text."""
    every = [comparison for claim in claims() for comparison in claim.comparisons]
    (comparison,) = {one for one in every if one.text == text}
    return find(comparison, archive.load_records(folder))


OF_LARGE, SMALLEST = (
    "MergedCodist with in-domain images lifts the large model, at 3,100 and 4,700 examples",
    "With MergedCodist and in-domain images the large model gains more at 3,100 examples than at "
    "4,700, and than at 6,300",
)
OUT_OF_DOMAIN = (
    "MergedCodist with images of CIFAR-10 lifts the small model, at 3,100, 4,700 and 6,300 examples"
)
AS_IT_IS = (
    "PeriodicCodist with images of CIFAR-10 leaves the large model as it is, at 4,700 examples"
)


def test_the_papers_own_numbers_meet_its_claims(tmp_path):
    for claim in claims():
        for comparison in claim.comparisons:
            paper = find(comparison, []).paper
            terms = itertools.chain(*comparison.terms)
            assert (paper is None) == (FIGURE_4 in {term.experiment for term in terms})
            is_equal = comparison.expected == "about 0"
            assert paper is None or (abs(paper) < 1 if is_equal else paper > 0)
    assert set(verdicts(whole_table(tmp_path)).values()) == {HELD}


def test_the_papers_differences_are_those_of_its_table():
    expected = {
        "large, 3,100: MergedCodist above PeriodicCodist": 31.98 - 31.09,
        "large, 4,700: PeriodicCodist above MergedCodist": 35.08 - 33.15,
        "small, 6,300: PeriodicCodist above MergedCodist": 35.68 - 33.78,
        "FedAvg, 6,300, large: above MergedCodist, in-domain": 35.10 - 33.96,
        "MergedCodist, 4,700, large: in-domain above CIFAR-10": 33.15 - 31.02,
        "PeriodicCodist, large: gain at 3,100 above gain at 6,300": 31.09 - 24.76 - 37.20 + 35.10,
    }
    for text, difference in expected.items():
        assert finding(Path("none"), text).paper == pytest.approx(difference), text


def test_mirrored_numbers_refute_the_claims(tmp_path):
    whole_table(tmp_path, lambda run, model, accuracy: 70 - accuracy)
    found = verdicts(tmp_path)
    assert found.pop(AS_IT_IS) == HELD
    assert set(found.values()) == {DID_NOT_HOLD}


def test_without_runs_nothing_is_decided(tmp_path):
    record(tmp_path, "fed_avg,4700", {"small": 30.0, "large": 30.0})
    assert set(verdicts(tmp_path).values()) == {OPEN}


def test_one_missing_run_leaves_a_claim_open(tmp_path):
    found = verdicts(whole_table(tmp_path, skip=("merged_codistillation,3100,in_domain",)))
    assert found[OF_LARGE] == found[SMALLEST] == OPEN
    assert found[OUT_OF_DOMAIN] == HELD


def test_runs_of_unequal_length_are_not_compared(tmp_path):
    record(tmp_path, "fed_avg,4700", {"small": 30.0, "large": 30.0}, rounds=1500)
    record(tmp_path, MERGED, {"small": 90.0, "large": 90.0}, rounds=300)
    assert verdicts(tmp_path)[OF_LARGE] == OPEN
    short = section(text_of(tmp_path), "## Runs too short to decide")
    (cells,) = row(short, "MergedCodist | 4,700 | small")
    assert cells[3] == "no FedAvg run with these settings"
    record(tmp_path, "fed_avg,4700", {"small": 40.0, "large": 30.0}, rounds=300)
    short = section(text_of(tmp_path), "## Runs too short to decide")
    (cells,) = row(short, "MergedCodist | 4,700 | small")
    assert cells[3].startswith("+50.00") and cells[5] == "† 300 of 1,500"
    main = text_of(tmp_path).split("## Runs too short to decide")[0]
    assert "50.00" not in main and "90.00" not in main


def test_short_runs_decide_nothing(tmp_path):
    """Differences of 100 rounds may have the other sign after 1,500."""
    runs = {"fed_avg,4700": 30.0, MERGED: 90.0}
    for run, accuracy in runs.items():
        record(tmp_path, run, {"small": accuracy, "large": accuracy}, rounds=300)
    found = finding(tmp_path, "MergedCodist, in-domain, 4,700, large: above FedAvg")
    assert found.ours.value == pytest.approx(60) and found.word == "not enough rounds"
    assert verdicts(tmp_path)[OF_LARGE] == OPEN


def test_a_difference_within_its_interval_decides_nothing(tmp_path):
    whole_table(tmp_path, lambda run, model, accuracy: 30.0)
    assert verdicts(tmp_path)[OF_LARGE] == UNDECIDED


RATES, LENGTHS, SEEDS = (0.1, 0.2), (300, 1500), (0, 1)
made_up_runs = st.lists(
    st.tuples(
        st.sampled_from(("fed_avg,4700", "fed_avg,6300", MERGED)),
        *(st.sampled_from(values) for values in (RATES, RATES, LENGTHS, SEEDS)),
        st.floats(0, 1),  # alpha, which FedAvg does not read
    ),
    max_size=8,
)


def made_up_record(number, run, small_rate, large_rate, rounds, seed, alpha):
    """Its accuracies tell the settings that they depend on: MergedCodist gains 40 points."""
    fraction = cifar100_table1.FRACTIONS[run.split(",")[1]]
    method = run.split(",")[0]
    rates = {"small": small_rate, "large": large_rate}
    base = 50 if method == "merged_codistillation" else 10
    accuracies = {
        model: base + 10 * rate + rounds / 1500 + 20 * fraction * (model == "large")
        for model, rate in rates.items()
    }
    config = {
        "algorithm": {"name": method, "alpha": alpha if "merged" in method else number},
        "pools": {m: {"client_learning_rate": rate} for m, rate in rates.items()},
        "rounds": rounds,
    }
    config["pools"]["large"]["fraction"] = fraction
    return record_of(config)._replace(
        path=Path(str(number)),
        experiment=TABLE,
        run=run,
        seeds=[seed],
        rounds=rounds,
        full_rounds=1500,
        finished=True,
        date=f"2026-01-{number + 1:02}",
        final={model: {"test": {"accuracy": [v / 100]}} for model, v in accuracies.items()},
        curve={},
        notes=[],
    )


@given(made_up_runs)
def test_gains_are_between_runs_of_equal_settings_of_the_run_that_is_shown(runs):
    read = [made_up_record(number, *run) for number, run in enumerate(runs)]
    for model in MODELS:
        found = find(gain("merged_codistillation", 4700, "in_domain", model), read)
        shown = samples_lib.sample(read, TABLE, MERGED, model)
        place = 2 - MODELS.index(model)
        assert (found.word == "runs missing") == (shown is None)
        if shown is None:
            continue
        rate, length = (runs[int(str(shown.records[0].path))][i] for i in (3 - place, 3))
        pools = ("fed_avg,4700",) if model == "large" else ("fed_avg,4700", "fed_avg,6300")
        alike = [
            run
            for run in runs
            if (run[0], run[3 - place], run[3]) in itertools.product(pools, (rate,), (length,))
        ]
        if alike:
            assert found.ours.value == pytest.approx(40)
            assert found.rounds == length
        else:
            assert found.word == "no FedAvg run with these settings"


def test_without_a_baseline_of_its_settings_a_gain_says_so(tmp_path):
    slow = {"pools": {model: {"client_learning_rate": 0.01} for model in MODELS}}
    record(tmp_path, "fed_avg,4700", {"small": 30.0, "large": 30.0})
    record(tmp_path, MERGED, {"small": 90.0, "large": 90.0}, **slow)
    text = "MergedCodist, in-domain, 4,700, small: above FedAvg"
    assert finding(tmp_path, text).word == "no FedAvg run with these settings"
    record(tmp_path, "fed_avg,4700", {"small": 80.0, "large": 80.0}, file="old", date="", **slow)
    assert finding(tmp_path, text).ours.value == pytest.approx(10)
    # FedAvg's row has the newer one.
    gains = section(text_of(tmp_path), "### Unlabelled images: in-domain")
    assert row(gains, "FedAvg")[0][3] == "30.00 / 30.00 (1 seed)"
    assert f"With other settings than FedAvg's row: `{MERGED}`." in gains


def test_in_domain_and_other_images_are_compared_with_equal_settings(tmp_path):
    text = "MergedCodist, 4,700, large: in-domain above CIFAR-10"
    far = MERGED.replace("in_domain", "cifar10")
    record(tmp_path, MERGED, {"small": 30.0, "large": 30.0})
    record(tmp_path, far, {"small": 30.0, "large": 20.0}, algorithm={"alpha": 0.5})
    assert finding(tmp_path, text).word == "no runs with equal settings"
    record(tmp_path, far, {"small": 30.0, "large": 25.0}, file="other")
    assert finding(tmp_path, text).ours.value == pytest.approx(5)
    # The shorter run of both, as the longer one has no counterpart.
    record(tmp_path, MERGED, {"small": 30.0, "large": 20.0}, rounds=300)
    record(tmp_path, far, {"small": 30.0, "large": 19.0}, rounds=300)
    (tmp_path / TABLE / "other.json").unlink()
    found = finding(tmp_path, text)
    assert (found.rounds, found.ours.value) == (300, pytest.approx(1))


def test_methods_are_compared_with_their_own_settings_on_equal_data(tmp_path):
    text = "large, 4,700: PeriodicCodist above MergedCodist"
    record(tmp_path, PERIODIC, {"small": 30.0, "large": 30.0}, algorithm={"steps": 200})
    record(tmp_path, MERGED, {"small": 30.0, "large": 28.0}, data={"num_unlabelled": 600})
    assert finding(tmp_path, text).word == "no runs with equal settings"
    own = {"algorithm": {"steps": 32, "alpha": 0.5}, "pools": {"large": {"teaching": {"decay": 1}}}}
    record(tmp_path, MERGED, {"small": 30.0, "large": 29.0}, file="own", **own)
    assert finding(tmp_path, text).ours.value == pytest.approx(1)


def test_short_runs_have_the_spread_over_seeds_of_runs_of_full_length(tmp_path):
    whole_table(tmp_path, change=lambda run, model, accuracy: accuracy + len(run) / 10)
    for run, small in ((PERIODIC, 21.0), ("fed_avg,4700", 20.0)):
        record(tmp_path, run, {"small": small, "large": 20.0}, rounds=300)
    assert "## Runs too short to decide" not in text_of(tmp_path)  # all cells have full length
    lacking = "merged_codistillation,6300,cifar10"
    for path in (tmp_path / TABLE).glob(f"{lacking.replace(',', '-')}*"):
        path.unlink()
    record(tmp_path, lacking, {"small": 20.0, "large": 20.0}, rounds=300)
    end = section(text_of(tmp_path), "## Runs too short to decide")
    (gains,) = [cells for cells in row(end, "PeriodicCodist | 4,700 | small") if cells[-3] != ""]
    binomial = math.sqrt((0.21 * 0.79 + 0.2 * 0.8) / 1e4)
    # Every run of the whole table has three seeds that differ by 0.1 points.
    half_width = 1.96 * math.sqrt(1e4 * binomial**2 + 2 * 0.1**2)
    assert gains[3] == f"+1.00 ± {half_width:.2f}"


def test_gains_at_two_sizes_are_compared_with_equal_settings(tmp_path):
    text = "MergedCodist, large: gain at 3,100 above gain at 4,700"
    slow = {"pools": {"small": {"client_learning_rate": 0.01}}}
    for size, value, changes in (("3100", 39.0, {}), ("4700", 35.0, slow)):
        run = MERGED.replace("4700", size)
        record(tmp_path, run, {"small": 30.0, "large": value}, **changes)
        record(tmp_path, f"fed_avg,{size}", {"small": 30.0, "large": 30.0}, **changes)
    assert finding(tmp_path, text).word == "no runs with equal settings"
    record(tmp_path, MERGED, {"small": 30.0, "large": 34.0}, file="equal")
    record(tmp_path, "fed_avg,4700", {"small": 30.0, "large": 31.0}, file="equal_baseline", date="")
    found = finding(tmp_path, text)
    assert found.ours is not None and found.word == HELD
    (tmp_path / TABLE / "fed_avg-3100(0,)1500.json").unlink()
    assert finding(tmp_path, text).word == "no FedAvg run with these settings"


def test_gains_at_two_sizes_are_compared_at_the_longest_common_length(tmp_path):
    for size, rounds, value in (("3100", 1500, 40.0), ("3100", 300, 36.0), ("4700", 300, 34.0)):
        run = MERGED.replace("4700", size)
        record(tmp_path, run, {"small": 30.0, "large": value}, rounds=rounds)
        record(tmp_path, f"fed_avg,{size}", {"small": 30.0, "large": 30.0}, rounds=rounds)
    found = finding(tmp_path, "MergedCodist, large: gain at 3,100 above gain at 4,700")
    assert (found.rounds, found.ours.value) == (300, pytest.approx(2))


# The document


def test_cells_show_both_models_their_spread_and_the_paper(tmp_path):
    record(tmp_path, MERGED, {"small": [33.0, 34.0], "large": [30.0, 30.5]}, seeds=(0, 1))
    record(tmp_path, "fed_avg,4700", {"small": 31.0, "large": 29.0})
    table = section(text_of(tmp_path), "### Unlabelled images: in-domain")
    merged, fed_avg = row(table, "MergedCodist")[0], row(table, "FedAvg")[0]
    assert merged[3:5] == ["33.50 ± 0.71 / 30.25 ± 0.35 (2 seeds)", "33.86 / 33.15"]
    assert fed_avg[3:5] == ["31.00 / 29.00 (1 seed)", "31.84 / 30.57"]
    assert fed_avg[1] == "31.00 / not run (1 seed)"
    assert merged[1] == "not run"
    (gain,) = row(table, "MergedCodist | 4,700 | small")
    # Within the seed that both have.
    share = 1.96 * math.sqrt((33 * 67 + 31 * 69) / 10_000 + 0.5 * 2)
    assert gain[3:] == [f"+2.00 ± {share:.2f}", "one seed", "1,500", "+2.02", "yes"]


def test_differences_are_within_the_common_seeds(tmp_path):
    record(tmp_path, MERGED, {"small": [33.0, 35.0, 50.0], "large": [30.0] * 3}, seeds=(0, 1, 2))
    record(tmp_path, "fed_avg,4700", {"small": [31.0, 32.0], "large": [29.0] * 2}, seeds=(0, 1))
    ours = finding(tmp_path, "MergedCodist, in-domain, 4,700, small: above FedAvg").ours
    half_width = stats.t.ppf(0.975, 1) * np.std([2, 3], ddof=1) / math.sqrt(2)
    assert ours.kind == "paired"
    assert (ours.value, ours.half_width) == pytest.approx((2.5, half_width))


def test_a_run_with_one_seed_has_the_spread_of_those_with_several(tmp_path):
    for run, small in ((MERGED, [33.0, 34.0]), (PERIODIC, [30.0, 34.0])):
        record(tmp_path, run, {"small": small, "large": [30.0, 30.0]}, seeds=(0, 1))
    # Short runs and held-out data have other spreads.
    record(tmp_path, MERGED, {"small": [3.0, 34.0]}, seeds=(0, 1), rounds=300, file="short")
    record(tmp_path, "fed_avg,4700", {"small": 31.0, "large": 29.0})
    text = "MergedCodist, in-domain, 4,700, small: above FedAvg"
    variances = (33 * 67 + 31 * 69) / 10_000 + (0.5 + 8) / 2 * 2
    assert finding(tmp_path, text).ours.half_width == pytest.approx(1.96 * math.sqrt(variances))


def test_the_papers_gain_outside_our_interval_is_said_so(tmp_path):
    whole_table(tmp_path, lambda run, model, accuracy: accuracy + 3 * (run == MERGED))
    table = section(text_of(tmp_path), "### Unlabelled images: in-domain")
    (changed,) = row(table, "MergedCodist | 4,700 | large")
    (same,) = row(table, "MergedCodist | 3,100 | large")
    assert (changed[3][:5], changed[4], changed[6:]) == ("+5.58", "paired", ["+2.58", "no"])
    assert same[6:] == ["+7.22", "yes"]


def test_missing_cells_name_the_command_that_runs_them(tmp_path):
    whole_table(tmp_path, skip=("merged_codistillation,6300,cifar10",))
    text = text_of(tmp_path)
    assert "not run" not in section(text, "### Unlabelled images: in-domain")
    assert (
        "python -m fedcodist.commands.sweep \\\n"
        "    --config experiments/configs/cifar100_table1.py \\\n"
        '    --only "merged_codistillation,6300,cifar10" \\\n'
        "    --workdir runs/cifar100_table1\n"
    ) in section(text, "## Not run")


def test_short_runs_are_marked_with_the_command_for_the_full_length(tmp_path):
    record(tmp_path, MERGED, {"small": 33.0, "large": 30.0}, rounds=300)
    text = text_of(tmp_path)
    assert row(text.split("## Runs too short")[0], "MergedCodist")[:1] == []
    short = section(text, "## Runs too short to decide")
    assert row(short, "MergedCodist")[0][3] == "33.00 † / 30.00 † (1 seed)"
    remark = short[short.index("† 300 of 1,500 rounds. At full length:") :].split("```")[1]
    assert f'--only "{MERGED}"' in remark
    assert "--workdir runs/cifar100_table1_full" in remark


def test_runs_of_full_length_are_not_marked(tmp_path):
    whole_table(tmp_path)
    text = text_of(tmp_path)
    assert "†" not in section(text, "## Table 1: CIFAR-100")
    assert "\n## Runs too short to decide\n" not in text


def test_notes_are_placed_as_they_are_and_runs_own_at_the_end(tmp_path):
    whole_table(tmp_path, notes=["30,000 of them."])
    notes = read_notes(results.HERE / "codistillation" / "notes.md", with_findings=True)
    said = {heading: f"Said of **{heading}**.\n\n- as | it is" for heading in notes}
    text = codistillation(archive.load_records(tmp_path), said).text
    for heading, name in (
        ("## Table 1: CIFAR-100", "Table 1"),
        ("## Figure 4: number of unlabelled images", "Figure 4"),
        ("## What the paper claims", "Claims"),
    ):
        assert f"{said[name]}\n" in section(text, heading)
    assert text.count("Said of **Found: Table 1**.") == 1
    assert "- 30,000 of them. (" in section(text, "## What the runs note")


@pytest.fixture(scope="module")
def project():
    """Our results, and their pages."""
    ours = results.load_results(ROOT / "results")
    return ours, results.render(ours, ROOT / "RESULTS.md")


def test_every_section_of_the_notes_is_on_the_projects_pages(project):
    """So no note is written in vain, and none is lost when a heading changes."""
    ours, document = project
    for name, notes in ours.notes.items():
        path = ROOT / "docs" / "results" / f"{name}.md" if name else ROOT / "RESULTS.md"
        lacking = [heading for heading, body in notes.items() if body not in document.texts[path]]
        assert not lacking, (name, lacking)


def test_what_our_runs_showed_stands_on_no_page_of_other_records(tmp_path):
    other = results.load_results(whole_table(tmp_path))
    for name in results.STUDIES:
        whole = read_notes(results.HERE / name / "notes.md", with_findings=True)
        found = [heading for heading in whole if heading.startswith("Found: ")]
        assert found and not set(found) & set(other.notes[name])


def test_records_of_ones_own_are_shown_alone(tmp_path):
    """No page of a study without a record, no list of what was not run, no verdict on it."""
    config = "digits_methods"
    record(tmp_path, "fed_avg", {"main": 50.0}, experiment=config, seeds=(0, 1))
    index, pages = tmp_path / "RESULTS.md", tmp_path / "docs" / "results"
    rendered = lambda: results.render(results.load_results(tmp_path), index).texts
    texts = rendered()
    assert set(texts) == {index, pages / "other.md", tmp_path / "runs.csv"}
    assert f"## {config}" in texts[pages / "other.md"]
    assert not any(word in texts[index] for word in ("paper", "held", "our runs"))
    assert not any("not run" in text.lower() for text in texts.values())
    # With one run of a paper's table its page is there, and all else is as before.
    record(tmp_path, MERGED, {"small": 40.0, "large": 50.0})
    texts = rendered()
    page = pages / "codistillation.md"
    assert set(texts) == {index, page, pages / "other.md", tmp_path / "runs.csv"}
    assert "## Not run" not in texts[page] and "40.00" in texts[page]
    assert "not run" not in texts[index] and "not enough runs |" not in texts[index]


def test_figure_4_takes_all_images_from_table_1(tmp_path):
    whole_table(tmp_path)
    text = section(text_of(tmp_path), "## Figure 4: number of unlabelled images")
    assert row(text, "600")[0][2] == "33.50 ± 0.10 / 33.00 ± 0.10 (3 seeds)"
    assert row(text, "13,500")[0][2] == "33.86 ± 0.10 / 33.15 ± 0.10 (3 seeds)"
    assert row(text, "0 (FedAvg)")[0][1].startswith("31.84")
    assert not row(text, "2,500")
    assert '--only "merged_codistillation,2500"' in section(text_of(tmp_path), "## Not run")
    assert "13500" not in text and "(unlabelled_images.png)" in text


def test_figure_4_from_tuning_runs_takes_the_best_on_held_out_clients(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_4_tuning, "TAKEN", 2)
    # (held-out, test) of both models; the best test accuracy has the worst held-out one.
    accuracies = {"600,1": (30, 20), "600,2": (10, 90), "600,3": (40, 22), "fed_avg": (15, 12)}
    planned = lambda experiment: list(accuracies)
    monkeypatch.setattr(figure_4_tuning, "planned", planned)
    records, notes = (
        [],
        {figure_4_tuning.HEADING: "How.", f"Found: {figure_4_tuning.HEADING}": "So."},
    )
    for run, (held_out, test) in accuracies.items():
        assert not figure_4_tuning.figure_4_tuning(records, notes, "##"), "a run is missing"
        models = {"small": test, "large": test + 1}
        path = record(tmp_path, run, models, experiment=figure_4_tuning.FIGURE_4_TUNING)
        content = json.loads(path.read_text())
        for splits in content["final"].values():
            splits["held_out"]["accuracy"] = [held_out / 100]
        path.write_text(json.dumps(content))
        records = archive.load_records(tmp_path)
    text = "\n".join(figure_4_tuning.figure_4_tuning(records, notes, "##"))
    assert row(text, "600")[0][1:] == [
        "2 of 3",
        "35.00 ± 7.07",
        "21.00 ± 1.41",
        "22.00 ± 1.41",
    ]
    assert row(text, "0 (FedAvg)")[0][1:] == ["1 of 1", "15.00", "12.00", "13.00"]


def test_figure_4_of_unfinished_runs_is_that_of_the_short_ones(tmp_path):
    few = "periodic_codistillation,600"
    record(tmp_path, few, {"small": 20.0}, experiment=FIGURE_4, rounds=300)
    record(tmp_path, few, {"small": 25.0}, experiment=FIGURE_4, finished=False, date="2026-02")
    text = text_of(tmp_path)
    assert "\n## Figure 4" not in text
    short = section(text, "### Figure 4: number of unlabelled images")
    assert row(short, "600")[0][1].startswith("20.00")


def test_a_table_with_a_run_of_full_length_has_no_short_ones(tmp_path):
    for crop in ("24,per_image", "32,per_image"):
        record(tmp_path, crop, {"large": 20.0}, experiment="cifar100_preprocessing", rounds=300)
    few = "periodic_codistillation,600"
    record(tmp_path, few, {"small": 25.0}, experiment=FIGURE_4, rounds=300)
    heading = "Preprocessing of the images"
    assert len(row(section(text_of(tmp_path), f"### {heading}"), "`24,per_image`")) == 1
    record(tmp_path, "32,per_batch", {"large": 30.0}, experiment="cifar100_preprocessing")
    text = text_of(tmp_path)
    assert row(section(text, f"## {heading}"), "`32,per_batch`")[0][2] == "30.00"
    assert f"### {heading}" not in text and "20.00 †" not in text and "25.00 †" in text


def test_methods_on_other_images_are_compared_with_fed_avg_on_the_same(tmp_path):
    data = {"data": {"crop": 32}}
    record(tmp_path, "fed_avg,4700", {"small": [30.0, 32.0], "large": [20.0, 22.0]}, seeds=(0, 1))
    write = functools.partial(record, tmp_path, experiment="cifar100_preprocessing")
    fed_avg, periodic = (
        {"algorithm": {"name": name}} for name in ("fed_avg", "periodic_codistillation")
    )
    write("32,per_batch", {"large": 25.0}, **data, **fed_avg)
    run = "32,per_batch,periodic_codistillation"
    write(run, {"small": 33.0, "large": 26.5}, **data, **periodic)
    lines = row(section(text_of(tmp_path), "## Preprocessing of the images"), f"`{run}`")
    # The small model has no run of FedAvg on these images.
    (gain_of_large,) = [cells for cells in lines if cells[1] == "large"]
    assert gain_of_large[2] == "FedAvg, with the same images"
    assert gain_of_large[3].startswith("+1.50 ±") and gain_of_large[5] == "+4.51"
    write("32,per_batch,small", {"small": 33.5}, **data, **fed_avg)
    shown = section(text_of(tmp_path), "## Preprocessing of the images")
    (gain_of_small,) = [cells for cells in row(shown, f"`{run}`") if cells[1] == "small"]
    assert gain_of_small[3].startswith("-0.50 ±")
    (of_small,) = [cells for cells in row(shown, "`32,per_batch,small`") if cells[1] == "small"]
    assert of_small[2] == "FedAvg, Table 1's" and of_small[3].startswith("+3.50 ±")


def test_a_seed_that_was_run_twice_counts_once_with_its_newest_run(tmp_path):
    record(tmp_path, "fed_avg,4700", {"small": 30.0, "large": 20.0}, file="a")
    settings = {"date": "2026-02", "seeds": (0, 1), "file": "b"}
    record(tmp_path, "fed_avg,4700", {"small": [31.0, 33.0], "large": [21.0, 23.0]}, **settings)
    record(tmp_path, "fed_avg,4700", {"small": 5.0}, training={"epochs": 2})
    listed = section(text_of(tmp_path), "## Runs with several settings")
    (cells,) = [cells for cells in row(listed, "`fed_avg,4700`") if "0, 1" in cells]
    assert cells[2].startswith("32.00") and cells[3].startswith("22.00")


def test_no_line_of_figure_4_joins_runs_of_different_lengths(tmp_path):
    for count in (600, 2500):
        run = f"periodic_codistillation,{count}"
        record(tmp_path, run, {"small": 20.0}, experiment=FIGURE_4, rounds=300)
    record(tmp_path, PERIODIC, {"small": 30.0}, rounds=1500)
    record(tmp_path, PERIODIC, {"small": 21.0}, rounds=300)
    record(tmp_path, "fed_avg,4700", {"small": 19.0}, rounds=300)
    plots = plots_of(tmp_path)
    assert "unlabelled_images.png" not in plots  # one run of full length is no curve
    (axis,) = plots["unlabelled_images_short.png"]().axes
    lines = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    assert set(lines) == {"PeriodicCodist, 300 rounds", "FedAvg, 300 rounds"}
    (line, *_) = lines["PeriodicCodist, 300 rounds"].lines
    assert line.get_xydata().tolist() == [[600, 20], [2500, 20], [13500, 21]]


def test_figure_4_names_the_runs_of_other_settings_than_its_fed_avg(tmp_path):
    few = "periodic_codistillation,600"
    record(tmp_path, few, {"small": 33.0}, experiment=FIGURE_4)
    heading = "## Figure 4: number of unlabelled images"
    record(tmp_path, "fed_avg,4700", {"small": 30.0})
    assert "other settings" not in section(text_of(tmp_path), heading)
    record(tmp_path, "fed_avg,4700", {"small": 30.0}, date="2026-02", training={"epochs": 2})
    text = section(text_of(tmp_path), heading)
    assert f"With other settings than FedAvg's row: `{few}`." in text


def test_an_ablation_lists_the_default_and_the_runs(tmp_path):
    record(tmp_path, MERGED, {"small": 33.0, "large": 30.0})
    record(tmp_path, "0.9", {"small": 34.0, "large": 31.0}, experiment="cifar100_alpha")
    text = section(text_of(tmp_path), "### α of MergedCodist")
    assert row(text, f"`{MERGED}` (Table 1, equal)")[0][1] == "33.00"
    assert row(text, "`0.9`") == [
        ["`0.9`", "34.00", "34.00", "31.00", "31.00", "1", "1,500"],
    ]
    assert not row(text, "`0.1`")
    missing = section(text_of(tmp_path), "## Not run")
    assert '--only "0.1"' in missing and '--only "0.9"' not in missing


def test_an_ablation_of_other_settings_is_shown_beside_its_equal_in_table_1(tmp_path):
    heading = "### α of MergedCodist"
    experiment = {"experiment": "cifar100_alpha", "algorithm": {"alpha": 0.9}}
    record(tmp_path, MERGED, {"small": 33.0, "large": 30.0}, algorithm={"alpha": 0.5, "steps": 9})
    record(tmp_path, "0.9", {"small": 32.0, "large": 29.0}, **experiment)
    text = section(text_of(tmp_path), heading)
    assert row(text, f"`{MERGED}` (Table 1)")[0][6] == "1,500"
    assert f"No equal run in Table 1: `{MERGED}`." in text
    steps = {"alpha": 0.5, "steps": 7}
    old = {"date": "2025-01-01"}
    record(tmp_path, MERGED, {"small": 31.5, "large": 28.0}, algorithm=steps, file="no", **old)
    record(
        tmp_path,
        MERGED,
        {"small": 31.0, "large": 28.0},
        algorithm={"alpha": 0.5},
        file="yes",
        **old,
    )
    text = section(text_of(tmp_path), heading)
    assert row(text, f"`{MERGED}` (Table 1)")[0][1] == "33.00"
    (equal,) = row(text, f"`{MERGED}` (Table 1, equal)")
    assert (equal[1], equal[6]) == ("31.00", "1,500")
    assert "No equal run" not in text


def test_a_short_ablation_is_compared_with_a_short_run_of_table_1(tmp_path):
    record(tmp_path, MERGED, {"small": 33.0, "large": 30.0})
    record(tmp_path, MERGED, {"small": 31.0, "large": 28.0}, rounds=300, algorithm={"alpha": 0.5})
    experiment = {"experiment": "cifar100_alpha", "rounds": 300, "algorithm": {"alpha": 0.9}}
    record(tmp_path, "0.9", {"small": 32.0, "large": 29.0}, **experiment)
    text = section(text_of(tmp_path), "#### α of MergedCodist")
    (equal,) = row(text, f"`{MERGED}` (Table 1, equal)")
    assert (equal[1], equal[6]) == ("31.00 †", "† 300 of 1,500")
    assert "\n### α of MergedCodist\n" not in text_of(tmp_path)


def test_other_experiments_name_the_command_for_the_full_length(tmp_path):
    """Which gives the settings and seeds that the short run had, not the config file's."""
    run = "client_learning_rate,0.003"
    config = cifar100_large_model.get_config(run)
    config.update(rounds=500, seed=4, seeds=2)
    config.pools.large.server_learning_rate = 0.0625
    config.data.augmentation = "per_batch"
    config = {name: value for name, value in config.to_dict().items() if name != "execution"}
    changes = {name: config[name] for name in ("algorithm", "data", "pools", "training")}
    record(
        tmp_path,
        run,
        {"large": 20.0},
        experiment="cifar100_large_model",
        rounds=500,
        seeds=(4, 5),
        **changes,
    )
    text = section(text_of(tmp_path), "## Runs too short to decide")
    command = text[text.index("† 500 of 1,500 rounds. At full length:") :].split("```")[1]
    arguments = shlex.split(command.replace("\\\n", ""))
    assert arguments[arguments.index("--only") + 1] == run
    assert arguments[arguments.index("--workdir") + 1] == "runs/cifar100_large_model_full"
    overrides = [each.removeprefix("--config.").split("=") for each in arguments if "=" in each]
    again = cifar100_large_model.get_config(run)
    types = {name: type(value) for name, value in flat(again.to_dict()).items()}
    again.update_from_flattened_dict({name: types[name](value) for name, value in overrides})
    assert (again.rounds, again.seed, again.seeds) == (1500, 4, 2)
    (short,) = archive.load_records(tmp_path)
    expected = settings(short) | {"rounds": 1500, "nested_pools": True}
    assert settings(record_of(again.to_dict())).items() >= expected.items()


def test_runs_of_full_length_and_of_no_config_file_need_no_command(tmp_path):
    record(tmp_path, "examples,9400", {"large": 20.0}, experiment="cifar100_large_model")
    record(tmp_path, "x", {"large": 20.0}, experiment="cifar100_investigation", rounds=300)
    texts = texts_of(tmp_path)
    assert not any("At full length" in text for text in texts.values())
    assert "20.00 †" in section(text_of(tmp_path, "other"), "## Runs too short to decide")


def test_other_experiments_get_a_plain_table_with_what_differs(tmp_path):
    other = {"experiment": "cifar100_investigation"}
    record(tmp_path, "x", {"small": 33.0}, **other, file="a", algorithm={"alpha": 0.5})
    record(tmp_path, "x", {"small": 34.0}, **other, file="b", algorithm={"alpha": 0.9})
    text = section(text_of(tmp_path, "other"), "## cifar100_investigation")
    rows = [cells[1:3] for cells in row(text, "`x`")]
    assert sorted(rows) == [["algorithm.alpha=0.5", "33.00"], ["algorithm.alpha=0.9", "34.00"]]


def test_every_record_is_in_the_list_of_runs(tmp_path):
    whole_table(tmp_path)
    paths = list(tmp_path.glob("*/*.json"))
    record(tmp_path, MERGED, {"small": 1.0}, seeds=(7, 8), rounds=9)
    lines = runs_of(tmp_path)
    assert len(lines) == len(paths) + 1
    (line,) = (line for line in lines if line["seeds"] == "7 8")
    assert (line["experiment"], line["run"]) == (TABLE, MERGED)
    assert (line["rounds"], line["full rounds"]) == ("9", "1500")
    assert line["settings that differ"].startswith("rounds=9, ")
    assert line["test accuracy in %, mean over seeds"] == "small 1.00"
    about = [line[name] for name in ("device", "minutes", "date", "commit")]
    assert about == ["cpu", "1.5", "2026-01-01", "c0ffee1"]
    assert line["command"] == f"python -m experiments.main --run '{MERGED}' | tee log"


def study(**changes):
    return {
        "study": "cifar_merged",
        "algorithm": "merged_codistillation",
        "rounds": 300,
        "trials": [{}, {}, {}],
        "states": {"pruned": 1, "complete": 2, "failed": 0},
        "space": {
            "b": {"low": 1e-4, "high": 0.1, "scale": "log"},
            "a": {"low": 1.0, "high": 10.0, "scale": "linear"},
        },
        "best_value": 0.31415926,
        "best_parameters": {"b": 0.012345, "a": 3},
        "command": "python -m fedcodist.tuning.tune",
        "commit": "c0ffee",
        "date": "2026-01-01",
        "workers": [{"compilations": 1}, {"compilations": 2}],
        **changes,
    }


def test_tuning_is_a_table_of_studies(tmp_path):
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "a.json").write_text(json.dumps(study()))
    none = study(study="none", best_value=None, best_parameters=None)
    (tmp_path / "tuning" / "b.json").write_text(json.dumps(none))
    text = text_of(tmp_path, "tuning")
    cells = ["MergedCodist", "3: 2 complete, 1 pruned", "300", "0.3142", "3"]
    assert row(text, "`cifar_merged`") == [
        ["`cifar_merged`", *cells],
        ["`cifar_merged`", "`a`", "1", "10", "linear", "3"],
        ["`cifar_merged`", "`b`", "0.0001", "0.1", "log", "0.0123"],
    ]
    none = row(text, "`none`")
    assert [cells[4] for cells in none] == ["", "linear", "log"]
    assert [cells[5] for cells in none[1:]] == ["", ""]
    assert "`python -m fedcodist.tuning.tune`" in text
    assert "still running" not in text


def test_a_study_with_running_trials_says_so(tmp_path):
    (tmp_path / "tuning").mkdir()
    states = {"complete": 1, "running": 2}
    (tmp_path / "tuning" / "a.json").write_text(json.dumps(study(states=states)))
    text = text_of(tmp_path, "tuning")
    assert "`cifar_merged`: 2 trials were still running when it was recorded." in text


def test_no_records_at_all(tmp_path):
    document = results.render(as_ours(tmp_path), tmp_path / "RESULTS.md")
    assert not document.plots
    assert "not enough runs" in document.texts[tmp_path / "RESULTS.md"]
    assert runs_of(tmp_path) == []
    for page in results.STUDIES:
        assert "\n## Not run\n" in text_of(tmp_path, page)


@pytest.mark.slow
def test_plots_are_small_and_readable(tmp_path):
    folder = whole_table(tmp_path / "results")
    output = tmp_path / "RESULTS.md"
    assert results.main(["--results", str(folder), "--output", str(output)]) == 0
    plots = sorted((tmp_path / "docs" / "results").glob("*.png"))
    assert [path.name for path in plots] == ["curves.png", "gains.png", "unlabelled_images.png"]
    page = (tmp_path / "docs" / "results" / "codistillation.md").read_text()
    for path in plots:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert 5_000 < path.stat().st_size < 60_000
        assert f"]({path.name})" in page
    assert page.count(".png)") == 3


def faces_and_bars(figure):
    """Of our points in the gains plot: face colour, and whether the bar is dashed."""
    found = []
    for axis in figure.axes:
        for points, _, (bars,) in axis.containers:
            is_dashed = bars.get_linestyle()[0][1] is not None
            found.append((points.get_markerfacecolor(), is_dashed))
    return found


def test_the_gains_plot_has_full_runs_and_marks_binomial_intervals(tmp_path):
    for rounds, seeds in ((300, (0,)), (300, (0, 1))):
        for run in ("fed_avg,4700", MERGED):
            record(tmp_path, run, {"small": 30.0}, rounds=rounds, seeds=seeds, file=f"{run}x")
        assert "gains.png" not in plots_of(tmp_path)
    for seeds, is_dashed in (((0,), True), ((0, 1), False)):
        for run in ("fed_avg,4700", MERGED):
            record(tmp_path, run, {"small": 30.0}, seeds=seeds, file=f"{run}x")
        ((face, bar_is_dashed),) = faces_and_bars(plots_of(tmp_path)["gains.png"]())
        assert face == styles.style("merged_codistillation")[0]
        assert bar_is_dashed == is_dashed


def test_a_method_has_one_colour_and_marker_of_its_own():
    assert set(styles.METHOD_STYLES) == set(METHOD_NAMES)
    assert len(set(styles.METHOD_STYLES.values())) == len(METHOD_NAMES)
    several = styles.styles(["fed_avg", "fed_kd", "fed_avg", "mine:method", "fed_avg"])
    assert several[0] == styles.style("fed_avg") and several[1] == styles.style("fed_kd")
    assert several[3] == styles.style("mine:method") == styles.style("mine:method")
    assert len(set(several)) == 5


def test_the_index_is_short_and_its_links_lead_to_headings(project):
    texts = project[1].texts
    index = texts[ROOT / "RESULTS.md"]
    assert len(index.splitlines()) <= 160
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", index)
    assert len(links) > 30
    for target, place in links:
        text = texts[ROOT / target]
        headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
        assert not place or place in map(anchor, headings), (target, place)


def test_the_index_counts_second_verdicts_and_leaves_them_to_the_page():
    first = Verdict("claim", HELD, "Runs", "above 0", "+1.00 ± 0.50")
    second = first._replace(text="claim, longer", word=DID_NOT_HOLD, again="600 rounds")
    page = Page("paper", "Paper", (), [], {}, verdicts=[first, second])
    text = index([page], {"": "About verdicts."}, Path("docs"), Path("runs.csv"))
    assert "[claim](docs/paper.md#runs)" in text and "claim, longer" not in text
    assert "All 1 statements: 1 held" in text
    assert "1 of them again with 600 rounds: 0 held, 1 did not hold" in text
    on_page = "\n".join(first_screen("Paper", {"": ""}, page.verdicts))
    assert "[claim, longer](#runs)" in on_page


@pytest.mark.slow
def test_the_text_depends_on_the_records_alone(tmp_path):
    whole_table(tmp_path / "a")
    record(tmp_path / "a", MERGED, {"small": 1.0, "large": 2.0}, rounds=9, alpha=1, beta=2)
    names = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").glob("*/*")]
    random.Random(0).shuffle(names)
    for name in names:
        (tmp_path / "b" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "b" / name).write_text((tmp_path / "a" / name).read_text())
    code = (
        "import sys; from pathlib import Path; from experiments.studies import document as results;"
        "folder = Path(sys.argv[1]);"
        "ours = results.load_results(folder)._replace(is_ours=True);"
        "texts = results.render(ours, folder / 'RESULTS.md').texts;"
        "sys.stdout.write(''.join(texts.values()))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", code, str(tmp_path / "b")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True)
    whole = lambda folder: "".join(texts_of(folder).values())
    assert done.stdout.decode() == whole(tmp_path / "a") == whole(tmp_path / "b")


# The command


def checked(capsys, folder, output):
    status = results.main(["--results", str(folder), "--output", str(output), "--check"])
    return status, capsys.readouterr().err


def test_check_finds_edits_missing_files_and_new_records(tmp_path, capsys):
    folder, output = whole_table(tmp_path / "results"), tmp_path / "RESULTS.md"
    status, line = checked(capsys, folder, output)
    assert (status, line.count("\n")) == (1, 1) and "does not exist" in line
    results.main(["--results", str(folder), "--output", str(output)])
    assert checked(capsys, folder, output) == (0, "")
    (tmp_path / "docs" / "results" / "gains.png").rename(tmp_path / "gains.png")
    assert "gains.png" in checked(capsys, folder, output)[1]
    (tmp_path / "gains.png").rename(tmp_path / "docs" / "results" / "gains.png")
    page = tmp_path / "docs" / "results" / "codistillation.md"
    for path, old, new in (
        (page, "33.15", "33.16"),
        (folder / "runs.csv", "33.15", "33.16"),
        (output, "held", "hold"),
    ):
        whole = path.read_text()
        path.write_text(whole.replace(old, new, 1))
        status, line = checked(capsys, folder, output)
        assert (status, line.count("\n")) == (1, 1) and "differs" in line and str(path) in line
        assert new in path.read_text()
        path.write_text(whole)
    record(folder, MERGED, {"small": 33.0}, seeds=(9,))
    assert checked(capsys, folder, output)[0] == 1


@pytest.mark.skipif(
    not ((ROOT / "results").exists() or (ROOT / "RESULTS.md").exists()), reason="nothing recorded"
)
def test_the_committed_results_are_what_the_records_give(project, capsys):
    assert results.check(project[1]) == 0, capsys.readouterr().err


def nothing(content):
    content.clear()


MALFORMED = {
    "no keys": nothing,
    "no seeds": lambda c: c.update(seeds=[]),
    "a key less": lambda c: c.pop("full_rounds"),
    "an accuracy in %": lambda c: c["final"]["small"]["test"].update(accuracy=[33.0]),
    "an accuracy too many": lambda c: c["final"]["small"]["test"].update(accuracy=[0.3, 0.3]),
    "no accuracy": lambda c: c["final"]["small"]["test"].update(accuracy=[None]),
    "not a number": lambda c: c["final"]["small"]["test"].update(accuracy=[math.nan]),
    "no metric": lambda c: c["final"]["small"].update(test={}),
    "no splits": lambda c: c["final"].update(small=3),
    "rounds as text": lambda c: c.update(rounds="1500"),
    "rounds as bool": lambda c: c.update(rounds=True),
    "no algorithm": lambda c: c["config"].update(algorithm="fed_avg"),
    "a shorter curve": lambda c: c["curve"]["small"]["held_out"]["round"].pop(),
    "another experiment": lambda c: c.update(experiment="cifar100_alpha"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_record_is_one_line_that_names_it(tmp_path, capsys, name):
    path = record(tmp_path / "results", MERGED, {"small": 30.0})
    content = json.loads(path.read_text())
    MALFORMED[name](content)
    path.write_text(json.dumps(content))
    assert str(path) in refused(capsys, tmp_path)


def test_files_that_are_no_json_objects(tmp_path, capsys):
    for folder in (TABLE, "tuning"):
        path = tmp_path / "results" / folder / "x.json"
        path.parent.mkdir(parents=True)
        for text in ("{", "[]", "\xff"):
            path.write_text(text, encoding="latin-1")
            assert str(path) in refused(capsys, tmp_path)
        path.unlink()


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": "x"},
        {"states": []},
        {"workers": [1]},
        {"space": []},
        {"space": {"a": {"low": 1}}},
    ],
)
def test_a_malformed_study(tmp_path, capsys, change):
    path = tmp_path / "results" / "tuning" / "x.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(study(**change)))
    assert str(path) in refused(capsys, tmp_path)


@pytest.mark.parametrize("name", [f"{TABLE}/x.json", "tuning/x.json"])
def test_what_cannot_be_read_is_named(tmp_path, capsys, name):
    (tmp_path / "results" / name).mkdir(parents=True)
    assert f"cannot read {tmp_path / 'results' / name}" in refused(capsys, tmp_path)


def test_an_output_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    (tmp_path / "R.md").mkdir()
    status, line = checked(capsys, tmp_path / "results", tmp_path / "R.md")
    assert status == 2 and line.startswith(f"error: cannot read {tmp_path / 'R.md'}")


def test_a_note_that_is_no_text(tmp_path):
    path = tmp_path / "notes.md"
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"notes\.md is not text"):
        read_notes(path, with_findings=True)
    with pytest.raises(ValueError, match=r"cannot read .*none\.md"):
        read_notes(tmp_path / "none.md", with_findings=True)


def test_no_such_folder(tmp_path, capsys):
    assert "--results" in refused(capsys, tmp_path)


def test_an_output_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    (tmp_path / "file").write_text("")
    status = results.main(["--results", f"{tmp_path}/results", "--output", f"{tmp_path}/file/R.md"])
    line = capsys.readouterr().err
    assert status == 2 and line.startswith("error: cannot write") and line.count("\n") == 1


def refused(capsys, folder):
    output = folder / "RESULTS.md"
    assert results.main(["--results", str(folder / "results"), "--output", str(output)]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    assert not output.exists()
    return line


def test_the_papers_runs_are_the_configs(tmp_path):
    from experiments.configs import cifar100_table1

    assert set(paper_numbers.TABLE_1) == set(cifar100_table1.get_runs())
    assert run_name("merged_codistillation", 4700, "in_domain") == MERGED


# FedSDD's tables


def fedsdd_record(folder, experiment, run, accuracies, *, seeds=(0, 1, 2), rounds=None, **changes):
    """A record of a run with its real config; `accuracies` in %, model -> one per seed."""
    config = importlib.import_module(f"experiments.configs.{experiment}").get_config(run)
    rounds = rounds or config.rounds
    path = record(folder, run, accuracies, experiment=experiment, seeds=seeds, rounds=rounds)
    content = json.loads(path.read_text())
    written = json.loads(config.to_json_best_effort())
    del written["execution"]
    written |= {"rounds": rounds, "seed": seeds[0], "seeds": len(seeds)}
    content |= {"config": merged(written, changes), "full_rounds": config.full_rounds}
    path.write_text(json.dumps(content))


def row_of(text, start):
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def rendered(folder):
    return text_of(folder, "fed_sdd")


def verdict_of(text, claim):
    """The verdict of the table at the top, the paper's number and ours."""
    (line,) = [line for line in text.splitlines() if f"| [{claim}](" in line]
    word, _, *numbers = [cell.strip() for cell in line.strip("|").split("|")]
    return [word.strip("*"), *numbers]


def test_fedsdd_s_scaled_runs_stand_beside_the_papers(tmp_path):
    fedsdd_record(tmp_path, SCALED, "fed_avg", {"main": [30.0, 34.0, 32.0]})
    fedsdd_record(
        tmp_path, SCALED, "fed_sdd_r1", {"main": [33.0, 36.0, 36.5], "ensemble": [35.0, 39.0, 38.0]}
    )
    text = rendered(tmp_path)
    row = ["FedSDD, R = 1", "35.17 ± 1.89", "80.18 ± 2.38", "37.33 ± 2.08", "81.39"]
    assert row_of(text, "FedSDD, R = 1") == row
    assert row_of(text, "SCAFFOLD")[:3] == ["SCAFFOLD", "not run", "80.08 ± 1.53"]
    low, high = stats.t.interval(0.95, 2, np.mean([3, 2, 4.5]), stats.sem([3, 2, 4.5]))
    above = verdict_of(text, "FedSDD, R = 1, above FedAvg")
    assert above == [HELD, "+1.46", f"+3.17 ± {(high - low) / 2:.2f}"]
    assert verdict_of(text, "FedSDD, R = 4, above FedAvg") == [OPEN, "+3.49", ""]
    missing = section(text, "## Not run")
    assert '--only "scaffold"' in missing and '--only "fed_avg"' not in missing
    assert "fedsdd_table7.py" in missing


def test_fedsdd_s_first_runs_are_too_short_to_decide(tmp_path):
    """They had 12 rounds, as their config said then."""
    for run, accuracy in (("fed_avg", 30.0), ("fed_df", 33.0)):
        fedsdd_record(tmp_path, SCALED, run, {"main": [accuracy] * 3}, rounds=12)
    for path in list((tmp_path / SCALED).glob("*.json")):
        content = json.loads(path.read_text()) | {"full_rounds": 12}
        del content["config"]["data"]["division_per_seed"]
        path.write_text(json.dumps(content))
        path.rename(path.with_stem(f"{path.stem}-first"))
    text = rendered(tmp_path)
    assert verdict_of(text, "FedDF above FedAvg")[::2] == [OPEN, ""]
    short = section(text, "## Runs too short to decide")
    assert "33.00 ± 0.00 †" in short and "--config.data.division_per_seed=False" in short
    # Once there is the full length, only that is shown.
    fedsdd_record(tmp_path, SCALED, "fed_df", {"main": [44.0] * 3})
    short = section(rendered(tmp_path), "## Runs too short to decide")
    assert "`fed_avg`" in short and "`fed_df`" not in short


def test_fedsdd_s_runs_with_other_settings_are_not_compared(tmp_path):
    fedsdd_record(tmp_path, SCALED, "fed_avg", {"main": [30.0, 34.0]}, seeds=(0, 1))
    more = {"training": {"epochs": 3}}
    fedsdd_record(tmp_path, SCALED, "fed_df", {"main": [33.0, 36.0]}, seeds=(0, 1), **more)
    text = rendered(tmp_path)
    assert verdict_of(text, "FedDF above FedAvg")[::2] == [OPEN, "no runs with equal settings"]
    # Only the seeds that both have.
    fedsdd_record(tmp_path, SCALED, "fed_prox", {"main": [33.0, 36.0, 9.0]}, seeds=(1, 2, 3))
    fedsdd_record(tmp_path, SCALED, "scaffold", {"main": [14.0]}, seeds=(1,))
    text = rendered(tmp_path)
    shown = verdict_of(text, "FedProx above FedAvg")
    assert shown == [UNDECIDED, "+0.72", "-1.00 ± 1.31 ‡"]
    # However large a difference of one seed is.
    word, _, ours = verdict_of(text, "SCAFFOLD above FedAvg")
    assert word == UNDECIDED and ours.startswith("-20.00 ±") and ours.endswith("‡")


def test_fedsdd_s_tables_that_were_run_are_shown_with_their_neighbours(tmp_path):
    one = "fed_avg,resnet20,cifar10,0.1"
    fedsdd_record(tmp_path, "fedsdd_table2", one, {"main": [78.0, 79.0, 80.0]})
    fedsdd_record(tmp_path, "fedsdd_table8", "3,0.1", {"main": [80.0, 80.0, 80.0]}, rounds=50)
    fedsdd_record(tmp_path, "fedsdd_table8", "2,0.1", {"main": [80.0, 80.0, 80.0]})
    text = rendered(tmp_path)
    assert "## Table 2: ResNet-20" in text and "## Table 2: ResNet-56" not in text
    assert "## Table 8" in text and "## Table 4" not in text
    assert row_of(text, "3 models")[3:] == ["not run", "79.63"]
    assert "80.00 ± 0.00 †" in section(text, "## Runs too short to decide")
    assert row_of(text, "2 models | α 0.1")[2:] == ["+1.00 ± 2.48", "paired", "+0.66"]
    assert not re.search(r"^\| 3 models \| α 0.1", text, re.MULTILINE)  # other rounds
    assert "--config.rounds=50" not in text and "† 50 of 100 rounds. At full length" in text


def test_fedsdd_s_cells_are_runs_of_the_configs_and_have_the_papers_numbers():
    shown = {term for each in tables() for row in each.rows for term in row.cells}
    assert shown == set(REPORTED)
    assert set(STANDS_FOR.values()) <= shown
    for term in (*shown, *STANDS_FOR):
        module = importlib.import_module(f"experiments.configs.{term.experiment}")
        assert term.run in module.get_runs()
    for each in tables():
        assert all(len(row.cells) == len(each.columns) for row in each.rows)
        # Every run of a table's own is shown in it.
    runs = {(t.experiment, t.run) for t in shown}
    for name in {each.experiment for each in tables()}:
        module = importlib.import_module(f"experiments.configs.{name}")
        assert {(name, run) for run in module.get_runs()} <= runs
    for ordering in ORDERINGS:
        assert REPORTED[STANDS_FOR[ordering.plus]].mean > (
            REPORTED[STANDS_FOR[ordering.minus]].mean
        )


def test_every_experiment_has_a_place():
    """What has a config and no run is named, too."""
    pages = (ROOT / "docs" / "results").glob("*.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    configs = [path.stem for path in (ROOT / "experiments" / "configs").glob("*.py")]
    assert len(configs) > 20
    missing = [name for name in configs if name not in text]
    assert not missing
