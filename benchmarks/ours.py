"""The work of benchmarks/peers/ done by fedcodist, with the same arguments and the same report.

    python benchmarks/ours.py --workload cnn_small --inputs build/benchmarks/cnn_small.npz \
        --processes 2

The library visits a client's examples in an order drawn from the seed. The peers visit them in the order
of the file. So if weights are saved to be compared, examples are stored such that the first round's
drawn order is that of the file. The drawing itself is always in the measured time. Cohorts, unlabelled
examples and initial weights are the file's. Clients are trained at once with --accelerator, and if
networks are dense. On processors, clients with convolutions or text are trained one after another. Each
is the faster way there (BUILD.md explains how to choose).
"""

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
from peers import measuring
from peers import workload as work

from fedcodist.run import compilation_cache, launch

SEED = 0
PARTIES = ("fed_md", "mhd")  # methods of parties; each party is a pool of the file
MHD_CLIENTS = "clients"  # the only architecture
HYPERS = {  # of HTFL_METHODS, the first part of their names
    "local_only": "LocalOnly",
    "fd": "FD",
    "fml": "FML",
    "lg_fed_avg": "LGFedAvg",
    "fed_proto": "FedProto",
    "fed_kd_parties": "FedKDParties",
}


def main() -> int:
    """Starts the processes, or measures in one of them."""
    arguments = measuring.parse_arguments(__doc__, accelerated=True)
    if not arguments.accelerator:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if not launch.is_child():
        measuring.limit_cores(arguments.processes * arguments.threads)
        return launch.supervise([sys.executable, *sys.argv], arguments.processes)
    launch.join()
    compilation_cache.cache_compilations()  # as `fedcodist run` does
    if arguments.accelerator and machine.accelerator() is None:
        print("error: --accelerator: JAX finds none.", file=sys.stderr)
        return 2
    measure(arguments)
    return 0


def measure(arguments) -> None:
    """Runs the benchmark and reports from the first process."""
    import jax

    jax.config.update("jax_enable_x64", arguments.double)
    inputs = read_inputs(arguments.inputs, arguments.workload, arguments.double)
    most_rounds = max(arguments.first_rounds, arguments.rounds_per_repetition)
    is_compared = arguments.save_weights is not None
    prepared = prepare(inputs, most_rounds, arguments.accelerator, is_compared)

    def save():
        if jax.process_index() == 0:
            measuring.save_weights(prepared.weights(), arguments)

    times = measuring.run(prepared.train, save, arguments, time.perf_counter)
    if jax.process_index() == 0:
        measuring.report(
            "fedcodist",
            version("fedcodist"),
            arguments,
            times,
            measuring.peak_memory_mb(os.getppid()),
            device=machine.accelerator(),
            peak_device_mb=machine.peak_accelerator_mb(),
        )


def read_inputs(path: Path, workload: str, double: bool = False) -> work.Inputs:
    """A workload's file; where only clients train, pixels remain bytes as in a prepared folder.

    With `double` they are normalised as the peers do it, to float64.
    """
    as_bytes = work.WORKLOADS[workload].distillation is None and not double
    return work.read_inputs(path, workload, double, as_bytes)


class Prepared(NamedTuple):
    """A workload that is ready to be trained.

    Attributes:
      train: number of rounds -> None; always from round 0, so always on the same cohorts.
      weights: () -> pool -> its weights in the common layout.
      lowered: () -> the `jax.stages.Lowered` of a call of `train`.
    """

    train: Callable[[int], None]
    weights: Callable[[], dict[str, dict[str, Any]]]
    lowered: Callable[[], Any]


def prepare(
    inputs: work.Inputs, most_rounds: int, at_once: bool = False, in_order: bool = False
) -> Prepared:
    """Puts a workload on all devices; nothing but initialisation compiles yet.

    Args:
      inputs: the workload.
      most_rounds: the largest number of rounds of a call of `train`.
      at_once: whether a device trains its clients at once; with dense networks it always does.
      in_order: whether round 0 visits the examples in the order of the file.
    """
    import jax
    import numpy as np

    from fedcodist.algorithms.parties.shared_examples import PUBLIC
    from fedcodist.core.client_states import device_client_states
    from fedcodist.distillation.unlabelled_batches import UNLABELLED
    from fedcodist.run.placement import all_devices, replicate, replicate_data
    from fedcodist.run.programs import build_programs
    from fedcodist.run.sources import resident_data

    mesh = all_devices()
    federated = make_data(inputs, in_order)
    algorithm = make_algorithm(inputs, federated, at_once)
    programs = build_programs(algorithm, most_rounds, mesh)
    rows = {}
    if inputs.unlabelled is not None:
        rows[UNLABELLED] = {"image": inputs.unlabelled}
    if method_of(inputs) in PARTIES:
        rows = {PUBLIC: rows[UNLABELLED]}
    data = replicate_data(resident_data(federated, rows), mesh)
    some_pool = next(iter(inputs.pools.values()))
    floats = next(iter(some_pool.weights.values())).dtype.type
    hyper = replicate(jax.tree.map(floats, algorithm.hyper), mesh)
    seeds = replicate(np.full(1, SEED, np.uint32), mesh)
    kept = replicate(device_client_states(algorithm.client_states, 1), mesh)
    state = programs.init(seeds), kept

    def arguments(rounds):
        return *state, seeds, np.int32(0), np.int32(rounds), hyper, data

    def train(rounds):
        nonlocal state
        state = jax.block_until_ready(programs.train(*arguments(rounds))[:2])

    def weights():
        servers = getattr(state[0], "models", state[0])  # FedSDD's state has more than its models
        if inputs.privacy is not None:
            servers = {name: server.inner for name, server in servers.items()}
        if method_of(inputs) == "fed_md":
            # Of an architecture's only party.
            servers = {n: jax.tree.map(lambda x: x[:, 0], p.variables) for n, p in servers.items()}
        if method_of(inputs) == "mhd":
            models = state[0].learners[MHD_CLIENTS].variables
            servers = {
                name: jax.tree.map(lambda x, client=client: x[:, client], models)
                for client, name in enumerate(inputs.pools)
            }
        if method_of(inputs) in work.HTFL_METHODS:
            servers = htfl_weights(state[0], inputs)
        if method_of(inputs) == "fed_kd":
            # All clients' teachers, stacked.
            student, rows = state[0][work.STUDENT], state[1][work.STUDENT]
            servers = {
                work.STUDENT: student.inner.averaging,
                work.TEACHER: rows.inner.teacher,
            }
        return {n: common_weights(p.network, servers[n]) for n, p in inputs.pools.items()}

    def lowered():
        return programs.train.lower(*arguments(most_rounds))

    return Prepared(train, weights, lowered)


def make_data(inputs: work.Inputs, in_order: bool):
    """The clients' examples; `in_order`, such that round 0 visits them in the order of the file."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fedcodist.algorithms.pools.grouped_models import MAIN
    from fedcodist.core import keys
    from fedcodist.core.method import client_key
    from fedcodist.core.shuffling import permuted_positions
    from fedcodist.data.federated_data import FederatedData

    # The file of parties has our orders.
    if not in_order or method_of(inputs) in (*PARTIES, *work.HTFL_METHODS):
        return FederatedData.from_arrays(columns_of(inputs), offsets=inputs.offsets)
    sizes = np.diff(inputs.offsets)
    positions = jnp.arange(sizes.max())

    @functools.partial(jax.jit, static_argnums=0)
    def order_of(pool, client, size):
        key = keys.derive(client_key(jax.random.key(SEED), 0, pool), client, "order")
        return permuted_positions(key, positions, size)

    images, labels = inputs.images, inputs.labels
    is_sdd = method_of(inputs) == "fed_sdd"  # clients of its groups draw from one stream
    pools = dict(inputs.pools)
    if method_of(inputs) == "fed_kd":
        del pools[work.TEACHER]  # the same clients, on the same batches
    for name, pool in pools.items():
        for client in pool.cohorts[0]:
            rows, size = inputs.rows_of(client), sizes[client]
            order = rows.start + np.asarray(order_of(MAIN if is_sdd else name, client, size))[:size]
            images[order], labels[order] = images[rows].copy(), labels[rows].copy()
    return FederatedData.from_arrays(columns_of(inputs), offsets=inputs.offsets)


def columns_of(inputs: work.Inputs):
    """Examples as this library stores them: whole sentences, with tokens in few bits."""
    import numpy as np

    if not is_text(inputs.workload):
        return {"image": inputs.images, "label": inputs.labels}
    whole = np.concatenate([inputs.images, inputs.labels[:, -1:]], axis=1)
    return {"tokens": whole.astype(np.uint16)}


def is_text(workload: str) -> bool:
    """Whether a workload's networks read text."""
    networks = work.WORKLOADS[workload].networks.values()
    return any(isinstance(network, work.LanguageNetwork) for network in networks)


def is_dense(workload: str) -> bool:
    """Whether a workload's networks have only dense layers."""
    networks = work.WORKLOADS[workload].networks.values()
    return all(isinstance(each, work.Network) and not each.convolutions for each in networks)


def make_algorithm(inputs: work.Inputs, federated, at_once: bool):
    """The workload's method with the file's initial weights, cohorts and unlabelled examples."""
    import jax.numpy as jnp
    import optax

    from fedcodist.algorithms.pools.codistillation import TeachingHyper
    from fedcodist.algorithms.pools.independent_pools import independent_pools
    from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
    from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
    from fedcodist.core.for_each_client import Execution
    from fedcodist.core.inputs import Selection
    from fedcodist.distillation.settings import Distillation
    from fedcodist.distillation.unlabelled_batches import UNLABELLED

    if method_of(inputs) == "fed_md":  # every architecture has one party
        return make_fed_md(inputs)
    execution = Execution()
    if at_once or is_dense(inputs.workload):
        clients = work.WORKLOADS[inputs.workload].cohort
        execution = Execution("vmap", len(inputs.pools) if method_of(inputs) == "mhd" else clients)
    if method_of(inputs) == "mhd":
        return make_mhd(inputs, execution)
    if method_of(inputs) == "fed_kd":
        return make_fed_kd(inputs, federated, execution)
    if method_of(inputs) in work.HTFL_METHODS:
        return make_htfl(inputs, at_once)
    pools = {name: make_pool(inputs, name) for name in inputs.pools}
    cohorts = {name: jnp.asarray(pool.cohorts) for name, pool in inputs.pools.items()}
    distillation, rows = work.WORKLOADS[inputs.workload].distillation, {}
    if distillation is not None:
        rows[UNLABELLED] = jnp.asarray(inputs.unlabelled_rows)
    if distillation is None:
        algorithm = independent_pools(pools, federated.columns, execution)
    elif distillation.method == "fed_sdd":
        algorithm = make_fed_sdd(inputs, pools, federated, distillation.steps, execution)
    else:
        optimizer = functools.partial(optax.adam, eps=work.STUDENT_EPSILON)
        steps, batch = distillation.steps, work.DISTILLATION_BATCH
        teaching = TeachingHyper(
            work.STUDENT_LEARNING_RATE, decay=1.0, interpolation=work.INTERPOLATION
        )
        settings = {
            "num_unlabelled": work.UNLABELLED,
            "num_rounds": 1,
            "distillation": Distillation(steps, batch, optimizer, mixup_beta=0.0),
            "teaching": dict.fromkeys(pools, teaching),
            "execution": execution,
        }
        if distillation.method == "merged":
            settings["alpha"] = work.ALPHA
            algorithm = merged_codistillation(pools, federated.columns, **settings)
        else:
            algorithm = periodic_codistillation(pools, federated.columns, period=1, **settings)

    def select(round, key):
        clients = {name: drawn[round % len(drawn)] for name, drawn in cohorts.items()}
        return Selection(clients, {name: each[round % len(each)] for name, each in rows.items()})

    return algorithm._replace(select=select)


def make_fed_sdd(inputs: work.Inputs, pools, federated, steps: int, execution):
    """FedSDD; each model starts from its own weights in the file."""
    import numpy as np
    import optax

    from fedcodist.algorithms.pools.fed_sdd import FedSDDHyper, fed_sdd
    from fedcodist.distillation.settings import Distillation

    first = next(iter(pools.values()))
    everyone = np.concatenate([pool.clients for pool in pools.values()])
    cohort = sum(pool.cohort_size for pool in pools.values())
    algorithm = fed_sdd(
        first._replace(clients=everyone, cohort_size=cohort),
        federated.columns,
        work.UNLABELLED,
        num_models=len(pools),
        distillation=Distillation(steps, work.DISTILLATION_BATCH, optax.sgd, mixup_beta=0.0),
        hyper=FedSDDHyper(work.TEACHING_RATE, work.TEACHING_TEMPERATURE),
        execution=execution,
    )

    def init(key):
        models = {name: pool.method.init(key) for name, pool in pools.items()}
        return algorithm.init(key)._replace(models=models)

    return algorithm._replace(init=init)


def make_fed_md(inputs: work.Inputs):
    """FedMD; parties start from the file's weights and align on its unlabelled examples."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from fedcodist.algorithms.parties import fed_md
    from fedcodist.algorithms.parties.alignment import Alignment
    from fedcodist.algorithms.parties.groups import PartyGroup
    from fedcodist.algorithms.parties.party import everybody
    from fedcodist.algorithms.parties.shared_examples import PUBLIC
    from fedcodist.core.from_linen import from_flax_linen
    from fedcodist.core.local_training import LocalTraining
    from fedcodist.models.fed_md import FedMDNetwork, output_penalty

    adam = functools.partial(optax.adam, eps=work.PARTY_EPSILON)
    digest = LocalTraining(adam, work.DIGEST_BATCH, epochs=1)
    revisit = LocalTraining(adam, work.BATCH, epochs=1)
    groups, models = {}, {}
    for index, (name, (network, _, weights, _)) in enumerate(inputs.pools.items()):
        module = FedMDNetwork(network.widths, 0.0, network.classes)
        model = from_flax_linen(module, jnp.zeros((1, *network.image)))
        groups[name] = PartyGroup(model, np.array([index]))
        own = own_weights(network, weights)
        models[name] = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], own)
    rows = jnp.asarray(inputs.unlabelled_rows.reshape(len(inputs.unlabelled_rows), 1, -1))
    algorithm = fed_md.fed_md(
        groups,
        Alignment(
            np.zeros(work.UNLABELLED, np.int32),
            rows.shape[-1],
            inference_batch_size=work.ANSWER_BATCH,
        ),
        network.classes,
        digest,
        revisit,
        gradient_hook=output_penalty(work.OUTPUT_PENALTY),
        hyper=fed_md.FedMDHyper(work.PARTY_RATE, work.PARTY_RATE),
    )

    def select(round, key):
        return everybody(groups, {PUBLIC: rows[round % len(rows)]})

    return algorithm._replace(init=lambda key: fed_md.start(models, digest, revisit), select=select)


def make_mhd(inputs: work.Inputs, execution):
    """MHD on a complete graph; clients start from the file's weights."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from fedcodist.algorithms.graph import graphs
    from fedcodist.algorithms.graph.mhd_exchange import CheckpointExchange, exchange_schedule
    from fedcodist.algorithms.graph.mhd_losses import HeadDistillation
    from fedcodist.algorithms.graph.multi_headed_distillation import (
        MHDHyper,
        multi_headed_distillation,
        start,
    )
    from fedcodist.algorithms.parties.groups import PartyGroup
    from fedcodist.core.local_steps import StepTraining
    from fedcodist.models.cnn import CNN
    from fedcodist.models.digits import MLP
    from fedcodist.models.multi_headed import multi_headed

    network, count = next(iter(inputs.pools.values())).network, len(inputs.pools)
    backbone = MLP(network.hidden, None)
    if network.convolutions:
        filters = tuple(features for features, _ in network.convolutions)
        backbone = CNN(filters, network.hidden, None, network.image[0])
    example = jnp.zeros((1, *network.image))
    model = multi_headed(backbone, example, network.classes, network.heads)
    groups, graph = {MHD_CLIENTS: PartyGroup(model, np.arange(count))}, graphs.complete(count)
    training = StepTraining(
        functools.partial(optax.sgd, momentum=work.MHD_MOMENTUM),
        work.MHD_BATCH,
        work.WORKLOADS[inputs.workload].distillation.steps,
    )
    own = [own_weights(network, pool.weights) for pool in inputs.pools.values()]
    models = {MHD_CLIENTS: jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *own)}
    schedule = exchange_schedule(groups, graph, count, work.MHD_ROUNDS, SEED)
    algorithm = multi_headed_distillation(
        groups,
        {"image": inputs.unlabelled},
        graph,
        work.MHD_ROUNDS,
        training,
        HeadDistillation(work.MHD_BATCH, exchange=CheckpointExchange(seed=SEED)),
        MHDHyper(work.MHD_RATE, work.EMBEDDING_WEIGHT, work.HEAD_WEIGHT),
        execution=execution,
    )
    return algorithm._replace(init=lambda key: start(models, training, schedule))


def make_fed_kd(inputs: work.Inputs, federated, execution):
    """FedKD with the library's defaults, the file's initial weights and SVD both ways."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    from fedcodist.algorithms.clients.fed_kd import FedKDHyper, fed_kd
    from fedcodist.algorithms.pools.independent_pools import independent_pools
    from fedcodist.algorithms.pools.pool import Pool
    from fedcodist.compression.compressed import compressed
    from fedcodist.compression.svd import svd
    from fedcodist.core.inputs import Selection
    from fedcodist.core.layer_outputs import with_layers
    from fedcodist.core.local_training import LocalTraining
    from fedcodist.models import cnn

    def network(module, name):
        shown = inputs.pools[name].network
        model = with_layers(module, jnp.zeros((1, *shown.image)), list(work.hidden_widths(shown)))
        return model._replace(init=lambda key: own_weights(shown, inputs.pools[name].weights))

    method = fed_kd(
        network(cnn.large_cnn(), work.TEACHER),
        network(cnn.small_cnn(), work.STUDENT),
        federated.columns,
        LocalTraining(optax.adam, work.BATCH, epochs=1),
        hyper=FedKDHyper(work.FED_KD_TEACHER_RATE, work.FED_KD_STUDENT_RATE),
    )
    links = svd(*work.FED_KD_THRESHOLDS)
    method = compressed(method, work.FED_KD_ROUNDS, links, links)
    cohorts = jnp.asarray(inputs.pools[work.STUDENT].cohorts)
    everyone = np.arange(len(inputs.offsets) - 1)
    pools = {work.STUDENT: Pool(method, everyone, cohorts.shape[1])}

    def select(round, key):
        return Selection({work.STUDENT: cohorts[round % len(cohorts)]}, {})

    return independent_pools(pools, federated.columns, execution)._replace(select=select)


def make_htfl(inputs: work.Inputs, at_once: bool):
    """A method with HtFLlib's settings; clients start from the file's weights."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from fedcodist.algorithms.clients.fed_kd_losses import MutualLosses
    from fedcodist.algorithms.parties.fd import FDVariant
    from fedcodist.algorithms.parties.groups import PartyGroup
    from fedcodist.compression.svd import svd
    from fedcodist.core.for_each_client import Execution
    from fedcodist.core.local_training import LocalTraining
    from fedcodist.models.headed import headed
    from fedcodist.models.htfl import htfl_backbone

    def model_of(network):
        example = jnp.zeros((1, *network.image))
        return headed(htfl_backbone(f"htfl_{network.kind}"), example, network.classes)

    members = htfl_members(inputs)
    networks = {kind: inputs.pools[names[0]].network for kind, names in members.items()}
    own = {name: own_weights(pool.network, pool.weights) for name, pool in inputs.pools.items()}
    starts = {
        kind: jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *(own[n] for n in names))
        for kind, names in members.items()
    }
    places = list(inputs.pools)
    groups = {
        kind: PartyGroup(model_of(networks[kind]), np.array([places.index(n) for n in names]))
        for kind, names in members.items()
    }
    training = LocalTraining(optax.sgd, work.HTFL_BATCH, epochs=1)
    rate, share, weight = work.HTFL_RATE, work.HTFL_LABELS, work.HTFL_WEIGHT
    classes = next(iter(networks.values())).classes
    floats: dict[str, tuple] = {
        "fml": (rate, share, share),
        "fed_proto": (rate, weight),
        "fed_kd_parties": (rate, rate),
    }
    shared = model_of(inputs.pools[places[0]].network)
    # HtFLlib decomposes weights, and ours their changes: they are compared without SVD.
    links = None if jax.config.jax_enable_x64 else svd(*work.HTFL_ENERGY)
    more: dict[str, dict[str, Any]] = {
        "fd": dict(num_classes=classes, variant=FDVariant("in_training", own_share=True)),
        "fml": dict(meme=shared),
        "fed_proto": dict(num_classes=classes, weighting="parties"),
        "fed_kd_parties": dict(
            student=shared,
            columns=columns_of(inputs),
            num_rounds=work.HTFL_ROUNDS,
            uplink=links,
            downlink=links,
            mutual=MutualLosses(kl_reduction="elementmean", detach_targets=False),
        ),
    }
    name = method_of(inputs)
    assert name is not None
    module = importlib.import_module(f"fedcodist.algorithms.parties.{name}")
    hyper_of = getattr(module, f"{HYPERS[name]}Hyper")
    algorithm = getattr(module, name)(
        groups,
        training=training,
        hyper=hyper_of(*floats.get(name, (rate,))),
        execution=Execution("vmap", 2) if at_once else Execution(),
        **more.get(name, {}),
    )

    def init(key):
        state = algorithm.init(key)
        parties = state if isinstance(state, dict) else state.models
        parties = {
            kind: fresh._replace(variables=starts[kind])
            if hasattr(fresh, "variables")
            else starts[kind]
            for kind, fresh in parties.items()
        }
        state = parties if isinstance(state, dict) else state._replace(models=parties)
        if name == "fed_kd_parties":
            return state._replace(student=own[work.MEME])
        return state._replace(meme=own[work.MEME]) if name == "fml" else state

    return algorithm._replace(init=init)


def htfl_members(inputs: work.Inputs) -> dict[str, list[str]]:
    """Kind of network -> the pools that have it, without FML's meme, which belongs to no client."""
    members: dict[str, list[str]] = {}
    for name, pool in inputs.pools.items():
        if name != work.MEME:
            members.setdefault(pool.network.kind, []).append(name)
    return members


def htfl_weights(state, inputs: work.Inputs) -> dict[str, Any]:
    """The variables of every client and of the meme, with a leading axis of one seed."""
    import jax

    parties = state if isinstance(state, dict) else state.models
    found = {
        name: jax.tree.map(lambda leaf, i=i: leaf[:, i], getattr(own, "variables", own))
        for kind, names in htfl_members(inputs).items()
        for own in [parties[kind]]
        for i, name in enumerate(names)
    }
    if work.MEME in inputs.pools:
        found[work.MEME] = state.student if hasattr(state, "student") else state.meme
    return found


def method_of(inputs: work.Inputs) -> str | None:
    """How the workload's models teach each other; None where they do not."""
    distillation = work.WORKLOADS[inputs.workload].distillation
    return distillation and distillation.method


def make_pool(inputs: work.Inputs, name: str):
    """A pool that trains by federated averaging, private if its workload is, from the file's weights."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
    from fedcodist.algorithms.pools.pool import Pool
    from fedcodist.core.from_linen import from_flax_linen
    from fedcodist.core.local_training import LocalTraining
    from fedcodist.data.augmentation import image_preprocess, normalise
    from fedcodist.privacy.private import private
    from fedcodist.text.next_token import language_model, next_tokens

    network, cohorts, weights, _ = inputs.pools[name]
    module = make_network(inputs.workload, name)
    training = LocalTraining(optax.sgd, work.BATCH, epochs=1)
    if is_text(inputs.workload):
        model = language_model(module, network.vocabulary, work.EXPECTED_LENGTH)
        training = training._replace(preprocess=next_tokens)
    else:
        model = from_flax_linen(module, jnp.zeros((1, *network.image)))
        if inputs.images.dtype == np.uint8:
            channels = network.image[-1]
            mean, deviation = [work.PIXEL_MEAN] * channels, [work.PIXEL_DEVIATION] * channels
            normalised = normalise(mean, deviation)
            training = training._replace(preprocess=image_preprocess(normalised))
    model = model._replace(init=lambda key: own_weights(network, weights))
    first, second = work.SERVER_BETAS
    optimizer = functools.partial(optax.adam, b1=first, b2=second, eps=work.SERVER_EPSILON)
    hyper = FedAvgHyper(work.CLIENT_LEARNING_RATE, work.SERVER_LEARNING_RATE)
    if method_of(inputs) == "fed_sdd":
        optimizer, hyper = optax.sgd, FedAvgHyper(work.CLIENT_LEARNING_RATE, 1.0)  # the mean
    method = fed_avg(model, training, optimizer, hyper=hyper)
    if inputs.privacy is not None:
        method = private(method, *inputs.privacy)
    number = work.WORKLOADS[inputs.workload].population.clients
    clients = list(inputs.pools).index(name) * number + np.arange(number)
    return Pool(method, clients, cohorts.shape[1])


def make_network(workload: str, pool: str):
    """The library's network of a pool."""
    from fedcodist.models import cnn, digits, emnist, resnet
    from fedcodist.text import lstm

    networks = {
        "cnn_small": cnn.small_cnn,
        "cnn_large": cnn.large_cnn,
        "private": cnn.small_cnn,
        "digits": lambda: digits.MLP(hidden=(64,)),
        "emnist": lambda: emnist.emnist_cnn(dropout=(0.0, 0.0)),
        "resnet20": resnet.resnet20,
        "lstm_small": lstm.small_lstm,
        "lstm_large": lstm.large_lstm,
        "fed_sdd": resnet.resnet20,
    }
    return networks[workload if workload in networks else f"cnn_{pool}"]()


def own_weights(network: work.AnyNetwork, weights):
    """Weights in the common layout as this library's variables."""
    import numpy as np

    from fedcodist.core.model import Variables

    params, statistics = {}, {}
    for name, value in weights.items():
        *path, leaf = _own_path(network, name)
        tree = statistics if leaf in ("mean", "var") else params
        for key in path:
            tree = tree.setdefault(key, {})
        if path == ["aux"]:
            value = value.reshape(*value.shape[:-1], network.heads, network.classes)
            value = np.moveaxis(value, -2, 0)
        tree[leaf] = value
        if isinstance(network, work.HtFLNetwork) and leaf == "scale":
            own = statistics
            for key in path:
                own = own.setdefault(key, {})
            own.update(mean=np.zeros_like(value), var=np.ones_like(value))
    return Variables(params, {"batch_stats": statistics} if statistics else {})


def common_weights(network: work.AnyNetwork, server):
    """A server's variables, which have a leading axis of one seed, in the common layout."""
    import numpy as np

    weights = {}
    for name in work.weight_shapes(network):
        path = _own_path(network, name)
        value = server.params
        if path[-1] in ("mean", "var"):
            value = server.mutable["batch_stats"]
        for key in path:
            value = value[key]
        value = np.asarray(value.addressable_data(0))[0]
        if path[0] == "aux":
            value = np.moveaxis(value, 0, -2).reshape(*value.shape[1:-1], -1)
        weights[name] = value
    return weights


def _own_path(network: work.AnyNetwork, name: str) -> list[str]:
    path = name.split("/")
    if isinstance(network, work.HtFLNetwork):
        return path if path[0] == "head" else ["backbone", "backbone", *path]
    if isinstance(network, work.Network) and not network.convolutions:
        # In the library's networks without convolutions, Flax names the layers.
        layers = work.dense_layers(network)
        path[0] = f"Dense_{layers.index(path[0])}" if path[0] in layers else path[0]
    if name == "embedding/vectors":
        path[1] = "embedding"
    if isinstance(network, work.Network) and network.heads:
        if name.startswith(("output/", "aux/")):
            return ["main" if name.startswith("output/") else "aux", path[1]]
        path.insert(0, "backbone")
    return path


if __name__ == "__main__":
    sys.exit(main())
