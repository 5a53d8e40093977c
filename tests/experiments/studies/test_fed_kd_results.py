"""FedKD in RESULTS.md: quality and bytes, losses left out, thresholds, ranks, costs; records."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import ade_fed_kd, cifar_fed_kd
from experiments.studies import record
from experiments.studies.archive import load_records
from experiments.studies.document import HERE
from experiments.studies.fed_kd import page as section
from experiments.studies.fed_kd import panels, tables
from experiments.studies.pages import read_notes
from experiments.studies.settings import settings
from fedcodist.core.communication import tree_bytes
from fedcodist.text.bert import bert_base
from tests.experiments.studies.test_record import write_run
from tests.experiments.studies.test_results import record as write_record
from tests.experiments.studies.test_results import row

NOTES = read_notes(HERE / "fed_kd" / "notes.md", with_findings=False)
CIFAR, ADE = panels.CIFAR, panels.ADE
CONFIGS = {CIFAR: cifar_fed_kd, ADE: ade_fed_kd}


def write(folder, run, main, teachers=None, sent=(0, 0), experiment=CIFAR, f_score=None, **more):
    """A record of two seeds with the run's own config; the second seed is 0.4 points better."""
    config = CONFIGS[experiment].get_config(run)
    qualities = {"main": main} | ({} if teachers is None else {"main_teachers": teachers})
    seeds, rounds = (0, 1), config.rounds
    path = write_record(
        folder, run, qualities, experiment=experiment, seeds=seeds, rounds=rounds, file=run
    )
    content = json.loads(path.read_text())
    content["config"] = json.loads(json.dumps(config.to_dict()))
    content["full_rounds"] = config.full_rounds
    for model, quality in qualities.items():
        accuracies = [(quality + 0.4 * place) / 100 for place in range(len(seeds))]
        content["final"][model]["test"]["accuracy"] = accuracies
        if f_score is not None:
            content["final"][model]["test"]["f_score"] = [f_score / 100, None]
    content["bytes"] = {"main": {"up": sent[0], "down": sent[1]}}
    path.write_text(json.dumps(content | more))


def render(folder):
    page = section.fed_kd(load_records(folder), NOTES)
    return page.text, page.plots


def test_methods_stand_beside_fed_avg_with_their_bytes(tmp_path):
    write(tmp_path, "fed_avg,teacher", 70.0, sent=(600_000, 400_000))
    write(tmp_path, "fed_avg,student", 60.0, sent=(150_000, 100_000))
    write(tmp_path, "fed_kd", 62.0, 69.0, sent=(60_000, 40_000))
    write(tmp_path, "fed_kd,no_mutual", 59.0, 55.0, sent=(60_000, 40_000))
    write(tmp_path, "fetch_sgd", 40.0, sent=(7_500, 5_000))  # in twenty times as many rounds
    text, plots = render(tmp_path)
    # The means of two seeds: 0.2 more. MB of 10 rounds; all runs have the seeds' difference.
    (local,) = row(text, "Local")
    assert local[1:] == ["55.20 ± 0.28", "", "0.00", "0.0 %", "-15.00 ± 0.00", "0, 1"]
    (fed_kd,) = row(text, "FedKD")
    assert fed_kd[1:] == ["69.20 ± 0.28", "62.20 ± 0.28", "1.00", "10.0 %", "-1.00 ± 0.00", "0, 1"]
    (whole,) = row(text, "FedAvg, teacher's network")
    assert whole[3:5] == ["10.00", "100.0 %"]
    assert row(text, "FetchSGD")[0][3:] == ["2.50", "25.0 %", "-30.00 ± 0.00", "0, 1"]
    assert row(text, "FML")[0][1:] == ["not run", "", "–", "–", "", ""]
    (axis,) = plots["fed_kd.png"]().axes
    points = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    (place,) = points["FedKD"].lines[0].get_xydata()
    np.testing.assert_allclose(place, [1.0, 69.2])
    np.testing.assert_allclose(points["Local"].get_ydata(), 55.2)
    assert "Federated Dropout" not in points
    assert '--only "fed_dropout"' in text and '--only "fetch_sgd"' not in text


def test_every_run_shown_is_one_of_the_config(tmp_path):
    """And compared with others it differs from in what methods may differ in alone."""
    runs = [m.run for m in panels.METHODS] + list(panels.PARTS) + [panels.WHOLE.run]
    runs += [run for sweep in tables.SWEEPS.values() for run in sweep]
    of_text = [run for pair in tables.STUDENTS.values() for run in pair if "text" in run]
    runs += [run for pair in tables.STUDENTS.values() for run in pair if "text" not in run]
    assert set(of_text) <= set(ade_fed_kd.get_runs())
    assert set(runs) <= set(cifar_fed_kd.get_runs())
    for run in set(runs):
        write(tmp_path, run, 60.0, 65.0, sent=(1, 1))
    text, _ = render(tmp_path)
    assert "no runs with equal settings" not in text
    shown = {panel.run(run) for panel in panels.PANELS[:3] for run in runs}
    assert set(cifar_fed_kd.get_runs()) <= shown


def test_runs_on_other_clients_are_not_compared(tmp_path):
    write(tmp_path, "fed_avg,teacher", 70.0, sent=(1, 1))
    other = json.loads(json.dumps(cifar_fed_kd.get_config("fed_kd").to_dict()))
    other["data"]["partition"]["num_clients"] = 5
    write(tmp_path, "fed_kd", 62.0, 69.0, sent=(1, 1), config=other)
    assert row(render(tmp_path)[0], "FedKD")[0][5] == "no runs with equal settings"


def test_runs_with_another_gradient_or_with_other_passes_are_not_compared(tmp_path):
    write(tmp_path, "fed_avg,teacher", 70.0, sent=(1, 1))
    older = json.loads(json.dumps(cifar_fed_kd.get_config("fed_kd").to_dict()))
    older["training"]["fed_kd"]["detach_normaliser"] = False
    write(tmp_path, "fed_kd", 62.0, 69.0, sent=(1, 1), config=older)
    for part in ("no_output", "no_mutual", "not_adaptive", "through_normaliser"):
        write(tmp_path, f"fed_kd,{part}", 60.0, 66.0, sent=(1, 1))
    write(tmp_path, "fed_avg,teacher_16", 70.0)
    shorter = json.loads(json.dumps(cifar_fed_kd.get_config("fed_kd_16").to_dict()))
    shorter["rounds"] = shorter["full_rounds"] = 10
    more = dict(config=shorter, rounds=10, last_round=10, full_rounds=10)
    write(tmp_path, "fed_kd_16", 60.0, 66.0, **more)
    text, _ = render(tmp_path)
    other = "no runs with equal settings"
    assert row(text, "without predictions")[0][4] == other
    for part in (
        "the two task losses alone",
        "without adaptive weights",
        "with a gradient through the divisor",
    ):
        assert row(text, part)[0][4] == "-3.00 ± 0.00", part
    of_four, of_sixteen = row(text, "FedKD")
    assert of_four[5] == "-1.00 ± 0.00" and of_sixteen[5] == other


def test_more_clients_are_judged_for_the_teachers_and_for_fed_avg_of_the_student(tmp_path):
    for run, student, teachers in (
        ("fed_kd", 60.0, 65.0),
        ("fed_kd_16", 62.0, 61.0),
        ("fed_avg,student", 55.0, None),
        ("fed_avg,student_16", 57.0, None),
    ):
        write(tmp_path, run, student, teachers)
    text, _ = render(tmp_path)
    for statement, expected, word in (
        ("teachers are as good", "about 0 | -4.00 ± 0.00", "did not hold"),
        ("FedAvg of the student's network is worse", "below 0 | +2.00 ± 0.00", "did not hold"),
    ):
        (line,) = [x for x in text.splitlines() if f"{statement} with 16 clients" in x]
        assert line.startswith(f"| **{word}** |") and line.endswith(f"| {expected} |")


def test_a_centralised_run_has_one_client(tmp_path):
    write(tmp_path, "fed_avg,teacher", 70.0, sent=(1, 1))
    write(tmp_path, "centralised", 62.0, 75.0, sent=(1, 1))
    shown = row(render(tmp_path)[0], "Centralised")[0]
    assert shown[1:] == ["75.20 ± 0.28", "", "–", "–", "+5.00 ± 0.00", "0, 1"]


def test_each_loss_and_each_threshold_has_its_difference(tmp_path):
    for run, student, teachers, sent in (
        ("fed_kd", 60.0, 65.0, 30),
        ("fed_kd,no_output", 59.0, 62.0, 3),
        ("fed_kd,no_mutual", 58.0, 50.0, 30),
        ("fed_kd,whole", 61.0, 66.0, 100),
        ("fed_kd,0.9-1", 57.0, 61.0, 25),
        ("fml", 56.0, 64.0, 100),
        ("fed_avg,student", 55.0, None, 100),
    ):
        write(tmp_path, run, student, teachers, sent=(sent * 50_000, sent * 50_000))
    text = render(tmp_path)[0].partition("## ADE corpus")[0]
    (without,) = row(text, "without predictions")
    assert without[3:] == ["3.00", "-3.00 ± 0.00", "-1.00 ± 0.00", "+4.00 ± 0.00", "below 0"]
    (fml,) = row(text, "FML's losses, with whole students")
    assert fml[3:] == ["100.00", "-1.00 ± 0.00", "-4.00 ± 0.00", "+1.00 ± 0.00", "–"]
    assert row(text, "the two task losses alone")[0][4:6] == ["-15.00 ± 0.00", "-2.00 ± 0.00"]
    start = row(text, "start, up to 1")
    assert [cells[1] for cells in start] == ["0.5", "0.8", "0.9", "0.95", "1"]
    assert all(cells[2] == "1" for cells in start)
    assert start[2][3:] == ["61.20 ± 0.28", "57.20 ± 0.28", "25.00", "25.0 %", "-5.00 ± 0.00"]
    end = row(text, "end, from 0.95")
    assert [cells[1:3] for cells in end] == [["0.95", "0.95"], ["0.95", "0.98"], ["0.95", "1"]]
    assert end[1][5:] == ["30.00", "30.0 %", "-1.00 ± 0.00"]


def test_sentences_are_judged_by_f_where_it_is_defined(tmp_path):
    write(tmp_path, "fed_avg,teacher", 90.0, sent=(1, 1), experiment=ADE, f_score=62.5)
    for run, megabytes in (("fed_kd", 1), ("fed_kd,whole", 4)):
        sent = 2 * (500_000 * megabytes,)
        write(tmp_path, run, 80.0, 81.0, sent=sent, experiment=ADE, f_score=40.0)
    text, _ = render(tmp_path)
    of_ade = text[text.index("## ADE corpus") :]
    assert row(of_ade, "FedAvg, teacher's network")[0][1] == "62.50"
    assert row(of_ade, "Federated Dropout")[0][1] == "not run"
    assert "start, up to 1" not in of_ade  # thresholds are not swept there
    assert row(of_ade, "end, from 0.95")[0][5:7] == ["3.00", "25.0 %"]
    assert row(of_ade, "nothing compressed")[0][5:7] == ["12.00", "100.0 %"]


def test_sentences_have_metrics_without_a_threshold(tmp_path):
    for run, loss in (("fed_kd,no_mutual", 0.40), ("fed_kd,no_output", 0.38), ("fed_kd", 0.37)):
        write(tmp_path, run, 90.0, 90.0, experiment=ADE, f_score=50.0)
        path = tmp_path / ADE / f"{run}.json"
        content = json.loads(path.read_text())
        for model in content["final"]:
            content["final"][model]["test"]["loss"] = [loss, loss + 0.02]
        path.write_text(json.dumps(content))
    text, _ = render(tmp_path)
    rows = row(text, "100 times the loss")
    assert [cells[1] for cells in rows] == ["Local", "FedKD", "FedKD without predictions"]
    assert rows[1][2:] == ["38.00 ± 1.41", "38.00 ± 1.41", "-3.00 ± 0.00", "", ""]
    assert rows[2][4:] == ["-2.00 ± 0.00", "+1.00 ± 0.00", "+1.00 ± 0.00"]
    assert rows[0][4:] == ["", "+3.00 ± 0.00", ""]
    assert "| average precision |" not in text  # older runs have none


def test_students_of_other_networks_stand_beside_fed_avg_of_them(tmp_path):
    write(tmp_path, "fed_kd,no_mutual", 60.0, 61.0, experiment=ADE, f_score=40.0)
    write(tmp_path, "fed_avg,text_cnn", 60.0, experiment=ADE, f_score=45.0)
    write(tmp_path, "fed_kd,text_cnn", 60.0, 61.0, experiment=ADE, f_score=47.0)
    text, _ = render(tmp_path)
    (cells,) = row(text, "CNN")
    assert cells[1:] == ["45.00", "47.00", "47.00", "+2.00", "+7.00"]
    assert row(text, "LSTM")[0][1:4] == ["not run"] * 3


def test_ranks_by_round_and_spectra_at_both_ends(tmp_path):
    layer = {"round": [1, 2], "rank": [3.0, 4.5], "first": [2.0, 1.0, 0.0], "last": [4.0, 3.0, 1.0]}
    write(tmp_path, "fed_kd", 60.0, 65.0, spectra={"main": {"conv1/kernel": layer}})
    text, plots = render(tmp_path)
    assert row(text, "Layer")[0][2:] == [
        *("round 1, T = 0.953", "round 2, T = 0.956"),
        *("round 1, T = 0.953, mean spectrum", "round 2, T = 0.953, mean spectrum"),
    ]
    assert row(text, "`conv1/kernel`")[0][1:] == ["3", "3.0", "4.5", "2", "2"]
    panels = plots[f"{CIFAR}_ranks.png"]().axes
    ranks, first, last = (panel.get_lines()[0].get_ydata().tolist() for panel in panels)
    assert (ranks, first, last) == ([3.0, 4.5], [1.0, 0.5], [1, 0.75, 0.25])
    assert [panel.get_xlabel() for panel in panels[1:]] == [
        f"Singular value, round {number}" for number in (1, 2)
    ]


def test_gradients_stand_beside_updates(tmp_path):
    layer = {"round": [1, 2], "rank": [3.0, 4.5], "first": [2.0, 1.0, 0.0], "last": [4.0, 3.0, 1.0]}
    of_gradient = layer | {"rank": [1.0, 2.0], "first": [2.0, 1e-7, 0.0]}
    both = {"spectra": {"main": {"w": layer}}, "gradient_spectra": {"main": {"w": of_gradient}}}
    write(tmp_path, "fed_kd", 60.0, 65.0, **both)
    text, plots = render(tmp_path)
    updates, gradients = row(text, "`w`")
    assert updates[1:] == ["3", "3.0", "4.5", "2", "2"]
    assert gradients[1:] == ["3", "1.0", "2.0", "1", "2"]
    ranks, first, _ = plots[f"{CIFAR}_gradient_ranks.png"]().axes
    assert ranks.get_lines()[0].get_ydata().tolist() == [1.0, 2.0]
    assert first.get_lines()[0].get_ydata().tolist() == [1.0]  # without what is rounding


def test_looking_at_spectra_changes_no_settings(tmp_path):
    write(tmp_path, "fed_kd,whole", 60.0, 65.0, sent=(1, 1))
    write(tmp_path, "fed_kd,no_output", 60.0, 65.0, sent=(1, 1))
    found = [cifar_fed_kd.get_config(run) for run in ("fed_kd", "fed_kd,no_output")]
    assert [each.training.compression.spectra for each in found] == [True, False]
    records = {one.run: one for one in load_records(tmp_path)}
    looked = records["fed_kd,no_output"]
    config = json.loads(json.dumps(looked.config))
    config["training"]["compression"]["spectra"] = True
    assert settings(looked) == settings(looked._replace(config=config))


def test_the_papers_costs_are_those_of_an_encoders_shapes(tmp_path):
    """Beside each the paper's number and what is left, which nothing was fitted to."""
    text, plots = render(tmp_path)
    assert not plots
    tokens = jnp.zeros((1, 2), jnp.int32)
    for layers in (12, 6, 4, 2):
        params = jax.eval_shape(bert_base(layers=layers).init, jax.random.key(0), tokens)["params"]
        encoder = {name: part for name, part in params.items() if name != "embeddings"}
        (cells,) = row(text, str(layers))
        numbers = [float(cell) for cell in cells[1:]]
        for derived, paper, residual, epochs in ((*numbers[:3], 3), (*numbers[3:], 2)):
            exact = tree_bytes(encoder) * 2 * epochs / 1e9
            assert derived == round(exact, 3)
            assert residual == round(paper - exact, 3) and 0.005 < residual < 0.015


def test_what_is_not_run_has_its_command(tmp_path):
    text, _ = render(tmp_path)
    for experiment in section.EXPERIMENTS:
        assert f"--config experiments/configs/{experiment}.py" in text
    assert "`--config.data.encoder` names" in text


@pytest.mark.parametrize("cut", [False, True])
def test_a_record_holds_the_spectra(tmp_path, cut):
    folder = write_run(tmp_path / "run", rounds=20)
    path = folder / "metrics.jsonl"
    lines = path.read_text()
    for round in (10, 20):
        for seed in (0, 1):
            about = {"round": round, "model": "small", "split": "clients", "seed": seed}
            about["client_rank/w"] = round / 10 + seed
            about["client_spectrum/w"] = [3.0 * round, 1.0 + seed]
            about["client_gradient_rank/w"] = 1
            about["client_gradient_spectrum/w"] = [2.0 * round]
            lines += json.dumps(about) + "\n"
    path.write_text(lines[: -len(lines) // 40] if cut else lines)
    if cut:  # a killed run's
        (folder / "summary.json").unlink()
    made = record.make_record(folder, partial=cut)
    found = made["spectra"]
    expected = {"round": [10], "rank": [1.5], "first": [30.0, 1.5], "last": [30.0, 1.5]}
    if not cut:
        expected = {"round": [10, 20], "rank": [1.5, 2.5]}
        expected |= {"first": [30.0, 1.5], "last": [60.0, 1.5]}
    assert found == {"small": {"w": expected}}
    of_gradients = made["gradient_spectra"]["small"]["w"]
    assert of_gradients["rank"] == [1.0] * (1 if cut else 2) and of_gradients["first"] == [20.0]
    plain = write_run(tmp_path / "plain")
    assert record.make_record(plain)["spectra"] == {}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"bytes": {"main": {"up": 1}}}, "bytes, spectra or data is not .*'down'"),
        ({"bytes": {"main": {"up": "1", "down": 2}}}, "bytes.main is"),
        ({"spectra": {"main": {"w": {"round": [1], "rank": []}}}}, "bytes, spectra or data is not"),
        (
            {"spectra": {"main": {"w": {"round": [1], "rank": [], "first": [1], "last": [1]}}}},
            "spectra.main has 'w' of",
        ),
        (
            {
                "gradient_spectra": {
                    "main": {"w": {"round": [], "rank": [1], "first": [], "last": []}}
                }
            },
            "gradient_spectra.main has 'w' of",
        ),
        ({"data": {"data/ade": {"source": "ADE"}}}, "bytes, spectra or data is not"),
        ({"data": {"data/ade": {"source": 1, "num_examples": {}}}}, "data.data/ade is"),
    ],
)
def test_malformed_bytes_spectra_and_data_are_one_line(tmp_path, change, fault):
    write(tmp_path, "fed_kd", 60.0, 65.0, **change)
    with pytest.raises(ValueError, match=f"is not a record: {fault}") as error:
        load_records(tmp_path)
    assert "\n" not in str(error.value)


def test_costs_of_other_numbers_of_rounds_are_not_compared(tmp_path):
    write(tmp_path, "fed_avg,teacher_16", 70.0, sent=(600_000, 400_000))
    write(tmp_path, "fed_kd_16", 62.0, 69.0, sent=(60_000, 40_000))
    write(tmp_path, "fml_16", 61.0, 68.0, sent=(300_000, 200_000), rounds=10, full_rounds=10)
    write(tmp_path, "fed_kd,no_mutual_16", 61.0, 60.0, rounds=10, full_rounds=10)
    text, plots = render(tmp_path)
    assert row(text, "FedKD")[0][3:6] == ["4.00", "10.0 %", "-1.00 ± 0.00"]
    assert row(text, "FML")[0][3:6] == ["5.00", "–", "no runs with equal settings"]
    (axis,) = plots["fed_kd.png"]().axes
    drawn = axis.get_legend_handles_labels()[1]
    assert "FedKD" in drawn and "FML" not in drawn and "Local" not in drawn
    (tmp_path / CIFAR / "fed_avg,teacher_16.json").unlink()
    assert "fed_kd.png" not in render(tmp_path)[1]  # FedKD alone


def test_results_on_other_data_are_not_drawn_beside_each_other(tmp_path):
    write(tmp_path, "fed_avg,teacher", 70.0, sent=(600_000, 400_000))
    write(tmp_path, "fed_kd", 62.0, 69.0, sent=(60_000, 40_000))
    write(tmp_path, "fml", 61.0, 68.0, sent=(300_000, 200_000))
    path = tmp_path / CIFAR / "fml.json"
    content = json.loads(path.read_text())
    content["config"]["data"]["partition"]["seed"] = 7
    path.write_text(json.dumps(content))
    text, plots = render(tmp_path)
    assert row(text, "FML")[0][5] == "no runs with equal settings"
    (axis,) = plots["fed_kd.png"]().axes
    drawn = axis.get_legend_handles_labels()[1]
    assert "FedKD" in drawn and "FML" not in drawn
