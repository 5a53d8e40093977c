"""A user's mistake gives exit status 2 and one line that names it, before anything compiles."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import save_prepared

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFIG = "--config=fedcodist/configs/digits_codist.py"
PERIODIC = f"{CONFIG}:periodic_codistillation"
FED_KD = "--config=fedcodist/configs/digits_fed_kd.py"

# What is given after the config -> parts of the line that answers it.
SETTINGS = {
    "algorithm.alhpa=0.5": ["--config.algorithm.alhpa", "--config.algorithm.alpha?"],
    "learning_rate=1": ["--config.learning_rate", "did you mean --config."],
    "loggers=('csv',)": ["--config.loggers", "give --loggers=csv"],
    "algorithm.alpha=abc": ["--config.algorithm.alpha=abc", "float"],
    "algorithm.alpha=1.5": ["algorithm.alpha", "at least 0", "at most 1", "1.5"],
    "pools.large.alpha=2": ["pools.large.alpha", "at most 1", "2.0"],
    "algorithm.steps=-1": ["steps", "at least 0", "-1"],
    "algorithm.name=codist": ["algorithm.name", "'merged_codistillation'", "'codist'"],
    "rounds=0": ["rounds", "at least 1", "0"],
    "pools.small.cohort_size=61": ["pools.small.cohort_size", "60 clients", "61"],
    "pools.small.model=resnet": ["pools.small.model", "'digits_small'", "'resnet'"],
    "training.client_optimizer=sgdd": ["training.client_optimizer", "optax", "'sgdd'"],
    "data.name=cifar": ["data.name", "'digits', 'prepared'", "'cifar'"],
    "evaluation.checkpoint_every=7": ["checkpoint_every", "multiple of", "5", "7"],
    "execution.loop=eager": ["execution.loop", "'scan'", "'eager'"],
}
# The same of more settings, and of other methods' configs.
OTHER_CONFIGS = {
    "digits_codist.py:fed_df": {"rounds=1": ["a run of this config is one of", "'fed_df'"]},
    "digits_codist": {
        "rounds.number=1": ["--config.rounds.number", "--config.rounds?"],
        "algorithm.steps=2.5": ["--config.algorithm.steps=2.5", "int"],
        "algorithm.alpha=-0.5": ["algorithm.alpha", "at least 0", "at most 1", "-0.5"],
        "algorithm.alpha=nan": ["algorithm.alpha", "at least 0", "at most 1", "nan"],
        "pools.small.teaching.temperature=0": [
            "pools.small.teaching.temperature",
            "above 0",
            "0.0",
        ],
        "pools.small.teaching.self_teacher_temperature=-1": ["self_teacher_temperature", "above 0"],
        "algorithm.batch_size=0": ["batch_size", "at least 1", "0"],
        "algorithm.alpha_schedule=cosine": ["algorithm.alpha_schedule", "'constant'", "'cosine'"],
        "algorithm.direction=up": ["direction", "'forward' or 'reverse'", "'up'"],
        "algorithm.mixup_beta=-1": ["mixup_beta", "at least 0", "-1"],
        "seeds=0": ["seeds", "at least 1", "0"],
        "seed=-1": ["seed", "at least 0", "-1"],
        "pools.large.cohort_size=0": ["pools.large.cohort_size", "at least 1", "0"],
        "pools.large.fraction=0.01": ["'large' is empty", "0.01", "60 clients"],
        "pools.large.fraction=1.5": ["pools.large.fraction", "at most 1 and above 0", "1.5"],
        "pools.small.client_learning_rate=-1": ["pools.small.client_learning_rate", "at least 0"],
        "pools.small.model=cnn_small": ["pools.small.model", "[24, 24, 3]", "[8, 8, 1]"],
        "training.client_optimizer=clip": ["training.client_optimizer", "optax", "'clip'"],
        "training.server_optimizer=global_norm": ["training.server_optimizer", "'global_norm'"],
        "training.server_schedule=cosine": ["server_schedule", "'linear_decay'", "'cosine'"],
        "training.batch_size=0": ["training.batch_size", "at least 1", "0"],
        "training.epochs=0": ["training.epochs", "at least 1", "0"],
        "data.num_clients=0": ["data.num_clients", "at least 1", "0"],
        "data.concentration=0": ["concentration", "above 0", "0.0"],
        "evaluation.every=0": ["evaluation.every", "at least 1", "0"],
        "evaluation.batch_size=0": ["evaluation.batch_size", "at least 1", "0"],
        "execution.chunk_size=0": ["execution.chunk_size", "at least 1", "0"],
        "execution.precision=float16": ["execution.precision", "'bfloat16'", "'float16'"],
        "execution.rematerialise=maybe": ["--config.execution.rematerialise=maybe", "bool"],
        "execution.seeds_loop=scan": ["seeds_loop", "'map' or 'vmap'", "'scan'"],
        "execution.processes=0": ["execution.processes", "at least 1", "0"],
    },
    "digits_fed_md": {
        "algorithm.alignment_size=5000": ["alignment_size", "at most the 758 public", "5000"],
        "algorithm.exchanged=labels": ["exchanged", "'logits' or 'probabilities'", "'labels'"],
        "algorithm.weights=(1,1)": ["weights", "6 numbers, one per party"],
        "algorithm.weights=(1,1,1,1,1,-1)": ["weights", "at least 0, finite and not all 0"],
        "data.per_class=0": ["data.per_class", "at least 1", "got 0"],
        "data.num_parties=5": ["parties.networks", "5, one per party", "got 6"],
        "phases.held_out_share=1.5": ["held_out_share", "at most 1", "1.5"],
    },
    "digits_codist.py:hetero_fl": {
        "pools.small.client_learning_rate=-1": ["pools.small.client_learning_rate", "at least 0"],
        "pools.small.client_learning_rate=0.2": ["pools", "one client_learning_rate", "0.2"],
        "pools.large.share=0": ["pools.large.share", "above 0"],
    },
    "digits_submodels.py:fed_rolex": {
        "algorithm.units_per_round=-1": ["algorithm.units_per_round", "at least 0", "-1"],
        "pools.small.model=digits_small": ["pools", "one model for fed_rolex"],
    },
    "digits_submodels.py:fjord": {
        "algorithm.distillation_weight=2": ["algorithm.distillation_weight", "at most 1", "2"],
        "algorithm.temperature=0": ["algorithm.temperature", "above 0", "0"],
    },
    "digits_submodels.py:depth_fl": {
        "algorithm.distillation_weight=-1": ["algorithm.distillation_weight", "at least 0", "-1"],
        "algorithm.ramp_up=-1": ["algorithm.ramp_up", "at least 0", "-1"],
        "pools.large.depth=4": ["pools.large.model", "depth", "3 blocks", "4"],
        "pools.small.model=digits_small": ["pools", "one model for depth_fl"],
    },
    "digits_mhd": {
        "algorithm.candidates=all": ["candidates", "'same_level_and_self'", "'all'"],
        "algorithm.choice=best": ["choice", "'most_confident'", "'best'"],
        "algorithm.teachers=9": ["teachers", "at most the 8 checkpoints", "9"],
        "algorithm.head_weight=-1": ["head_weight", "at least 0", "-1"],
        "parties.heads=-1": ["heads", "at least 0", "-1"],
        "parties.networks=resnet": ["parties.networks", "'digits_small'", "'resnet'"],
        "parties.graph.name=ring": ["parties.graph.name", "'directed_cycle'", "'ring'"],
        "parties.graph.name=islands": ["parties.graph", "'size'", "'islands'"],
        "data.labels_per_client=0": ["per_client", "at least 1", "0"],
        "data.labels_per_client=11": ["per_client", "at most the 10 labels", "11"],
        "data.skew=-1": ["skew", "at least 0", "-1"],
        "data.public_share=0": ["data.public_share", "above 0", "0"],
        "data.num_clients=1": ["parties", "at least 2 clients on a graph", "got 1"],
    },
    "digits_mhd.py:centralised": {"data.public_share=1": ["data.public_share", "both parts some"]},
    "digits_mhd.py:local_only_steps": {
        "training.momentum=2": ["training.momentum", "at most 1", "2"]
    },
    "digits_methods.py:fed_be": {
        "algorithm.sampling=swag": ["algorithm.sampling", "'gaussian', 'dirichlet'", "'swag'"],
        "algorithm.flip=True": ["algorithm.flip", "must be False"],
        "algorithm.distillation_momentum=2": ["algorithm.distillation_momentum"],
    },
    "digits_methods.py:fed_ensemble": {
        "algorithm.num_models=3": ["num_models", "divide the cohort's 8 clients", "3"],
    },
    "digits_methods.py:fed_sdd": {
        "algorithm.num_models=9": ["num_models", "at most the cohort's 8 clients", "9"],
        "algorithm.rounds_kept=0": ["rounds_kept", "at least 1", "0"],
        "algorithm.distilled=none": ["distilled", "'main' or 'all'", "'none'"],
        "algorithm.flip=True": ["algorithm.cached", "algorithm.flip"],
    },
    "digits_methods.py:scaffold": {
        "training.client_optimizer=adam": ["option 2", "plain SGD", "training.optimizer"],
        "training.scaffold_option=3": ["training.scaffold_option", "1 or 2", "3"],
    },
    "digits_methods.py:fed_prox": {
        "training.proximal_weight=-1": ["proximal_weight", "at least 0", "-1"],
    },
    "digits_methods.py:fed_gkd": {
        "training.fed_gkd.models_kept=0": ["training.fed_gkd.models_kept", "at least 1", "0"],
        "training.fed_gkd.weight=-1": ["weight", "at least 0", "-1"],
        "training.fed_gkd.temperature=0": ["temperature", "above 0", "0"],
    },
    "digits_personal.py:fed_per": {
        "training.fed_per.private=head": ["training.fed_per.private", "'head'", "Dense_1"],
    },
    "digits_personal.py:fed_rep": {
        "training.fed_rep.head_epochs=0": ["training.fed_rep.head_epochs", "at least 1", "0"],
    },
    "digits_personal.py:apfl": {
        "training.apfl.alpha=2": ["training.apfl.alpha", "at most 1", "2"],
    },
    "digits_personal.py:per_fed_avg": {
        "training.per_fed_avg.variant=exact": ["training.per_fed_avg.variant", "'exact'"],
    },
    "digits_methods.py:fed_ntd": {
        "training.fed_ntd.not_true_weight=-1": ["training.fed_ntd.not_true_weight", "at least 0"],
        "training.fed_ntd.temperature=0": ["training.fed_ntd.temperature", "above 0", "0"],
    },
    "digits_methods.py:moon": {
        "training.moon.layer=Dense_9": ["training.moon.layer", "'Dense_0', 'Dense_1'", "'Dense_9'"],
        "training.moon.contrast_weight=-1": ["training.moon.contrast_weight", "at least 0"],
        "training.moon.temperature=0": ["training.moon.temperature", "above 0", "0"],
    },
    "digits_parties.py:ds_fl": {
        "algorithm.open_size=5000": ["open_size", "at most the 758 public", "5000"],
        "algorithm.server=6": ["algorithm.server", "6 parties", "got 6"],
    },
    "digits_parties.py:fd": {"algorithm.weight=-1": ["weight", "at least 0", "-1"]},
    "digits_parties.py:fml": {"algorithm.own_weight=2": ["own_weight", "at most 1", "2"]},
    "digits_fed_kd": {
        "training.fed_kd.teacher=digits_medium": ["training.fed_kd.teacher", "'digits_medium'"],
        "training.fed_kd.hidden_map=identity": ["training.fed_kd.hidden_map", "'learned'", "64"],
        "training.fed_kd.exchange=epoch": [
            "training.fed_kd.exchange",
            "'step_gradient'",
            "'epoch'",
        ],
        "training.fed_kd.adaptive=no": ["training.fed_kd.adaptive", "'sample'", "'no'"],
        "training.fed_kd.student_layers=('Dense_0','Dense_0','Dense_0')": [
            "must divide the teacher's 2",
            "got 3",
        ],
        "training.compression.start=0": ["training.compression.start", "above 0", "0"],
        "training.compression.end=1.5": ["training.compression.end", "at most 1", "1.5"],
        "training.compression.start=0.99": [
            "training.compression.end",
            "at least start=0.99",
            "never decrease",
        ],
        "training.compression.range_finder=0": [
            "training.compression.range_finder",
            "at least 1",
            "0",
        ],
        "training.compression.uplink=zip": ["training.compression.uplink", "'top_k'", "'zip'"],
    },
    "digits_compression.py:fed_avg,top_k": {
        "training.compression.share=0": ["training.compression.share", "above 0", "0"],
    },
    "digits_compression.py:fed_avg,quantisation": {
        "training.compression.bits=17": ["training.compression.bits", "at most 16", "17"],
    },
    "digits_compression.py:fed_avg,count_sketch": {
        "training.compression.columns=0": ["columns", "at least 1", "0"],
    },
    "digits_compression.py:fed_dropout": {
        "training.fed_dropout.share=2": ["share", "at most 1", "2"],
    },
    "digits_compression.py:fetch_sgd": {
        "training.fetch_sgd.k=0": ["training.fetch_sgd.k", "at least 1", "0"],
    },
}
# Other beginnings of the command -> parts of the line.
ARGUMENTS = {
    (): ["--config must be given"],
    (CONFIG,): ["--workdir must be given"],
    ("--workdir=none",): ["--config must be given"],
    ("--config=none.py", "--workdir=none"): ["--config", "existing file", "'none.py'"],
    (CONFIG, "--workdir=none", "rounds=4"): ["unexpected argument 'rounds=4'"],
    (CONFIG, "--workdir=none", "--round=4"): ["'round'"],
    (CONFIG, f"--workdir={__file__}", "--processes=2"): ["workdir must be a folder", "is a file"],
    (CONFIG, "--workdir=none", "--processes=0"): ["--processes", "at least 1", "0"],
    (CONFIG, "--workdir=none", "--processes=two"): ["--processes=two", "int"],
    (CONFIG, "--workdir=none", "--distributed", "--processes=2"): ["--processes", "must be 1", "2"],
    (CONFIG, "--workdir=none", "--distributed", "--host=1"): [
        "--coordinator and --num_hosts missing"
    ],
    (CONFIG, "--workdir=none", "--coordinator=a:1", "--num_hosts=2"): ["--host missing"],
    (CONFIG, "--workdir=none", "--coordinator=a:http", "--num_hosts=2", "--host=1"): [
        "--coordinator",
        "HOST:PORT",
        "'a:http'",
    ],
    (CONFIG, "--workdir=none", "--coordinator=a:1", "--num_hosts=2", "--host=2"): [
        "--host",
        "between 0 and 1",
        "2",
    ],
    (CONFIG, "--workdir=none", "--coordinator=a:1", "--num_hosts=2", "--host=one"): ["--host=one"],
    ("--config.rounds=4", CONFIG, "--workdir=none"): ["--config.rounds", "before"],
    (f"{CONFIG}:fedavg", "--workdir=none"): ["a run of this config", "'fed_avg'", "'fedavg'"],
    (PERIODIC, "--workdir=none", "--config.algorithm.period=0"): ["period", "at least 1", "0"],
    (f"{FED_KD}:best", "--workdir=none"): [
        f"error: {FED_KD}:best: a run of this config is",
        "'best'",
    ],
}
# Lines added to the digits config -> parts of the line.
FILES = {
    "config.pols": ["pols", 'Did you mean "pools"'],
    "del config.evaluation": ["the config lacks 'evaluation'"],
    "del config.data.concentration": ["the config lacks 'data.concentration'"],
    "config.data = dict(name='prepared')": ["the config lacks 'data.folder'"],
    "config.rounds.x.y": ["'int' object has no attribute 'x'"],
    "with config.ignore_type(): config.rounds = 'many'": ["rounds", "integer", "'many'"],
    "with config.ignore_type(): config.rounds = 2.5": ["rounds", "integer", "2.5"],
    "with config.ignore_type(): config.algorithm.alpha = 'half'": [
        "algorithm.alpha",
        "number",
        "'half'",
    ],
    "config.pools.small.teaching.strength = 1": ["strength"],
    "config.loggers = ('watch:make',)": ["callbacks must be functions of records", "step"],
    "config.pools.small.unlock(": ["never closed", "config"],
    "import a_library_that_is_not_there": ["a_library_that_is_not_there"],
    "config.rounds = 1 / 0": ["division by zero"],
    "config.rounds = 'a' + 1": [".py: TypeError: can only concatenate str"],
    "config.pools = {}": ["pools must name at least one pool"],
    "raise SystemExit(0)": ["sys.exit(0)", "(line "],
    "raise RuntimeError('its own')": ["RuntimeError: its own (line "],
    "with config.ignore_type(): config.pools = [1]": ["pools must be a group", "got [1]"],
    "with config.ignore_type(): config.rounds = 1e12": ["rounds must be an integer", "got 1000000"],
    "with config.ignore_type(): config.training.epochs = 10**12": [
        "training.epochs must be at most"
    ],
    "with config.ignore_type(): config.execution.stream = 'no'": ["execution.stream", "'no'"],
    "with config.ignore_type(): config.execution.processes = 'two'": [
        "execution.processes",
        "'two'",
    ],
    "with config.unlocked(): config.note = object()": ["note must be numbers, text"],
    "config.training.epochs = 2_000_000": ["training.epochs must be at most 1,000,000"],
    "config.algorithm.batch_size = 10**9": ["algorithm.batch_size must be at most 1,048,576"],
    "config.algorithm.steps = 10**9": ["algorithm.steps must be at most 33,554,431 with batches"],
    "config.seeds = 10**9": ["seeds must be at most 10,000"],
    "del config.name": ["the config lacks 'name'"],
}


def run_many(cases: list[list[str]], environment) -> list[subprocess.CompletedProcess]:
    """Runs commands as processes that import the library once; see many_commands.py."""
    done = subprocess.run(
        [sys.executable, str(HERE / "many_commands.py")],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = zip(cases, json.loads(done.stdout), strict=True)
    return [subprocess.CompletedProcess(case, *result) for case, result in results]


def assert_refused(done, *parts: str, status: int = 2) -> None:
    __tracebackhide__ = True
    assert done.returncode == status, (done.returncode, done.stderr)
    # XLA of JAX 0.9 logs each program that it finds compiled.
    said = [line for line in done.stderr.splitlines() if " cpu_aot_loader.cc:" not in line]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("error: ")
    for part in parts:
        assert part in said[0]


@pytest.fixture(scope="module")
def answers(environment, tmp_path_factory):
    """The answers to all cases above, and the folder that no case may create."""
    folder = tmp_path_factory.mktemp("bad")
    cases = {}
    # A logger that no run can call.
    (folder / "watch.py").write_text("def make(folder): return lambda records, step: None")
    for setting in SETTINGS:
        cases[setting] = [CONFIG, f"--workdir={folder / 'run'}", f"--config.{setting}"]
    for arguments in ARGUMENTS:
        cases[arguments] = list(arguments)
    for index, line in enumerate(FILES):
        source = (ROOT / CONFIG.removeprefix("--config=")).read_text()
        path = folder / f"config_{index}.py"
        path.write_text(source.replace("    return config\n", f"    {line}\n    return config\n"))
        cases[line] = [f"--config={path}", f"--workdir={folder / 'run'}"]
    done = run_many(list(cases.values()), environment)
    assert not (folder / "run").exists()
    assert not (ROOT / "none").exists()
    return dict(zip(cases, done, strict=True))


@pytest.fixture(scope="module")
def answers_to_others(environment, tmp_path_factory):
    """What settings of other configs were answered."""
    folder = tmp_path_factory.mktemp("others")
    cases = {}
    for name, settings in OTHER_CONFIGS.items():
        file, _, run = name.partition(".py:")
        for setting in settings:
            config = f"--config=fedcodist/configs/{file}.py{run and ':' + run}"
            cases[name, setting] = [config, f"--workdir={folder / 'run'}", f"--config.{setting}"]
    done = run_many(list(cases.values()), environment)
    assert not (folder / "run").exists()
    return dict(zip(cases, done, strict=True))


@pytest.mark.parametrize("setting", SETTINGS)
def test_setting(setting, answers):
    assert_refused(answers[setting], *SETTINGS[setting])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting"), [(name, each) for name, own in OTHER_CONFIGS.items() for each in own]
)
def test_setting_of_another_config(name, setting, answers_to_others):
    assert_refused(answers_to_others[name, setting], *OTHER_CONFIGS[name][setting])


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=" ".join)
def test_arguments(arguments, answers):
    assert_refused(answers[arguments], *ARGUMENTS[arguments])


@pytest.mark.parametrize("line", FILES)
def test_config_file(line, answers):
    assert_refused(answers[line], *FILES[line])


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_the_real_command(processes, run, tmp_path):
    workdir, processes = tmp_path / "run", f"--processes={processes}"
    assert_refused(run(workdir, "--config.algorithm.alpha=1.5", processes), "alpha", "1.5")
    assert not (workdir / "config.json").exists()


def test_the_real_command_with_a_mistyped_setting(run, tmp_path):
    done = run(tmp_path / "run", "--config.pools.smal.alpha=1")
    assert_refused(done, "--config.pools.smal.alpha", "did you mean --config.pools.small.alpha?")


# Prepared data.


@pytest.fixture(scope="module")
def prepared(environment, tmp_path_factory):
    """Damage -> the command's answer to a prepared folder with it."""
    folder = tmp_path_factory.mktemp("prepared")
    draw = np.random.default_rng(0)
    splits = {
        name: FederatedData.from_arrays(
            {
                "image": draw.integers(0, 256, (clients * 4, 32, 32, 3)).astype(np.uint8),
                "label": draw.integers(0, 10, clients * 4).astype(np.int32),
            },
            offsets=np.arange(clients + 1) * 4,
        )
        for name, clients in (("train", 6), ("distillation", 1), ("held_out", 1), ("test", 1))
    }
    save_prepared(folder / "whole", splits, source="made up", licence="none", arguments={})

    def edited(path):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    damages = {
        "missing": lambda data: shutil.rmtree(data),
        "without manifest": lambda data: (data / "manifest.json").unlink(),
        "corrupt manifest": lambda data: (data / "manifest.json").write_text("{"),
        "edited manifest": lambda data: (data / "manifest.json").write_text(
            (data / "manifest.json").read_text().replace("made up", "made down")
        ),
        "truncated": lambda data: (data / "train" / "image.npy").write_bytes(
            (data / "train" / "image.npy").read_bytes()[:-100]
        ),
        "edited": lambda data: edited(data / "train" / "label.npy"),
        "without a file": lambda data: (data / "test" / "image.npy").unlink(),
        "crop too large": lambda data: None,
    }
    source = (ROOT / CONFIG.removeprefix("--config=")).read_text()
    cases = []
    for name, damage in damages.items():
        data = folder / name.replace(" ", "_")
        shutil.copytree(folder / "whole", data)
        damage(data)
        crop = 40 if name == "crop too large" else 24
        settings = (
            f"    config.data = dict(name='prepared', folder={str(data)!r}, crop={crop}, seed=0,\n"
            "        padding=0, augmentation='per_image', unlabelled_folder=None, num_unlabelled=None)\n"
        )
        models = "".join(
            f"    config.pools.{pool}.model = 'cnn_{pool}'\n"
            f"    config.pools.{pool}.cohort_size = 2\n"
            for pool in ("small", "large")
        )
        path = folder / f"{data.name}.py"
        path.write_text(
            source.replace("    return config\n", settings + models + "    return config\n")
        )
        cases.append([f"--config={path}", f"--workdir={folder / 'run'}"])
    done = run_many(cases, environment)
    assert not (folder / "run").exists()
    return dict(zip(damages, done, strict=True))


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        ("missing", ["data.folder", "there is no", "missing", "datasets/*/prepare.py"]),
        ("without manifest", ["manifest.json", "cannot be read"]),
        ("corrupt manifest", ["manifest.json", "not valid JSON"]),
        ("edited manifest", ["manifest.json", "changed"]),
        ("truncated", ["train/image.npy", "truncated"]),
        ("edited", ["train/label.npy", "edited"]),
        ("without a file", ["test/image.npy", "missing"]),
        ("crop too large", ["crop", "40", "32"]),
    ],
)
def test_prepared_folder(damage, parts, prepared):
    assert_refused(prepared[damage], *parts)


# Run folders.


@pytest.fixture(scope="module")
def folders(small, uninterrupted, environment, tmp_path_factory):
    """What the command says to run folders that are not its own."""
    folder = tmp_path_factory.mktemp("folders")
    for name in ("run", "truncated", "foreign"):
        shutil.copytree(uninterrupted, folder / name)
    (folder / "foreign" / "config.json").unlink()
    metrics = folder / "truncated" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-10])
    shutil.copytree(folder / "run", folder / "unreadable")
    (folder / "unreadable" / "config.json").write_text("{")
    (folder / "file").touch()
    plan = "--config.execution.seeds_loop=vmap"
    cases = {
        "config": ["run", "--config.algorithm.alpha=0.25"],
        "plan": ["run", plan],
        "changed plan": ["run", plan, "--change_plan"],
        "same": ["run", plan],
        "truncated": ["truncated"],
        "foreign": ["foreign"],
        "unreadable": ["unreadable"],
        "file": ["file"],
    }
    commands = [[CONFIG, *small, f"--workdir={folder / c[0]}", *c[1:]] for c in cases.values()]
    return dict(zip(cases, run_many(commands, environment), strict=True))


@pytest.mark.slow
def test_the_run_folder_of_another_config(folders):
    assert_refused(folders["config"], "run folder", "algorithm.alpha is 0.5 there and 0.25 here")


@pytest.mark.slow
def test_the_run_folder_of_another_plan(folders):
    assert_refused(folders["plan"], "execution plan", "seeds_loop is 'map' there and 'vmap' here")
    assert "--change_plan" in folders["plan"].stderr
    # With the flag it goes on, and the folder has the new plan from then on.
    assert folders["changed plan"].returncode == 0
    assert folders["same"].returncode == 0


@pytest.mark.slow
def test_a_run_folder_that_was_edited(folders):
    assert_refused(folders["truncated"], "metrics.jsonl", "truncated or edited")
    assert_refused(folders["unreadable"], "cannot read", "config.json")


@pytest.mark.slow
def test_a_folder_that_holds_no_run(folders):
    assert_refused(folders["foreign"], "is not empty and holds no run")
    assert_refused(folders["file"], "is a file")


# While it runs.


@pytest.mark.slow
def test_a_full_disk_while_a_checkpoint_is_written(uninterrupted, run, tmp_path):
    folder = tmp_path / "run"
    done = run(folder, fault="checkpoint:7:full")
    assert_refused(done, "cannot write checkpoint", "round_00000007", "No space left on device")
    # The checkpoint before is complete, and the run continues from it when there is space again.
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["round_00000004.msgpack"]
    before, whole = (
        (path / "checkpoints" / "round_00000004.msgpack").stat().st_size
        for path in (folder, uninterrupted)
    )
    assert abs(before - whole) < 16  # it holds seconds too
    assert not (folder / "summary.json").exists()


@pytest.mark.slow
def test_a_run_goes_on_after_the_disk_was_full(uninterrupted, run, tmp_path):
    folder = tmp_path / "run"
    assert run(folder, fault="checkpoint:7:full").returncode == 2
    assert run(folder).returncode == 0
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert metrics == (uninterrupted / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_full_disk_while_the_summary_is_written(run, tmp_path):
    done = run(tmp_path / "run", fault="summary:0:full")
    assert_refused(done, "cannot write", "summary.json", "No space left on device")
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_an_update_that_is_not_finite(small, environment, tmp_path):
    folder = tmp_path / "run"
    settings = [CONFIG, *small, f"--workdir={folder}"]
    (done,) = run_many([[*settings, "--config.pools.large.client_learning_rate=1e30"]], environment)
    assert_refused(done, "non-finite update in round 1, pool 'large', seed 0", "training stopped")
    assert not list(folder.glob("checkpoints/*"))


@pytest.mark.slow
def test_a_codistillation_that_is_not_finite(small, environment, tmp_path):
    folder = tmp_path / "run"
    settings = [PERIODIC, *small, f"--workdir={folder}"]
    settings += ["--config.algorithm.period=6", "--config.evaluation.checkpoint_every=2"]
    settings += ["--config.pools.small.teaching.learning_rate=1e38"]
    settings += ["--config.algorithm.distillation_optimizer=sgd"]
    (done,) = run_many([settings], environment)
    assert_refused(
        done,
        "non-finite model or server state in round 6, pool 'small', seed 0",
        "training stopped",
    )
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "round_00000002.msgpack",
        "round_00000004.msgpack",
    ]


@pytest.mark.slow
def test_a_period_longer_than_the_run_is_a_warning(small, environment, tmp_path):
    settings = [PERIODIC, *small, f"--workdir={tmp_path / 'run'}"]
    settings += ["--config.rounds=1", "--config.algorithm.period=2"]
    (done,) = run_many([settings], environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("warning: period=2 is longer than the run of 1 round")
