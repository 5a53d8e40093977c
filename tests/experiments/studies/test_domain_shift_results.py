"""The domain shift in RESULTS.md: the table by domain, gains and changes within seeds, the plot."""

import json

import pytest

from experiments.configs import text_domain_shift
from experiments.studies.archive import load_records
from experiments.studies.document import HERE
from experiments.studies.domain_shift import page as section
from experiments.studies.pages import read_notes
from fedcodist.config.registry import METHODS
from tests.experiments.studies.test_results import record as write_record

NOTES = read_notes(HERE / "domain_shift" / "notes.md", with_findings=False)
PROSE, CODE = text_domain_shift.TEXTS["python_source"]


def write(folder, run, finals, course=None, seeds=(0, 1), **training):
    """A record of a run; `finals`: model -> split -> accuracies in % by seed; `course`: round ->
    accuracy in % of both models on held-out prose, a point more with each seed."""
    config = text_domain_shift.get_config(run)
    path = write_record(folder, run, {"small": 0.0}, experiment=section.EXPERIMENT, seeds=seeds)
    content = json.loads(path.read_text())
    config.training.update(training)
    content["config"] = {**config.to_dict(), "seed": seeds[0], "seeds": len(seeds)}
    content["rounds"] = content["full_rounds"] = content["last_round"] = config.rounds
    content["final"] = {
        model: {
            split: {"accuracy": [v / 100 for v in values], "loss": [2.0, 4.0]}
            for split, values in own.items()
        }
        for model, own in finals.items()
    }
    course = course or {0: 0.0}
    points = {
        "round": list(course),
        "accuracy": [[(v + s) / 100 for s, _ in enumerate(seeds)] for v in course.values()],
    }
    content["curve"] = {model: {f"held_out_{PROSE}": points} for model in finals}
    path.write_text(json.dumps(content))


def finals(small, large):
    """Accuracies of both models on prose, code and the mixed set; on held-out prose as on prose."""
    splits = (f"test_{PROSE}", f"test_{CODE}", "test", f"held_out_{PROSE}")
    return {
        model: dict(zip(splits, [*own, own[0]], strict=True))
        for model, own in (("small", small), ("large", large))
    }


def render(folder):
    page = section.domain_shift(load_records(folder), NOTES)
    return page.text, page.plots


def test_a_row_per_method_and_model_and_gains_within_seeds(tmp_path):
    own, other, mixed = [20.0, 22.0], [10.0, 14.0], [15.0, 18.0]
    write(tmp_path, "fed_avg,python_source", finals([own, other, mixed], [other, own, mixed]))
    better = [[a + 5.0 for a in values] for values in (own, other, mixed)]
    better[1][1] += 1.0
    run = "merged_codistillation,python_source"
    write(tmp_path, run, finals(better, [other, own, mixed]))
    text, _ = render(tmp_path)
    assert "| Method | Model | Prose | Code | Mixed |" in text
    # exp(3) is 20.
    row = "| FedAvg | small | 21.00 ± 1.41 / 20 | 12.00 ± 2.83 / 20 | 16.50 ± 2.12 / 20 |"
    assert row in text
    # Half of 12.71, Student's for one degree of freedom, times the difference of the seeds.
    assert "| MergedCodist | small | +5.00 ± 0.00 | +5.50 ± 6.35 | +5.00 ± 0.00 |" in text
    assert "| MergedCodist | large | +0.00 ± 0.00 | +0.00 ± 0.00 | +0.00 ± 0.00 |" in text
    assert "| PeriodicCodist | small | not run | not run | not run |" in text
    assert (
        'sweep \\\n    --config experiments/configs/text_domain_shift.py \\\n    --only "periodic'
        in text
    )
    assert "| MergedCodist | 25.50 / 25.29 | 27.65 / 30.75 | 26.45 / 27.70 |" in text


def test_gains_are_over_fed_avg_of_the_same_settings(tmp_path):
    same = [[10.0, 10.0]] * 3
    write(tmp_path, "fed_avg,python_source", finals(same, same), batch_size=7)
    write(tmp_path, "merged_codistillation,python_source", finals(same, same))
    text, _ = render(tmp_path)
    assert "| MergedCodist | small | 10.00 ± 0.00 / 20 |" in text
    assert "+0.00" not in text


def test_what_codistillations_change_and_the_curves(tmp_path):
    period = text_domain_shift.get_config().algorithm.period
    course = {0: 1.0, period - 1: 10.0, period: 16.0, period + 4: 12.0, 200: 20.0}
    same = [[10.0, 10.0]] * 3
    for method in METHODS:
        own = course if method == "periodic_codistillation" else dict.fromkeys(course, 10.0)
        write(tmp_path, f"{method},python_source", finals(same, same), own)
    text, plots = render(tmp_path)
    assert "| PeriodicCodist | small | +6.00 ± 0.00 / +2.00 ± 0.00 | - |" in text
    assert "| FedAvg | large | +0.00 ± 0.00 / +0.00 ± 0.00 | - |" in text
    ((name, draw),) = plots.items()
    assert name == "text_domain_shift_python_source.png"
    axes = draw().axes
    titles = ["small model, prose", "large model, prose (never trained on)"]
    assert [axis.get_title() for axis in axes] == titles
    (_, line, _) = axes[0].get_lines()
    assert line.get_xdata().tolist() == list(course)
    assert line.get_ydata().tolist() == pytest.approx([v + 0.5 for v in course.values()])


def test_longer_runs_have_a_table_and_a_plot_of_their_own(tmp_path):
    same = [[10.0, 10.0]] * 3
    for run, accuracies in (("fed_avg", [[30.0, 30.0]] * 3), ("merged_codistillation", same)):
        write(tmp_path, f"{run},stackexchange,600", finals(accuracies, accuracies))
    text, plots = render(tmp_path)
    ((_, longer),) = (part.split("\n", 1) for part in text.split("\n## Stack Exchange")[1:])
    # Accuracies of prose and code are none of Stack Exchange's domains; the mixed set's is.
    assert "| FedAvg | small | not run | not run | 30.00 ± 0.00 / 20 |" in longer
    assert "| MergedCodist | small | not run | not run | -20.00 ± 0.00 |" in longer
    assert "PeriodicCodist" not in longer.split("## The paper's")[0]
    assert not plots
    assert text_domain_shift.get_config("fed_avg,stackexchange,600").rounds == 600


def test_without_runs_there_is_the_command(tmp_path):
    text, plots = render(tmp_path)
    assert "## Not run" in text and "--config experiments/configs/text_domain_shift.py" in text
    assert not plots
