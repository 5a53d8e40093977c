"""Configs that need no download, README and notebooks look at test data once, after the last round."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments.configs import text_domain_shift
from fedcodist.algorithms.parties.local_only import SHARED
from fedcodist.config.data import load_data
from fedcodist.config.division import divided
from fedcodist.config.experiment import build_experiment
from fedcodist.config.phases import phase_experiment
from fedcodist.configs import (
    digits_codist,
    digits_compression,
    digits_fed_kd,
    digits_fed_md,
    digits_methods,
    digits_mhd,
    digits_parties,
    digits_personal,
    digits_private,
    digits_submodels,
)
from fedcodist.datasets.public_private import digits_public_private
from fedcodist.distillation.validation import VALIDATION
from fedcodist.report import tables_heads, tables_parties
from fedcodist.report.collection import collect
from fedcodist.tuning.held_out import held_out_experiment

ROOT = Path(__file__).parents[2]
DIGITS = (
    digits_codist,
    digits_compression,
    digits_fed_kd,
    digits_methods,
    digits_mhd,
    digits_parties,
    digits_personal,
    digits_private,
    digits_submodels,
)
RUNS = [(module, run) for module in DIGITS for run in module.get_runs()]


@pytest.mark.parametrize(("module", "run"), RUNS, ids=str)
def test_first_configs_watch_other_images_than_tests(module, run):
    evaluation = module.get_config(run).evaluation
    assert "test" not in evaluation.splits and tuple(evaluation.final_splits) == ("test",)


def test_the_demo_on_text_too():
    for run in text_domain_shift.get_runs():
        evaluation = text_domain_shift.get_config(run).evaluation
        assert not [split for split in evaluation.splits if split.startswith("test")]
        assert "test" in evaluation.final_splits


def images(split):
    return {column.tobytes() for column in split.columns["image"]}


@pytest.mark.parametrize("module", [digits_codist, digits_fed_md, digits_mhd], ids=str)
def test_held_out_images_are_nobody_else_s(module):
    splits = load_data(module.get_config().data).splits
    assert splits["held_out"].num_examples > 100 and splits["test"].num_examples > 100
    # Hardly any image is twice in scikit-learn's digits.
    for other in ("test", "train"):
        assert len(images(splits["held_out"]) & images(splits[other])) <= 1


def test_what_is_held_out_leaves_private_and_public_images_as_they_were():
    old, new = (digits_mhd.get_config().data for _ in range(2))
    old.update(test_share=0.3, held_out_share=0.0)
    before, after = load_data(old), load_data(new)
    assert "held_out" not in before.splits
    for name in ("image", "label"):
        columns = (each.splits["train"].columns[name] for each in (before, after))
        np.testing.assert_array_equal(*columns)
    np.testing.assert_array_equal(before.unlabelled, after.unlabelled)
    one, other = (digits_public_private(held_out_fraction=share) for share in (0.0, 0.3))
    assert one.held_out is None
    assert one.test.num_examples == other.test.num_examples + other.held_out.num_examples
    np.testing.assert_array_equal(one.private.columns["image"], other.private.columns["image"])


def test_a_share_that_leaves_a_part_empty_is_refused():
    config = digits_mhd.get_config()
    config.data.held_out_share = 0.9
    with pytest.raises(ValueError, match=r"test_share and data.held_out_share must leave .* 0\.9"):
        load_data(config.data)
    config.data.held_out_share = 1e-9
    with pytest.raises(
        ValueError, match=r"held_out_share must be 0 or leave held-out images, got 1e-09"
    ):
        load_data(config.data)
    config.data.held_out_share = -0.1
    with pytest.raises(ValueError, match=r"data.held_out_share must be at least 0"):
        load_data(config.data)
    with pytest.raises(ValueError, match=r"^held_out_fraction must be .* below 1, got 1"):
        digits_public_private(held_out_fraction=1)


def test_phases_before_fed_md_look_last_too():
    config = digits_fed_md.get_config()
    data = load_data(config.data)
    for phase in ("private", "centralised"):
        experiment = phase_experiment(config, data, phase)
        assert list(experiment.splits) == ["held_out"]
        assert list(experiment.final_splits) == ["test"]
    config.phases.stopping = "test_data"  # which says so
    assert list(phase_experiment(config, data, "private").splits) == ["test"]


def test_public_training_stops_on_other_images_than_its_tests():
    config = digits_fed_md.get_config()
    with config.ignore_type():
        config.parties.networks = (((3,), 0.0),) * 6  # they compile faster than convolutions
    data = load_data(config.data)
    experiment = phase_experiment(config, data, "public")
    (watched,), (tested,) = experiment.splits.values(), experiment.final_splits.values()
    sets = experiment.data.data_sets
    np.testing.assert_array_equal(sets[VALIDATION]["image"], watched.columns["image"])
    assert images(tested) == images(data.public.test)
    learned = {image.tobytes() for image in sets[SHARED]["image"]}
    assert len(learned) > 100 and watched.num_examples > 50
    # Hardly any image is twice in scikit-learn's digits.
    for one, other in (
        (images(watched), images(tested)),
        (images(watched), learned),
        (images(tested), learned),
    ):
        assert len(one & other) <= 1


def test_heads_are_read_from_the_last_look(tmp_path):
    """And from the curve's split of a run, such as the recorded ones, that has no other."""
    for finals, expected in ((("test",), 0.75), ((), 0.25)):
        config = digits_mhd.get_config("local_only_steps")
        config.rounds = 4
        config.evaluation.final_splits = finals
        (tmp_path / "config.json").write_text(config.to_json())
        lines = [
            {
                "round": 4,
                "model": f"digits_small_{client}",
                "split": split,
                "seed": 0,
                "accuracy": accuracy,
                "per_label_accuracy": [accuracy] * 10,
            }
            for client in range(8)
            for split, accuracy in (("held_out", 0.25), ("test", 0.75))
        ]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        np.testing.assert_allclose(tables_heads.read_heads(tmp_path).shared, expected)
    config.evaluation.splits = ()
    (tmp_path / "config.json").write_text(config.to_json())
    with pytest.raises(ValueError, match="evaluated on clients' own examples alone"):
        tables_heads.read_heads(tmp_path)


def test_gains_are_of_tests_and_the_plot_of_what_was_watched(tmp_path):
    final = {"a": {"held_out": {"accuracy": [0.25]}, "test": {"accuracy": [0.75]}}}
    private = tmp_path / "phases" / "private"
    private.mkdir(parents=True)
    for folder in (tmp_path, private):
        (folder / "summary.json").write_text(json.dumps({"final": final}))
    for splits, expected, label in (
        (["held_out"], 25.0, "Held out accuracy (%)"),
        (["test"], 75.0, "Test accuracy (%)"),
    ):
        content = {"evaluation": {"splits": splits}}
        (tmp_path / "config.json").write_text(json.dumps(content))
        line = {"round": 0, "model": "a", "seed": 0}
        lines = [line | {"split": s, "accuracy": v["accuracy"][0]} for s, v in final["a"].items()]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert tables_parties.results(tmp_path)["a"]["baseline"] == [0.75]
        assert tables_parties.curves(tmp_path)["a"].means == (expected,)
        axis = tables_parties.plot(tmp_path).axes[0]
        assert axis.get_ylabel() == label
        dashed = [line for line in axis.lines if line.get_label() == "no collaboration"]
        assert dashed[0].get_ydata()[0] == expected


def watched_splits(source):
    """The names of the splits that each Experiment(...) of some code is evaluated on as it goes."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Experiment"):
            named = {keyword.arg: keyword.value for keyword in call.keywords}
            splits = named["splits"] if "splits" in named else call.args[2]
            yield from (key.value for key in splits.keys)


def test_documents_and_notebooks_look_last():
    sources = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        sources += re.findall(
            r"^```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S | re.M
        )
    for path in sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found = [name for source in sources for name in watched_splits(source)]
    assert len(found) >= 20 and set(found) == {"held_out"}


# ------------------------------------------------------------------------- a division per seed


def test_a_seed_may_have_a_division_of_its_own():
    config = digits_methods.get_config("fed_sdd")
    config.data.division_per_seed, config.seeds = True, 1
    found = []
    for seed in (0, 1):
        config.seed = seed
        own = divided(config)
        assert own.data.seed == seed and divided(own) == own
        parts = load_data(own.data).splits["train"]
        found.append([len(columns["label"]) for _, columns in parts.clients()])
        built = build_experiment(config).data.columns["label"]
        np.testing.assert_array_equal(built, parts.columns["label"])
        assert config.data.seed == 0  # as in the run folder, so that seeds count as one method
    assert found[0] != found[1]
    config.data.division_per_seed = False
    assert divided(config) is config


def test_seeds_of_one_program_share_their_division():
    config = digits_methods.get_config("fed_sdd")
    config.data.division_per_seed = True
    for build in (build_experiment, held_out_experiment):
        with pytest.raises(ValueError, match=r"seeds must be 1 with data.division_per_seed.*got 3"):
            build(config)
    with config.ignore_type():
        config.data.division_per_seed = "no"
    with pytest.raises(TypeError, match=r"data.division_per_seed must be True or False, got 'no'"):
        divided(config)


def load_without_seed(num_clients):
    """A user's data, whose function draws nothing."""


def load_with_seed(num_clients, seed):
    """A user's data, whose function may draw."""


def deal_without_seed(labels):
    """A user's partition, which draws nothing."""


@pytest.mark.parametrize(
    ("settings", "is_drawn"),
    [
        (dict(name="load_without_seed"), False),
        (dict(name="load_with_seed"), True),
        (dict(name="load_without_seed", partition=dict(name="iid")), True),
        (dict(name="load_without_seed", partition=dict(name="natural")), False),
        (dict(name="load_without_seed", partition=dict(name="natural", examples=9)), True),
        (dict(name="load_without_seed", partition=dict(name="deal_without_seed")), False),
        (dict(name="load_with_seed", partition=dict(name="natural")), True),
        (dict(name="load_without_seed", client_test_share=0.5), True),
        (dict(name="prepared"), False),
        (dict(name="prepared", partition=dict(name="dirichlet")), True),
        (dict(name="prepared_text"), False),
        (dict(name="prepared_text", domains=dict(wikipedia=0.5)), True),
        (dict(name="digits_public_private"), True),
    ],
    ids=str,
)
def test_a_division_per_seed_of_data_that_no_seed_divides_is_refused(settings, is_drawn):
    own = lambda name: f"{__name__}:{name}" if name in globals() else name
    config = digits_methods.get_config("fed_avg")
    config.data = ConfigDict({"seed": 0, "division_per_seed": True} | settings)
    config.data.name, config.seeds, config.seed = own(config.data.name), 1, 2
    if "partition" in settings:
        config.data.partition.name = own(settings["partition"]["name"])
    if is_drawn:
        assert divided(config).data.seed == 2
        return
    with pytest.raises(
        ValueError, match=r"^data\.division_per_seed must be False with data\.name="
    ):
        divided(config)


@pytest.mark.slow
def test_runs_of_single_seeds_are_one_method_to_the_report(tmp_path):
    for seed in (0, 1):
        command = [sys.executable, "-m", "experiments.main", "--processes=1"]
        command += ["--config=fedcodist/configs/digits_methods.py:fed_avg"]
        command += [f"--workdir={tmp_path / str(seed)}", f"--config.seed={seed}"]
        settings = ("seeds=1", "rounds=1", "evaluation.every=1", "data.division_per_seed=True")
        command += [
            f"--config.{setting}" for setting in (*settings, "evaluation.checkpoint_every=1")
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        config = json.loads((tmp_path / str(seed) / "config.json").read_text())
        assert config["data"]["seed"] == 0 and config["data"]["division_per_seed"] is True
    (method,) = collect([tmp_path]).methods
    assert len(method.members) == 2
