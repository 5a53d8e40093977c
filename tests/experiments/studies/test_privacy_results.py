"""The page of private methods: gains at each budget, and whether they are larger with noise."""

import statistics
from pathlib import Path

import pytest

from experiments.studies.archive import load_records
from experiments.studies.document import HERE
from experiments.studies.pages import read_notes
from experiments.studies.privacy.page import privacy
from experiments.studies.settings import settings
from fedcodist.report.spread import mean_difference

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def records():
    found = load_records(ROOT / "results")
    return [record for record in found if record.experiment == "digits_private"]


def page(records):
    return privacy(records, read_notes(HERE / "privacy" / "notes.md", False)).text


def newest(records, run):
    """The newest record of a run with three seeds."""
    of_run = [record for record in records if record.run == run and len(record.seeds) == 3]
    return max(of_run, key=lambda record: record.date)


def accuracies(record):
    shares = record.final["large"]["test"]["accuracy"]
    return [100 * share for _, share in sorted(zip(record.seeds, shares, strict=True))]


def test_the_answer_is_the_gain_with_noise_less_the_gain_without(records):
    method, baseline = ("periodic_codistillation", "fed_avg")
    values = {
        (name, epsilon): accuracies(newest(records, f"{name},{epsilon}"))
        for name in (method, baseline)
        for epsilon in ("inf", "8", "2")
    }
    cells = []
    for epsilon in ("8", "2"):
        noisy, plain = (
            [a - b for a, b in zip(values[method, e], values[baseline, e], strict=True)]
            for e in (epsilon, "inf")
        )
        cells.append(mean_difference([a - b for a, b in zip(noisy, plain, strict=True)]))
        mean = statistics.fmean(noisy) - statistics.fmean(plain)
        assert float(cells[-1].split()[0]) == pytest.approx(mean, abs=0.005)
    text = page(records)
    answers = text.split("less that without noise**")[1].split("\n\n")[1]
    assert f"| PeriodicCodist | large | {' | '.join(cells)} |" in answers.splitlines()
    assert "FedAvg" not in answers  # the baseline gains nothing


def test_no_gain_between_runs_of_other_settings(records):
    run, baseline = (
        newest(records, f"{name},8") for name in ("periodic_codistillation", "fed_avg")
    )
    assert "no runs with equal settings" not in page([run, baseline])
    training = {**baseline.config["training"], "batch_size": 7}
    other = baseline._replace(config={**baseline.config, "training": training})
    assert settings(other) != settings(baseline)
    digits = page([run, other]).split("## CIFAR-100")[0]
    (line,) = [x for x in digits.splitlines() if x.startswith("| PeriodicCodist | large")]
    assert "no runs with equal settings" in line
