"""The launcher of many runs; every run of every config file is what its name says."""

import argparse
import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from fedcodist.commands import sweep
from fedcodist.run.launch import USER_ERROR

ROOT = Path(__file__).parents[2]
FOLDER, SHIPPED = ROOT / "experiments" / "configs", ROOT / "fedcodist" / "configs"
CONFIGS = [
    path
    for folder in (FOLDER, SHIPPED)
    for path in sorted(folder.glob("*.py"))
    if "def get_runs" in path.read_text()
]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def references_of(config):
    for name, value in config.items():
        with contextlib.suppress(ValueError):  # of None, which is no placeholder
            yield config.get_ref(name)
        if isinstance(value, ConfigDict):
            yield from references_of(value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_run_of_a_config_file_is_a_config_of_its_own(path):
    module = load(path)
    configs = {run: module.get_config(run) for run in module.get_runs()}
    texts = set()
    for run, config in configs.items():
        assert (config.name, config.run) == (path.stem, run)
        of_codistillation = path.stem.startswith("cifar100")
        # Tuning runs have a length of their own.
        if path.stem.startswith(("cifar100_mhd", "cifar100_private", "cifar100_figure4_tuning")):
            of_codistillation = False
        assert config.full_rounds == (1500 if of_codistillation else config.rounds)
        evaluation = config.evaluation
        assert evaluation.checkpoint_every % evaluation.every == 0
        settings = config.to_dict()
        del settings["run"]
        texts.add(json.dumps(settings))
    assert len(texts) == len(configs)
    # A setting of one is no other's: placeholders are references, which configs must not share.
    references = [
        id(reference) for config in configs.values() for reference in references_of(config)
    ]
    assert len(set(references)) == len(references)
    with pytest.raises(ValueError, match="a run of this config is one of"):
        module.get_config("other")


def test_table_1_is_the_papers():
    module = load(next(path for path in CONFIGS if path.stem == "cifar100_table1"))
    assert len(module.get_runs()) == 3 + 2 * 2 * 3
    for run in module.get_runs():
        config = module.get_config(run)
        clients = int(315 * config.pools.large.fraction)
        assert str(100 * clients) == run.split(",")[1]
        assert (config.data.unlabelled_folder is None) == ("cifar10" not in run)
        assert ("small" in config.pools) == (run not in ("fed_avg,3100", "fed_avg,6300"))
        assert config.rounds == 1500
    periodic = module.get_config("periodic_codistillation,4700,in_domain").algorithm
    merged = module.get_config("merged_codistillation,4700,in_domain").algorithm
    assert (periodic.steps, periodic.period, merged.steps) == (200, 200, 32)


def fedsdd(table):
    return load(FOLDER / f"fedsdd_{table}.py")


def test_fedsdd_s_tables_have_the_papers_cells_once():
    counts = {
        "table2": 3 * 7 * 4,
        "table4": 2 * (2 + 6),
        "table5": 2 * 4,
        "table6": 2 * 3,
        "table7": 2 * 3 * 2,
        "table8": 2 * 2,
        "table9": 2 * (4 + 2),
        "table10": 2 * 4,
        "scaled": 9 + 1,  # and the long FedAvg
    }
    settings = []
    for table, count in counts.items():
        module = fedsdd(table)
        assert len(module.get_runs()) == count
        for run in module.get_runs():
            config = module.get_config(run).to_dict()
            settings.append(
                json.dumps({k: v for k, v in config.items() if k not in ("name", "run")})
            )
    assert len(set(settings)) == len(settings)  # no cell is run for two tables


def test_fedsdd_s_tables_have_the_papers_settings():
    config = fedsdd("table2").get_config("fed_sdd_r2,wide_resnet16_2,cifar100,1.0")
    assert (config.rounds, config.training.epochs, config.training.batch_size) == (100, 40, 64)
    assert (config.pools.main.client_learning_rate, config.pools.main.cohort_size) == (0.8, 8)
    assert config.pools.main.model == "wide_resnet16_2_100"
    assert config.data.unlabelled_folder == "data/imagenet32"
    own = config.algorithm
    assert (own.steps, own.batch_size, own.learning_rate, own.temperature) == (5000, 256, 0.1, 4.0)
    assert (own.num_models, own.rounds_kept, own.distilled) == (4, 2, "main")
    prox = fedsdd("table4").get_config("fed_sdd+fed_prox,8,1.0")
    assert (prox.training.method, prox.algorithm.name) == ("fed_prox", "fed_sdd")
    assert prox.training.proximal_weight == 0.001
    none = fedsdd("table5").get_config("4,2,0.1").algorithm
    assert (none.steps, none.num_models, none.rounds_kept) == (0, 4, 2)
    basic = fedsdd("table6").get_config("warm_up_40,0.1").algorithm
    assert (basic.distilled, basic.warm_up) == ("all", 40)
    for run in fedsdd("table7").get_runs():
        config = fedsdd("table7").get_config(run)
        assert config.rounds * config.training.epochs == 100 * 40
        assert config.rounds * config.algorithm.get("steps", 500_000 // config.rounds) == 500_000
    assert fedsdd("table8").get_config("3,0.1").algorithm.num_models == 3
    many = fedsdd("table9").get_config("fed_sdd_k10,20,0.1")
    assert (many.algorithm.num_models, many.pools.main.cohort_size) == (10, 20)
    steps = [fedsdd("table10").get_config(run) for run in fedsdd("table10").get_runs()[::2]]
    assert [bool(s.algorithm.get("validation")) for s in steps] == [True, True, False, False]
    assert [s.algorithm.temperature for s in steps] == [1.0, 4.0, 4.0, 4.0]
    assert {s.data.partition.validation for s in steps} == {0.1}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A config file of three runs and a stand-in for experiments.main; returns (command, calls)."""
    config = tmp_path / "config.py"
    config.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_runs():\n    return ['a,1', 'a,2', 'b,1']\n"
        "def get_config(run):\n    return ConfigDict(dict(run=run, rounds=3, seeds=1))\n"
    )
    calls = tmp_path / "calls"
    calls.touch()
    main = tmp_path / "stand_in.py"
    main.write_text(
        "import json, os, pathlib, sys\n"
        f"calls = open({str(calls)!r}, 'a')\n"
        "cores = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []\n"
        "calls.write(json.dumps([sys.argv[1:], cores]) + '\\n')\n"
        "calls.flush()\n"
        "print('trains')\n"
        "folder = pathlib.Path(sys.argv[2].split('=')[1])\n"
        "folder.mkdir(parents=True, exist_ok=True)\n"
        "(folder / 'config.json').write_text('{\"rounds\": 3}')\n"
        "(folder / 'summary.json').write_text('{}')\n"
        f"sys.exit(3 if os.path.exists({str(tmp_path / 'broken')!r}) and 'a-2' in folder.name else 0)\n"
    )
    monkeypatch.setattr(sweep, "_COMMAND", (sys.executable, str(main)))

    def run(*arguments):
        common = ("--config", str(config), "--workdir", str(tmp_path / "runs"))
        return sweep.main([*common, *arguments])

    def started():
        return [json.loads(line) for line in calls.read_text().splitlines()]

    return run, started, tmp_path


def test_all_runs_in_order_each_in_its_folder_with_the_same_settings(fake):
    run, started, folder = fake
    assert run("--config.seeds=3") == 0
    assert [arguments for arguments, _ in started()] == [
        [
            f"--config={folder / 'config.py'}:{name}",
            f"--workdir={folder / 'runs' / name.replace(',', '-')}",
            "--config.seeds=3",
        ]
        for name in ("a,1", "a,2", "b,1")
    ]


def test_what_is_finished_already_says_its_final_metrics(fake, capfd):
    run, _, folder = fake
    assert run("--only", "a,*") == 0
    workdir = folder / "runs" / "a-1"
    evaluation = {"splits": ["held_out"], "final_splits": ["test"]}
    final = {"main": {"test": {"accuracy": [0.5, 0.6]}, "held_out": {"accuracy": [0.1, 0.1]}}}
    (workdir / "config.json").write_text(json.dumps({"evaluation": evaluation, "rounds": 3}))
    (workdir / "summary.json").write_text(json.dumps({"final": final}))
    capfd.readouterr()
    assert run("--only", "a,*") == 0
    first, second = capfd.readouterr().out.splitlines()
    already = "finished already, in " + str(workdir)
    assert first == f"a,1: {already}  test accuracy, mean of 2 seeds: main 55.0 %"
    assert second.startswith("a,2: finished already, in ") and "accuracy" not in second


def test_a_folder_that_a_setting_names_is_in_the_mark(tmp_path, monkeypatch, fake):
    run, started, folder = fake
    config = folder / "config.py"
    config.write_text(config.read_text().replace("seeds=1", "seeds=1, data=dict(folder='')"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text("{}")
    setting = f"--config.data.folder={tmp_path / 'mine'}"
    for count in (1, 1):
        assert run("--only", "a,1", setting) == 0
        assert len(started()) == count
    (tmp_path / "mine" / "manifest.json").write_text("{ }")  # prepared anew
    assert run("--only", "a,1", setting) == 0
    assert len(started()) == 2


def test_a_pre_trained_file_is_in_the_mark(tmp_path, fake):
    run, started, folder = fake
    config, file = folder / "config.py", tmp_path / "encoder.safetensors"
    config.write_text(config.read_text().replace("seeds=1", "seeds=1, data=dict(encoder='')"))
    for content, count in ((b"one", 1), (b"one", 1), (b"another", 2)):
        file.write_bytes(content)
        assert run("--only", "a,1", f"--config.data.encoder={file}") == 0
        assert len(started()) == count


def test_a_part_of_an_options_name_is_no_option(fake, capsys):
    run, started, folder = fake
    assert run("--only", "a,1", "--work", str(folder / "other")) == USER_ERROR
    assert capsys.readouterr().err == "error: --work is no option; did you mean --workdir?\n"
    assert not started() and not (folder / "other").exists()


def test_only_runs_that_match(fake):
    run, started, _ = fake
    assert run("--only", "a,*", "--only", "b,?") == 0
    assert len(started()) == 3
    assert run("--only", "b*") == 0


def test_it_continues_where_it_stopped(fake, capfd):
    run, started, folder = fake
    (folder / "broken").touch()
    assert run() == 3
    assert "1 of 3 runs failed: ['a,2']" in capfd.readouterr().err
    (folder / "broken").unlink()
    assert run() == 0
    assert [arguments[0].split(":")[1] for arguments, _ in started()] == [
        *("a,1", "a,2", "b,1"),
        "a,2",
    ]
    assert "a,1: finished already" in capfd.readouterr().out


@pytest.mark.parametrize("change", ["rounds", "summary"])
def test_a_folder_that_has_grown_is_started_again(change, fake):
    run, started, folder = fake
    assert run("--only", "a,1") == 0
    workdir = folder / "runs" / "a-1"
    if change == "rounds":
        (workdir / "config.json").write_text('{"rounds": 8}')
    else:
        (workdir / "summary.json").unlink()
    assert run("--only", "a,1") == 0
    assert len(started()) == 2


def test_other_settings_are_left_to_main_to_refuse(fake):
    run, started, folder = fake
    run("--only", "a,1")
    run("--only", "a,1", "--config.seeds=2", "--processes=1")
    assert len(started()) == 2
    config = folder / "config.py"
    config.write_text(config.read_text().replace("rounds=3", "rounds=4"))
    run("--only", "a,1", "--config.seeds=2", "--processes=1")
    assert len(started()) == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--config.seed=2", "--config.seed is no setting of the config; did you mean --config.s"),
        ("--config.seeds=two", "--config.seeds=two"),
    ],
)
def test_a_setting_that_no_run_can_have_is_told_once(setting, message, fake, capsys):
    run, started, folder = fake
    assert run(setting, "--config.rounds=4") == USER_ERROR
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not started() and not (folder / "runs").exists()


def test_a_setting_of_some_runs_is_refused_unless_only_those_are_done(capsys, tmp_path):
    """The large model's FedAvg has no small model."""
    arguments = [f"--config={FOLDER / 'cifar100_table1.py'}", f"--workdir={tmp_path / 'runs'}"]
    arguments += ["--list", "--config.pools.small.cohort_size=2"]
    assert sweep.main(arguments) == USER_ERROR
    message = "error: run 'fed_avg,3100': --config.pools.small.cohort_size is no setting"
    assert capsys.readouterr().err.startswith(message)
    assert sweep.main([*arguments, "--only", "merged*"]) == 0


def test_several_at_once_have_the_processes_that_were_given(fake):
    run, started, _ = fake
    assert run("--at-once", "2", "--processes=2") == 0
    assert all("--processes=1" not in arguments for arguments, _ in started())
    assert all("--processes=2" in arguments for arguments, _ in started())


def test_a_log_that_cannot_be_written_is_one_line(fake, capfd):
    run, _, folder = fake
    (folder / "runs").write_text("a file")
    assert run("--at-once", "2") == USER_ERROR
    error = capfd.readouterr().err
    assert error.startswith("error: cannot write ") and error.count("\n") == 1


def test_several_at_once_share_the_cores_and_keep_logs(fake, capfd):
    run, started, folder = fake
    assert run("--at-once", "3") == 0
    places = [cores for _, cores in started()]
    assert sorted(arguments[0][-3:] for arguments, _ in started()) == ["a,1", "a,2", "b,1"]
    assert all(arguments[-1] == "--processes=1" for arguments, _ in started())
    assert all(places) or not any(places)
    assert (folder / "runs" / "b-1.log").read_text() == "trains\n"
    assert "trains" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "none.py"], "--config must be an existing file, got 'none.py'"),
        (["--config", "{digits}"], "has no get_runs(); run it with fedcodist run"),
        (["--config", "digits_methods:fed_avg"], "name the run by --only fed_avg."),
        (["--config", "{table}", "--only", "x"], "--only 'x' matches none of"),
        (["--config", "{table}", "--at-once", "0"], "--at-once must be at least 1, got 0"),
        (
            ["--config", "{table}", "--proceses=1"],
            "--proceses is no option; did you mean --processes?",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys, tmp_path):
    digits = SHIPPED / "digits_fed_md.py"
    table = FOLDER / "cifar100_table1.py"
    arguments = [each.format(digits=digits, table=table) for each in arguments]
    assert sweep.main([*arguments, "--workdir", str(tmp_path / "runs")]) == USER_ERROR
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=x.py", "--workdir=x", "--at-once=two"], "--at-once: invalid int value: 'two'"),
        (["--config=digits_codist"], "required: --workdir"),
        (["--config=x.py", "--workdir"], "--workdir: expected one argument"),
    ],
)
def test_options_that_argparse_refuses_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        sweep.main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == USER_ERROR
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_the_runs_are_listed(capsys):
    table = FOLDER / "cifar100_table1.py"
    assert sweep.main(["--config", str(table), "--only", "fed_avg*", "--list"]) == 0
    assert capsys.readouterr().out.split() == ["fed_avg,3100", "fed_avg,4700", "fed_avg,6300"]


def test_a_finished_run_whose_data_or_code_may_have_changed_is_started(tmp_path):
    """Its own command then says that it is finished, or refuses the folder."""
    (tmp_path / "manifest.json").write_text("{}")
    config = json.dumps({"rounds": 3, "data": {"folder": str(tmp_path)}})
    settings = argparse.Namespace(workdir=tmp_path)
    mark = tmp_path / sweep.run_folder_name("a") / "sweep.json"
    mark.parent.mkdir()
    mark.write_text(json.dumps(sweep._mark(config, [])))
    mark.with_name("config.json").write_text(config)
    mark.with_name("summary.json").write_text("{}")
    assert sweep._is_finished("a", config, settings, [])
    (tmp_path / "manifest.json").write_text("{ }")
    assert not sweep._is_finished("a", config, settings, [])
    for code in ({"methods": ["mine"]}, {"pools": {"main": {"model": "mine:Network"}}}):
        mark.write_text(json.dumps(sweep._mark(json.dumps(code), [])))
        assert not sweep._is_finished("a", json.dumps(code), settings, [])
