"""FedMD in RESULTS.md: tables of parties, remarks within seeds, plots; and records of phases."""

import json

import numpy as np
import pytest

from experiments.configs import cifar_fed_md_small
from experiments.studies import record
from experiments.studies.archive import load_records
from experiments.studies.document import HERE
from experiments.studies.fed_md import page as section
from experiments.studies.pages import read_notes
from fedcodist.config import phases
from fedcodist.report import tables_parties
from tests.experiments.studies.test_results import record as write_record

NOTES = read_notes(HERE / "fed_md" / "notes.md", with_findings=False)


def write(folder, run, courses, bounds=None, seeds=(0, 1), images=(), **changes):
    """A record of a run; `courses`: party -> accuracies in % by round, the same for every seed but for
    0.4 points more with each."""
    final = {party: course[-1] for party, course in courses.items()}
    changes = dict(experiment=section.SMALL) | changes
    path = write_record(folder, run, final, seeds=seeds, **changes)
    content = json.loads(path.read_text())
    share = lambda value: [(value + 0.4 * place) / 100 for place in range(len(seeds))]
    content["curve"] = {
        party: {"test": {"round": list(range(len(c))), "accuracy": [share(v) for v in c]}}
        for party, c in courses.items()
    }
    content["full_rounds"] = content["rounds"]
    content["data"] = dict(images)
    if bounds:
        pooled = {party: {"test": {"accuracy": share(v)}} for party, v in bounds.items()}
        content["phases"] = {"centralised": pooled}
    path.write_text(json.dumps(content))


def render(folder):
    page = section.fed_md(load_records(folder), NOTES)
    return page.text, page.plots


def test_parties_before_and_after_and_their_bounds(tmp_path):
    courses = {"conv_16_32": [20.0, 45.0, 40.0], "conv_8_8_8": [30.0, 40.0, 50.0]}
    write(tmp_path, "non_iid", courses, {"conv_16_32": 55.0, "conv_8_8_8": 49.0})
    text, plots = render(tmp_path)
    # The means of the seeds: 0.2 points more.
    assert "| `conv_16_32` | 20.2 | 40.2 | 55.2 | +20.0 | 15.0 |" in text
    assert "| `conv_8_8_8` | 30.2 | 50.2 | 49.2 | +20.0 | -1.0 |" in text
    assert "| mean | 25.2 | 45.2 | 52.2 | +20.0 | 7.0 |" in text
    assert "Gain +20.00 ± 0.00, below the bound +7.00 ± 0.00 points." in text
    assert "Means of the parties by round, from 0: 25.2, 42.7, 45.2.\n" in text
    (figure,) = (draw() for draw in plots.values())
    (axis,) = figure.axes
    lines = {line.get_label(): line for line in axis.get_lines()}
    assert lines["conv_16_32"].get_ydata().tolist() == pytest.approx([20.2, 45.2, 40.2])
    np.testing.assert_allclose(lines["no collaboration"].get_ydata(), 25.2)
    np.testing.assert_allclose(lines["all examples in one place"].get_ydata(), 52.2)


def test_the_gain_is_compared_with_the_same_rounds_alone(tmp_path):
    write(tmp_path, "iid", {"a": [20.0, 40.0], "b": [30.0, 50.0]}, {"a": 60.0, "b": 60.0})
    write(tmp_path, "iid,alone", {"a": [20.0, 35.0], "b": [30.0, 31.0]})
    text, _ = render(tmp_path)
    assert "| Party | Before | Alone | After | Bound | Gain | to alone | below bound |" in text
    assert "| `a` | 20.2 | 35.2 | 40.2 | 60.2 | +20.0 | +5.0 | 20.0 |" in text
    assert "Gain +20.00 ± 0.00, to parties alone +12.00 ± 0.00, below the bound +15.00" in text


def test_variants_are_compared_party_by_party(tmp_path):
    run = "iid,table_2,half"
    bounds = {"a": 60.0, "b": 60.0}
    courses = {"a": [20.0, 40.0], "b": [30.0, 50.0]}
    write(tmp_path, run, courses, bounds, experiment="cifar_fed_md")
    courses = {"a": [20.0, 43.0], "b": [30.0, 52.0]}
    for ending in ("digest_4", "alone"):
        write(tmp_path, f"{run},{ending}", courses, experiment="cifar_fed_md")
    text, plots = render(tmp_path)
    # Student's t of two parties: 12.706 * 0.5.
    assert f"| `{run},digest_4` | 45.2 | 47.7 | +2.50 ± 6.35 | +2.0 | +3.0 |" in text
    assert f"| `{run},low_weights` |  | not run |" in text
    assert len(plots) == 1 and "alone` |" not in text


def test_how_much_narrower_networks_are_is_told(tmp_path):
    courses, bounds = {"a": [20.0, 40.0]}, {"a": 60.0}
    parties = dict(networks="table_1", narrower=4)
    write(tmp_path, "iid,scaled", courses, bounds, experiment="cifar_fed_md", parties=parties)
    write(tmp_path, "iid", courses, bounds, experiment="cifar_fed_md")
    for run, factor in (("iid,table_2", 1), ("non_iid,table_2,half", 2)):
        parties = dict(networks="table_2", narrower=factor)
        write(tmp_path, run, courses, bounds, experiment="cifar_fed_md", parties=parties)
    text, _ = render(tmp_path)
    title = (
        "**`iid,scaled`**, 1500 rounds, 2 seeds, networks narrower than table 1's by a factor of 4"
    )
    assert title in text
    assert "**`iid`**, 1500 rounds, 2 seeds\n" in text
    assert "**`iid,table_2`**, 1500 rounds, 2 seeds, table 2's networks\n" in text
    assert "2 seeds, networks narrower than table 2's by a factor of 2\n" in text
    assert text.count("The paper's bound, of its table 2's networks, is 82.6 %.") == 3
    assert text.count("The paper's bound, of its table 2's networks, is 56.5 %.") == 1


def test_what_parties_knew_of_public_images_is_told(tmp_path):
    write(tmp_path, "iid", {"a": [20.0, 40.0], "b": [10.0, 20.0]}, {"a": 60.0, "b": 60.0})
    (path,) = tmp_path.glob("*/*.json")
    content = json.loads(path.read_text())
    tests = {"a": [0.5, 0.6], "b": [0.7, 0.9]}
    content["phases"]["public"] = {
        party: {"public_test": {"accuracy": shares}} for party, shares in tests.items()
    }
    path.write_text(json.dumps(content))
    assert (
        "by round, from 0: 15.2, 30.2. Of public test images they knew 67.5 %."
        in render(tmp_path)[0]
    )


def test_a_dip_is_what_comes_back():
    course = lambda *values: {round: [float(value)] for round, value in enumerate(values)}
    assert section._dips([course(10, 30, 20, 40)]) == [10.0]
    assert section._dips([course(10, 30, 20, 25)]) == [5.0]  # the rest is lost
    assert section._dips([course(30, 20, 10)]) == [0.0]
    assert section._dips([course(10, 30, 20, 40), course(10, 20, 30, 40)]) == [5.0]


def test_images_that_there_were_are_told(tmp_path):
    about = {"source": "CIFAR-10", "unverified": True, "num_examples": {"train": 30_000}}
    data = {"public_folder": "data/cifar10", "folder": "data/cifar100"}
    images = {"data/cifar10": about}
    write(tmp_path, "non_iid", {"a": [10.0, 20.0]}, images=images, data=data)
    assert (
        "- Public images are of the 30,000 of `train` in data/cifar10 (CIFAR-10, not verified as its "
        "official files)." in render(tmp_path)[0]
    )


def test_remarks_are_differences_within_seeds(tmp_path):
    write(tmp_path, "non_iid", {"a": [10.0, 30.0, 20.0, 28.0], "b": [10.0, 20.0, 40.0, 42.0]})
    # Weak parties stand in b's place: what is compared is a's.
    weak = {"dense_4": [5.0, 5.0, 5.0, 5.0]}
    write(tmp_path, "weak,equal_weights", {"a": [10.0, 12.0, 18.0, 30.0], **weak})
    write(tmp_path, "weak,low_weights", {"a": [10.0, 12.0, 24.0, 39.0], **weak})
    write(tmp_path, "revisit_epochs,2", {"a": [10.0, 24.0, 22.0, 26.0], "b": [10.0, 1.0, 2.0, 3.0]})
    text, _ = render(tmp_path)
    rows = {
        line.split(" | ")[0]: line.split(" | ")[1] for line in text.splitlines() if " | " in line
    }
    others = "| Other parties: with four weak parties of"
    assert rows[f"{others} equal weight in place of strong ones"] == "-6.00 ± 0.00"
    assert rows[f"{others} low weight in place of strong ones"] == "-1.00 ± 0.00"
    assert rows[f"{others} low weight in place of equal weight"] == "+5.00 ± 0.00"
    # a dips by 8 in place of 2, b by nothing in place of 2 + 1: means of parties.
    assert rows["| Dips: 2 epochs of the revisit in place of 10"] == "-1.50 ± 0.00"
    assert rows["| Accuracy: 2 epochs of the revisit in place of 10"] == "-17.00 ± 0.00"
    assert rows["| Dips: digest in one batch in place of four"] == "not run"


def test_it_says_how_the_phases_of_each_run_were_stopped(tmp_path):
    modes = {"non_iid": "fixed", "iid": "test_data", "revisit_epochs,2": "held_out"}
    for run, mode in modes.items():
        write(tmp_path, run, {"a": [10.0, 20.0]}, phases={"stopping": mode})
    write(tmp_path, "public_images,50", {"a": [10.0, 20.0]}, phases={"stopping": "fixed"})
    write(tmp_path, "public_images,all", {"a": [10.0, 20.0]})
    text, _ = render(tmp_path)
    says = lambda mode, runs: f"- {tables_parties.STOPPING[mode]} ({runs})" in text.splitlines()
    assert says("fixed", "`non_iid`, `public_images,50`")
    assert says("test_data", "`iid`")
    assert says("held_out", "`revisit_epochs,2`")
    assert says(None, "`public_images,all`")
    assert "**test data**" in tables_parties.STOPPING["test_data"]
    assert set(tables_parties.STOPPING) == {*phases.STOPPING, None}


def test_what_is_not_run_has_its_command_and_its_note(tmp_path):
    text, plots = render(tmp_path)
    assert not plots
    assert NOTES["Not run"] in text
    for experiment in section.TITLES:
        assert f"--config experiments/configs/{experiment}.py" in text


def test_every_remark_is_of_runs_of_the_config():
    runs = set(cifar_fed_md_small.get_runs())
    assert {run for _, run, other, *_ in section.REMARKS for run in (run, other)} == runs - {
        *("iid", "iid,alone", "non_iid,alone")
    }


def test_a_record_holds_the_phases(tmp_path):
    folder = tmp_path / "run"
    for phase, accuracy in (("public", 0.9), ("centralised", 0.123456)):
        (folder / "phases" / phase).mkdir(parents=True)
        final = {"a": {"test": {"accuracy": [accuracy], "loss": [1.0]}}}
        (folder / "phases" / phase / "summary.json").write_text(json.dumps({"final": final}))
    assert record._phases(folder)["centralised"] == {
        "a": {"test": {"accuracy": [0.12346], "loss": [1.0]}}
    }
    assert list(record._phases(folder)) == ["centralised", "public"]
    assert record._phases(tmp_path) == {}


def test_the_plot_of_a_run_folder(tmp_path, capsys):
    """The command's, from the run folder alone."""
    accuracies = {"a": (0.2, 0.4), "b": (0.4, 0.8)}
    for place, column in (("phases/private", 0), (".", 1), ("phases/centralised", 1)):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        final = {p: {"test": {"accuracy": [v[column]] * 2}} for p, v in accuracies.items()}
        (tmp_path / place / "summary.json").write_text(json.dumps({"final": final}))
    # DS-FL's server is no party: it has no phase before.
    others = {"server": {"test": {"accuracy": [0.9, 0.9]}}}
    found = json.loads((tmp_path / "summary.json").read_text())["final"]
    (tmp_path / "summary.json").write_text(json.dumps({"final": found | others}))
    (tmp_path / "config.json").write_text(json.dumps({"phases": {"stopping": "test_data"}}))
    lines = [
        {"round": round, "model": party, "split": "test", "seed": seed, "accuracy": values[round]}
        for party, values in accuracies.items()
        for round in (0, 1)
        for seed in (0, 1)
    ]
    lines.append({"round": 1, "model": "a", "split": "clients", "seed": 0, "loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tables_parties.main([str(tmp_path), "--plot", str(tmp_path / "figure.png")]) == 0
    output = capsys.readouterr().out
    assert "mean" in output and "stop on test data" in output and "server" not in output
    assert (tmp_path / "figure.png").stat().st_size > 1000
    (axis,) = tables_parties.plot(tmp_path).axes
    lines = {line.get_label(): np.asarray(line.get_ydata()) for line in axis.get_lines()}
    np.testing.assert_allclose(lines["b"], [40, 80])
    np.testing.assert_allclose(lines["no collaboration"], 30)
    np.testing.assert_allclose(lines["all examples in one place"], 60)
    assert tables_parties.main([str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
