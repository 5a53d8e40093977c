"""The cost of a distillation step with more clients: FedDF has more teachers then, FedSDD does not.

    python benchmarks/distillation_cost.py [--clients 8 14 20 100] [--turns 2] [--steps 2]

The setting of FedSDD's table 3: a student of ResNet-20 learns from the mean logits of an ensemble of
ResNet-20s, 256 images at a time, cropped and flipped. The ensemble has as many members as there are
clients in a round (FedDF), or four aggregated models (FedSDD, K = 4 and R = 1). Each measurement has its
own process, on the accelerator if there is one, otherwise on all cores; measurements take turns. The
record is written to results/benchmarks/. With 100 clients a step of FedDF takes long on a CPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
import records
from peers import measuring

from fedcodist.core import child_processes

KIND = RECORD = "distillation_cost"
METHODS = {"fed_df": "FedDF", "fed_sdd": "FedSDD"}
CLIENTS = (8, 14, 20, 100)
MODELS = 4  # of FedSDD
NETWORKS = ("resnet20", "cnn_small")
REPETITIONS = 3  # in each process
TEMPERATURE, LEARNING_RATE = 4.0, 0.1
# Table 3: method -> clients -> seconds that 5,000 steps of 256 images take on an A100.
PAPER = {
    "fed_df": {8: 223.6, 14: 337.0, 20: 447.1},
    "fed_sdd": {8: 174.1, 14: 177.1, 20: 175.5},
}
PAPER_STEPS = 5000


class Configuration(NamedTuple):
    """One measurement: `clients` in a round, `teachers` in the ensemble."""

    method: str
    clients: int
    teachers: int


def main() -> int:
    """Measures, or is one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--network", choices=NETWORKS, default=NETWORKS[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2, help="between two looks at the clock")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("batch", "steps", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if min(options.clients) < MODELS:
        parser.error(f"--clients must be at least {MODELS}, a model's each, got {options.clients}")
    if options.one:
        one = Configuration(*json.loads(options.one))
        print(json.dumps(measure(one.teachers, options.network, options.batch, options.steps)))
        return 0
    lines: dict[Configuration, list[dict[str, Any]]] = {
        each: [] for each in configurations(options.clients)
    }
    for _ in range(options.turns):
        for each in lines:
            lines[each].append(run(each, options))
    device = next(line["device"] for own in lines.values() for line in own)
    record = {
        **records.common(RECORD, KIND, device),
        "network": options.network,
        "batch": options.batch,
        "steps": options.steps,
        "turns": options.turns,
        "measured": [{**each._asdict(), **summary(own)} for each, own in lines.items()],
    }
    print(table(record))
    records.write(record, options.results)
    return 0


def configurations(clients) -> list[Configuration]:
    """Both methods with each number of clients."""
    return [
        Configuration(method, count, {"fed_df": count, "fed_sdd": MODELS}[method])
        for count in clients
        for method in METHODS
    ]


def summary(lines: list[Mapping[str, Any]]) -> dict[str, Any]:
    """A configuration's figures over all turns."""
    return {
        "seconds_per_step": [each for line in lines for each in line["seconds_per_step"]],
        "peak_rss_mb": [line["peak_rss_mb"] for line in lines],
    }


def run(configuration: Configuration, options: argparse.Namespace) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [
        *(sys.executable, str(Path(__file__).resolve()), "--one", json.dumps(configuration)),
        *(f"--{name}={getattr(options, name)}" for name in ("network", "batch", "steps")),
    ]
    done = child_processes.run(command, stdout=subprocess.PIPE, text=True)
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def measure(teachers: int, network: str, batch: int, steps: int) -> dict[str, Any]:
    """A process's figures: seconds per step of each repetition after one that compiles."""
    import jax

    step, arguments = prepare(teachers, network, batch, steps)
    jax.block_until_ready(step(*arguments))
    seconds = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        jax.block_until_ready(step(*arguments))
        seconds.append((time.perf_counter() - started) / steps)
    return {
        "seconds_per_step": seconds,
        "peak_rss_mb": measuring.peak_memory_mb(),
        "device": machine.accelerator() or machine.device(),
    }


def prepare(teachers: int, network: str, batch: int, steps: int):
    """(the compiled steps of a distillation as in FedDF and FedSDD, their arguments)."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from fedcodist.core.from_linen import from_flax_linen
    from fedcodist.core.inputs import Examples
    from fedcodist.data import augmentation
    from fedcodist.distillation.divergences import kl_divergence, softened
    from fedcodist.distillation.divergences import softened_target as target
    from fedcodist.distillation.ensembles import equal_weights, mean_logits
    from fedcodist.distillation.loop import distill
    from fedcodist.distillation.settings import Distillation
    from fedcodist.models import cnn, resnet

    size, create = {
        "resnet20": (32, resnet.resnet20),
        "cnn_small": (24, cnn.small_cnn),
    }[network]
    model = from_flax_linen(create(), jnp.zeros((1, size, size, 3)))
    student = model.init(jax.random.key(0))
    members = jax.vmap(model.init)(jax.random.split(jax.random.key(1), teachers))
    images = np.random.default_rng(0).integers(0, 256, (steps * batch, 32, 32, 3), dtype=np.uint8)
    rows = Examples({"image": jnp.asarray(images)}, jnp.arange(steps * batch).reshape(steps, batch))
    settings = Distillation(
        steps,
        batch,
        optax.sgd,
        mixup_beta=0,
        preprocess=augmentation.image_preprocess(
            augmentation.pad(4 if size == 32 else 0),
            augmentation.random_crop(size, size),
            augmentation.random_horizontal_flip,
            augmentation.normalise((0.5,) * 3, (0.25,) * 3),
        ),
    )

    @jax.jit
    def distilled(student, members, rows):
        return distill(
            models={"main": model},
            students={"main": student},
            teachers={"ensemble": mean_logits(model, equal_weights(members))},
            targets=lambda _, outputs: target(outputs["ensemble"], TEMPERATURE),
            unlabelled=rows,
            key=jax.random.key(2),
            learning_rates={"main": LEARNING_RATE},
            settings=settings,
            divergence=softened(kl_divergence("forward"), TEMPERATURE, scaled=True),
        ).students["main"]

    return distilled, (student, members, rows)


def medians(record: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Method -> clients -> milliseconds per step."""
    found: dict[str, dict[int, float]] = {method: {} for method in METHODS}
    for own in record["measured"]:
        value = 1000 * statistics.median(own["seconds_per_step"])
        found[own["method"]][own["clients"]] = value
    return found


def plot(record: Mapping[str, Any]):
    """Milliseconds per step by the number of clients, a line for each method."""
    from matplotlib.figure import Figure

    from fedcodist.report.styles import COLOURS, MARKERS

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axis = figure.subplots()
    for number, (method, by_clients) in enumerate(medians(record).items()):
        style = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 4}
        axis.plot(list(by_clients), list(by_clients.values()), label=METHODS[method], **style)
    axis.set_xlabel("Clients in a round")
    axis.set_ylabel("Distillation, ms/step")
    axis.set_ylim(bottom=0)
    axis.grid(color="0.9", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


def table(record: Mapping[str, Any]) -> str:
    """Medians as text."""
    lines = [
        f"{record['device']}: {record['network']}, {record['batch']} images a step",
        f"{'':<10}{'clients':>8}{'teachers':>10}{'ms/step':>12}{'peak, MB':>10}",
    ]
    for own in record["measured"]:
        lines.append(
            f"{METHODS[own['method']]:<10}{own['clients']:>8}{own['teachers']:>10}"
            f"{1000 * statistics.median(own['seconds_per_step']):12.1f}"
            f"{statistics.median(own['peak_rss_mb']):10.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(child_processes.until_interrupted(main, "interrupted."))
