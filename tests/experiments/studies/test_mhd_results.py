"""MHD in RESULTS.md: what heads know, differences within seeds, pictures; no run is left out."""

import json
import zlib

import numpy as np
import pytest

from experiments.configs import (
    cifar100_mhd,
    cifar100_mhd_long,
    cifar_mhd_fed_md,
    digits_mhd_orderings,
)
from experiments.studies.archive import load_records
from experiments.studies.document import HERE
from experiments.studies.mhd import beside_fed_md, heads_table, orderings, short_runs
from experiments.studies.mhd import page as section
from experiments.studies.pages import read_notes
from experiments.studies.run_list import run_list
from experiments.studies.settings import flat
from fedcodist.algorithms.graph import graphs
from fedcodist.config.registry import DECENTRALISED
from fedcodist.report.tables_heads import Heads, profiles, table_of_clients
from tests.experiments.studies.test_results import record as write_record

NOTES = read_notes(HERE / "mhd" / "notes.md", with_findings=False)
SEEDS = (0, 1)
GRAPHS = {
    "graph,islands": graphs.islands(4, 2),
    "graph,directed_cycle": graphs.directed_cycle(4),
    "graph,complete": graphs.complete(4),
}


def heads_of_run(run, seeds=SEEDS):
    """Random accuracies for the run's clients and heads; None for the centralised run."""
    config = cifar100_mhd.get_config(run)
    if config.algorithm.name == "centralised":
        return None
    clients = config.data.num_clients
    heads = 1
    if config.algorithm.name == "multi_headed_distillation":
        heads += config.parties.heads
    generator = np.random.default_rng(zlib.crc32(run.encode()))
    return Heads(
        generator.random((len(seeds), clients, heads)),
        generator.random((len(seeds), clients, heads, clients)),
        graphs.hops(GRAPHS.get(run, graphs.complete(clients))),
    )


def write(folder, run, heads, experiment=section.CIFAR, seeds=SEEDS, final=None):
    if final is None:
        final = {
            name: [40.0 + seed for seed in seeds]
            for name in ("normalized_cnn_0", "normalized_cnn_1")
        }
    path = write_record(folder, run, final, experiment=experiment, seeds=seeds)
    content = json.loads(path.read_text())
    content["full_rounds"] = content["rounds"]
    if heads is not None:
        content["heads"] = {name: np.asarray(v).tolist() for name, v in heads._asdict().items()}
    path.write_text(json.dumps(content))
    return path


def render(folder):
    page = section.mhd(load_records(folder), NOTES)
    return page.text, page.plots


def difference(text, ordering):
    """The text beside an ordering."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {ordering} |")]
    return line.split(" | ")[1]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A folder with records of all runs of the scaled experiments."""
    folder = tmp_path_factory.mktemp("all")
    for run in cifar100_mhd.get_runs():
        write(folder, run, heads_of_run(run))
    return folder


def test_every_run_of_the_config_is_shown_and_none_that_it_has_not(everything):
    text, plots = render(everything)
    assert "not run" not in text.split("## Beside FedMD")[0]
    assert f"{section.CIFAR}.py" not in text.split("## Not run")[1]
    records = load_records(everything)
    first, *others = cifar100_mhd.get_runs()
    for run in others[::8]:
        without = [each for each in records if each.run != run]
        other = section.mhd(without, NOTES).text
        assert "not run" in other.split("## Beside FedMD")[0], run
        assert f'--only "{run}"' in other.split("## Not run")[1]
    alone = [each for each in records if each.experiment != section.CIFAR or each.run == first]
    missing = section.mhd(alone, NOTES).text.split("## Not run")[1]
    assert all(f'--only "{run}"' in missing for run in others)
    assert {run for o in orderings.orderings() for run, _ in (*o.plus, *o.less)} <= set(
        cifar100_mhd.get_runs()
    )
    assert set(plots) == {
        "mhd_profiles.png",
        *(f"mhd_graph_{name}.png" for name in short_runs.GRAPHS),
    }


def test_digits_come_first_with_a_verdict_for_each_ordering(tmp_path):
    runs = digits_mhd_orderings.get_runs()
    assert set(heads_table.ROWS["digits"].values()) == set(runs)
    compared = {r for o in orderings.orderings_on_digits() for r, _ in (*o.plus, *o.less)}
    assert compared <= set(runs)
    seeds, hops = (0, 1, 2), graphs.hops(graphs.complete(8))

    def heads(last):
        shared = np.stack([np.full((3, 8), 0.4), np.array(last)[:, None].repeat(8, 1)], axis=2)
        return Heads(shared, np.full((3, 8, 2, 8), 0.1), hops)

    for run, last in (
        ("heads,s=100,3", (0.8, 0.81, 0.82)),
        ("local_only_steps,s=100", (0.5, 0.52, 0.53)),
        ("choice,random,s=100", (0.8, 0.82, 0.81)),
    ):
        write(tmp_path, run, heads(last), section.DIGITS, seeds)
    text, _ = render(tmp_path)
    assert text.index(section.ON_DIGITS) < text.index("## Alone, MHD")
    first = text.split("## Alone, MHD")[0]
    line = (
        "| s = 100: MHD's last head less clients alone, shared | +41.00 ± 2.48 | above 0 | held |"
    )
    assert line in first
    (line,) = [
        each for each in first.splitlines() if "100: most confident less random, last" in each
    ]
    assert line.endswith("| not decided |")
    waiting = len(orderings.orderings_on_digits()) - sum(
        "| above 0 |" in x for x in first[first.index(f"## {section.ON_DIGITS}") :].splitlines()
    )
    assert f"{waiting} of {len(orderings.orderings_on_digits())} orderings wait for runs" in first
    assert (
        "| 3 heads, Δ = 2 |" not in first and f"{section.DIGITS}.py" in text.split("## Not run")[1]
    )


def test_long_runs_have_verdicts_of_their_own_beside_the_short_runs(tmp_path):
    assert set(heads_table.ROWS["longer"].values()) == set(cifar100_mhd_long.get_runs())
    assert set(cifar100_mhd_long.get_runs()) <= set(cifar100_mhd.get_runs())
    hops = graphs.hops(graphs.complete(8))

    def heads(last):
        shared = np.stack([np.full((3, 8), 0.1), np.array(last)[:, None].repeat(8, 1)], axis=2)
        return Heads(shared, np.full((3, 8, 2, 8), 0.1), hops)

    write(tmp_path, "heads,s=100,3", heads((0.11, 0.12, 0.13)), section.CIFAR, (0, 1, 2))
    before, _ = render(tmp_path)
    assert f"## {section.LONGER}" not in before
    for run, last in (
        ("heads,s=100,3", (0.3, 0.31, 0.32)),
        ("local_only_steps,s=100", (0.2, 0.2, 0.2)),
    ):
        write(tmp_path, run, heads(last), section.CIFAR_LONG, (0, 1, 2))
    text, _ = render(tmp_path)
    _, of_section = text.split(f"## {section.LONGER}")
    of_section = of_section.split("## Alone, MHD")[0]
    assert (
        "| s = 100: MHD's last head less clients alone, shared | +21.00 ± 2.48 | above 0 | held |"
        in of_section
    )
    assert "| s = 100: 3 heads, 3,000 steps | 10.0 / 10.0 | 10.0 / 12.0 |" in of_section
    assert "| s = 100: 3 heads, 30,000 steps | 10.0 / 10.0 | 10.0 / 31.0 |" in of_section
    page = section.mhd(load_records(tmp_path), NOTES)
    (verdict,) = [each for each in page.verdicts if each.ours]
    assert verdict.again == "30,000 steps on CIFAR-100" and verdict.word == "held"
    missing = text.split("## Not run")[1]
    assert f'{section.CIFAR_LONG}.py --only "heads,s=0,3"' in missing.replace("\\\n    ", "")


def test_statements_on_digits_are_counted_once_and_only_where_the_graphs_are_the_papers():
    of_cifar, of_digits = orderings.orderings(), orderings.orderings_on_digits()
    (there,), (here,) = (
        [o.paper for o in of if o.text.startswith("complete less cycle")]
        for of in (of_cifar, of_digits)
    )
    assert here == orderings.NOT_STATED != there
    again = [o.text for o in of_digits if o.again]
    assert len(again) == 3
    assert {f"levels apart: {text}" for text in again} <= {o.text for o in of_digits if not o.again}


def test_a_picture_has_all_clients_heads_and_hops(everything):
    _, plots = render(everything)
    figure = plots["mhd_graph_directed_cycle.png"]()
    heads = heads_of_run("graph,directed_cycle")
    pictures = [axis for axis in figure.axes if axis.get_images()]
    shown = {axis.get_title(): axis for axis in pictures if axis.get_title()}
    assert list(shown) == ["main head", "head 1", "head 2", "head 3"]
    for head, axis in enumerate(shown.values()):
        (image,) = axis.get_images()
        np.testing.assert_allclose(
            image.get_array(), 100 * heads.on_others[:, :, head].mean(axis=0)
        )
        found = {tuple(map(int, text.get_position())): text.get_text() for text in axis.texts}
        accuracies = 100 * heads.on_others[:, :, head].mean(axis=0)
        assert found == {
            (j, i): f"{accuracies[i, j]:.0f}\n({heads.hops[i, j]})"
            for i in range(4)
            for j in range(4)
        }
    rows = {axis.get_subplotspec().rowspan.start for axis in shown.values()}
    assert rows == {0, 1}  # three panels a row
    assert "accuracy in % (hops" in figure.get_suptitle()
    lines = [axis for axis in figure.axes if axis.get_xlabel() == "hops"]
    assert len(lines[0].get_lines()) == 4


def test_profiles_have_a_panel_per_skew_and_accuracy(everything):
    figure = render(everything)[1]["mhd_profiles.png"]()
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["s = 0, private", "s = 0, shared", "s = 100, private", "s = 100, shared"]
    shown = figure.axes[3].get_lines()[3].get_ydata()
    heads = heads_of_run("heads,s=100,4")
    np.testing.assert_allclose(shown, 100 * heads.shared.mean(axis=(0, 1)))
    assert len(profiles({"one": {"a": np.arange(3.0)}}).axes) == 1


def test_orderings_are_differences_within_seeds(tmp_path):
    cycle, islands = (heads_of_run(f"graph,{name}") for name in ("directed_cycle", "islands"))
    write(tmp_path, "graph,directed_cycle", cycle)
    # The other run's seeds in another order, and one more.
    again = Heads(*(np.concatenate([v[::-1], v[:1]]) for v in islands[:2]), islands.hops)
    write(tmp_path, "graph,islands", again, seeds=(1, 0, 2))
    text, _ = render(tmp_path)
    last = 100 * (cycle.shared[:, :, 3].mean(axis=1) - islands.shared[:, :, 3].mean(axis=1))
    shown = difference(text, "cycle less islands, last head, shared")
    assert shown.startswith(f"{last.mean():+.2f} ± ")
    # Head 3 less head 2 on the labels of clients three hops away: client i's of client i + 3.
    each = [
        cycle.on_others[:, i, 3, (i + 3) % 4] - cycle.on_others[:, i, 2, (i + 3) % 4]
        for i in range(4)
    ]
    shown = difference(text, "cycle, labels 3 hops away: head 3 less head 2")
    assert shown.startswith(f"{100 * np.mean(each):+.2f} ± ")
    # In the island: clients 0 and 1, 2 and 3.
    inside = np.mean([islands.on_others[:, i, 3, i ^ 1] for i in range(4)], axis=0)
    outside = np.mean(
        [islands.on_others[:, i, 3, j] for i in range(4) for j in range(4) if j // 2 != i // 2],
        axis=0,
    )
    all_seeds = np.concatenate([(inside - outside)[::-1], (inside - outside)[:1]])
    shown = difference(text, "islands, last head: labels in the island less outside")
    assert shown.startswith(f"{100 * all_seeds.mean():+.2f} ± ")
    assert difference(text, "complete less cycle, last head, shared") == "not run"


def test_private_accuracy_is_that_on_ones_own_labels(tmp_path):
    heads = heads_of_run("heads,s=100,1")
    write(tmp_path, "heads,s=100,1", heads)
    text, _ = render(tmp_path)
    own = np.stack([heads.on_others[:, i, :, i] for i in range(8)])
    private, shared = 100 * own.mean(axis=(0, 1)), 100 * heads.shared.mean(axis=(0, 1))
    cells = " | ".join(f"{a:.1f} / {b:.1f}" for a, b in zip(private, shared, strict=True))
    assert f"| s = 100: 1 head | {cells} |" in text
    gain = private[1] - private[0]
    shown = difference(text, "s = 100: head 1 less main, private, one head")
    assert shown.startswith(f"{gain:+.2f} ± ")
    lines = table_of_clients(heads).splitlines()
    assert len(lines) == 9
    assert lines[3].split() == [
        "2",
        *(
            part
            for head in (0, 1)
            for part in (
                f"{100 * own[2].mean(axis=0)[head]:.1f}",
                "/",
                f"{100 * heads.shared[:, 2, head].mean():.1f}",
            )
        ),
    ]


def test_the_best_weights_of_each_loss_are_named(tmp_path):
    def with_main(value):
        return Heads(
            np.full((2, 8, 2), value), np.full((2, 8, 2, 8), 0.1), graphs.hops(graphs.complete(8))
        )

    for (embedding, head), value in {
        (0, 0): 0.2,
        (1, 0): 0.25,
        (3, 0): 0.22,
        (0, 0.3): 0.21,
        (0, 3): 0.1,
        (1, 1): 0.3,
    }.items():
        write(tmp_path, orderings.weights_run(100, embedding, head), with_main(value))
    text, _ = render(tmp_path)
    (line,) = [one for one in text.splitlines() if one.startswith("| s = 100, shared | +")]
    cells = line.strip("| ").split(" | ")[1:]
    assert cells == ["+5.00 ± 0.00 (1, 0)", "+1.00 ± 0.00 (0, 0.3)", "+10.00 ± 0.00 (1, 1)"]


def test_fed_md_and_mhd_are_measured_against_their_own_bounds(tmp_path):
    experiment = beside_fed_md.BESIDE_FED_MD
    models = {"a": [40.0, 41.0], "b": [60.0, 61.0]}
    path = write(tmp_path, "fed_md", None, experiment, final=models)
    content = json.loads(path.read_text())
    content["curve"] = {
        party: {"test": {"round": [0, 8], "accuracy": [[0.3, 0.31], [v / 100 for v in values]]}}
        for party, values in models.items()
    }
    content["phases"] = {"pooled": {party: {"test": {"accuracy": [0.7, 0.71]}} for party in models}}
    path.write_text(json.dumps(content))

    def flat_heads(*by_client):
        shared = np.tile(np.array(by_client, float), (2, 1))[:, :, None] / 100
        shared = np.concatenate([shared - 0.1, shared], axis=2)
        return Heads(shared, np.full((2, 2, 2, 2), 0.1), graphs.hops(graphs.complete(2)))

    write(tmp_path, "mhd", flat_heads(54, 58), experiment)
    write(tmp_path, "separate", flat_heads(30, 40), experiment)
    write(tmp_path, "pooled", None, experiment, final={"a": [66.0, 66.0], "b": [66.0, 66.0]})
    text, _ = render(tmp_path)
    spread = np.std([40, 60], ddof=1)
    assert f"| FedMD | 30.5 | 50.5 | 70.5 | 20.0 | {spread:.1f} |" in text
    assert "| MHD, head 1 | 25.0 | 56.0 | 66.0 | 10.0 | 2.8 |" in text
    assert "| MHD, main | 25.0 | 46.0 | 66.0 | 20.0 | 2.8 |" in text
    shown = difference(text, "FedMD's gap to its bound less that of MHD's last head")
    assert shown == "+10.00 ± 0.00"
    assert difference(text, "MHD's bound less FedMD's").startswith("-4.50 ± ")
    shown = difference(text, "FedMD's spread of models less that of MHD's last head")
    assert shown == f"{spread - np.std([54, 58], ddof=1):+.2f} ± 0.00"


def test_what_is_not_run_has_its_command(tmp_path):
    text, plots = render(tmp_path)
    assert not plots
    for experiment in section.EXPERIMENTS:
        assert f"--config experiments/configs/{experiment}.py" in text


def test_no_number_is_called_the_papers(everything):
    """Its numbers are lost: beside ours stand words."""
    for ordering in orderings.orderings():
        assert not set(ordering.paper) & set("123456789")


@pytest.mark.parametrize(
    "damage",
    [
        lambda heads: heads.pop("hops"),
        lambda heads: heads["shared"].pop(),
        lambda heads: heads["hops"].pop(),
        lambda heads: heads["on_others"][0].pop(),
        lambda heads: heads["shared"][0][0].__setitem__(0, 1.5),
    ],
)
def test_damaged_heads_are_refused_in_one_line(tmp_path, damage):
    path = write(tmp_path, "heads,s=0,1", heads_of_run("heads,s=0,1"))
    content = json.loads(path.read_text())
    damage(content["heads"])
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is not a record: heads is not what") as caught:
        load_records(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_list_of_runs_has_one_accuracy_of_all_clients(everything):
    own = [r for r in load_records(everything) if r.run == "local_only_steps,s=0"]
    assert ",2 clients 40.50," in run_list(own)


# What runs of the scaled config differ in from `heads,s=100,3`, besides their names.
CHANGES = {
    "heads,s=0,3": {"data.skew": 0.0},
    "heads,s=100,1": {"parties.heads": 1},
    "weights,s=0,3,0.3": {
        "data.skew": 0.0,
        "parties.heads": 1,
        "algorithm.embedding_weight": 3.0,
        "algorithm.head_weight": 0.3,
    },
    "mhd_plus,s=100": {
        "data.public_share": 1.0,
        "data.private_share": 0.8,
        "rounds": 120,
        "full_rounds": 120,
    },
    "graph,islands": {
        "data.num_clients": 4,
        "data.assignment": "even",
        "parties.graph.name": "islands",
        "parties.graph.size": 2,
    },
    "graph,complete": {"data.num_clients": 4, "data.assignment": "even"},
    "teachers,4": {"algorithm.teachers": 4},
    "choice,random,s=100": {"algorithm.choice": "random"},
    "candidates,self": {"parties.heads": 4, "algorithm.candidates": "self"},
    "candidates,all": {
        "parties.heads": 4,
        "algorithm.candidates": "same_level_and_self",
        "algorithm.teachers": 2,
    },
    "candidates,all_plus_longer": {
        "parties.heads": 4,
        "algorithm.candidates": "same_level_and_self",
        "algorithm.teachers": 2,
        "data.public_share": 1.0,
        "data.private_share": 0.8,
        "rounds": 120,
        "full_rounds": 120,
    },
    "slower,same_level_and_self": {
        "parties.heads": 4,
        "algorithm.candidates": "same_level_and_self",
        "training.learning_rate": 0.03,
    },
    "skip,one_head": {"parties.heads": 1, "algorithm.candidates": "self"},
    "public,30": {"parties.heads": 4, "data.private_share": 0.7, "data.public_share": 0.3},
    "larger,mhd": {
        "data.num_clients": 4,
        "data.labels_per_client": 50,
        "parties.networks": ("normalized_cnn_wide", *3 * ("normalized_cnn",)),
        "parties.projection": 64,
    },
}


def settings(config):
    return {name: value for name, value in flat(config.to_dict()).items() if name != "run"}


@pytest.mark.parametrize("run", CHANGES)
def test_scaled_runs_change_what_their_names_say(run):
    base, own = (settings(cifar100_mhd.get_config(each)) for each in ("heads,s=100,3", run))
    changed = {name: value for name, value in own.items() if base.get(name) != value}
    assert set(changed) == set(CHANGES[run])
    for name, value in CHANGES[run].items():
        assert changed[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def test_baselines_make_the_same_steps_on_the_same_data():
    base = cifar100_mhd.get_config("heads,s=100,3")
    for name, method in cifar100_mhd.BASELINES.items():
        config = cifar100_mhd.get_config(f"{name},s=100")
        assert config.algorithm.name == method
        assert config.data == base.data and config.seeds == base.seeds >= 2
        longer = 2 if name.endswith("_longer") else 1
        assert config.rounds * config.training.steps == longer * 3000
        assert config.training.batch_size == base.training.batch_size
        assert not config.evaluation.checkpoint_every % config.evaluation.every
        assert config.execution.loop == "scan"
    # PeriodicCodist's clients learn from as many public images as MHD's.
    periodic = cifar100_mhd.get_config("periodic,s=100").algorithm
    seen = periodic.period * base.training.steps * base.algorithm.public_batch_size
    assert periodic.examples == seen
    # What is compared with more public images for longer is as long.
    for run in ("centralised_longer", "fed_avg_longer"):
        plus = cifar100_mhd.get_config("mhd_plus,s=0")
        assert cifar100_mhd.get_config(f"{run},s=0").rounds == plus.rounds
    assert cifar100_mhd.get_config("fed_avg_200,s=0").training.steps == 200
    for method in ("mhd_small_only", "fed_avg_small"):
        config = cifar100_mhd.get_config(f"larger,{method}")
        assert config.parties.networks == 4 * ("normalized_cnn",)
    assert set(cifar_mhd_fed_md.METHODS.values()) <= {*DECENTRALISED, "centralised"}
