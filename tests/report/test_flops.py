"""FLOPs of networks against counts by hand, and of runs against what a round computes."""

import functools
import math
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from fedcodist.algorithms.parties.groups import party_names
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.config import networks, party_methods, passes, pool_methods
from fedcodist.config.algorithm import build_algorithm
from fedcodist.config.data import load_data
from fedcodist.config.networks import MODELS
from fedcodist.config.passes import LEARNING
from fedcodist.config.registry import ENTRIES, KINDS, PARTIES
from fedcodist.configs import (
    digits_codist,
    digits_compression,
    digits_methods,
    digits_mhd,
    digits_parties,
    digits_personal,
    digits_submodels,
)
from fedcodist.core.inputs import Round
from fedcodist.models import exits, headed
from fedcodist.models.embedding_generator import EmbeddingGenerator
from fedcodist.report import work
from fedcodist.report.costs import pool_of
from fedcodist.report.flops import flops_of_parties, flops_of_run
from fedcodist.report.forward_flops import flops_per_token, forward_flops, forward_flops_of
from fedcodist.run.sources import resident_data
from fedcodist.text import lstm, transformer
from fedcodist.text.next_token import language_model

ROUNDS = 3


def test_matrix_products_loops_and_branches():
    a, b = jnp.ones((2, 3)), jnp.ones((3, 5))
    assert forward_flops(jnp.dot, a, b) == 2 * 2 * 3 * 5
    assert forward_flops(jax.jit(lambda a: a + 1), a) == 0
    scanned = lambda a: jax.lax.scan(lambda c, _: (c @ jnp.ones((3, 3)), None), a, length=7)[0]
    assert forward_flops(scanned, a) == 7 * 2 * 2 * 3 * 3
    either = lambda a: jax.lax.cond(a[0, 0] > 0, lambda: a @ b @ b.T, lambda: a @ jnp.ones((3, 3)))
    assert forward_flops(either, a) == 2 * 2 * 3 * 3
    with pytest.raises(ValueError, match="unknown length"):
        forward_flops(lambda a: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, a), a)


def test_networks_by_hand():
    assert forward_flops_of(MODELS["digits_small"]) == 2 * (64 * 32 + 32 * 10)
    # Images are 24, 12 and 6 wide where the three convolutions see them; then dense layers.
    convolutions = 9 * (24**2 * 3 * 16 + 12**2 * 16 * 32 + 6**2 * 32 * 32)
    dense = 6 * 6 * 32 * 64 + 64 * 128 + 128 * 100
    assert forward_flops_of(MODELS["cnn_small"]) == 2 * (convolutions + dense)
    # He et al.'s network has 40.55 million multiply-adds; three convolutions more are shortcuts'.
    shortcuts = 16**2 * 16 * 32 + 8**2 * 32 * 64
    assert forward_flops_of(MODELS["resnet20_10"]) / 2 - shortcuts == pytest.approx(
        40.55e6, rel=1e-3
    )


def test_networks_of_text_by_hand():
    small, large = (2 * ((e + h) * 4 * h + h * e) for e, h in ((96, 70), (192, 140)))
    assert flops_per_token(lstm.small_lstm(), 20) == small + 2 * 96 * 10_004
    assert flops_per_token(lstm.large_lstm(), 20) == 2 * large + 2 * 192 * 10_004
    # The logits are 95 % of the small network's FLOPs, which a softmax of 100 samples leaves out.
    assert flops_per_token(lstm.small_lstm(), 20, samples=100) == small + 2 * 96 * 101
    # Four dense layers of width times width and two of four times that; scores and their values.
    block = 2 * (4 * 128**2 + 2 * 4 * 128**2) + 2 * 2 * 20 * 128
    found = flops_per_token(transformer.small_transformer(), 20)
    assert found == 4 * block + 2 * 128 * 10_004


def codistillation(name, **more):
    config = digits_codist.get_config(name)
    config.pools.small.cohort_size, config.pools.large.cohort_size = 3, 2
    config.algorithm.update(period=2, steps=3, mixup_beta=0.0, **more)
    return config


def method(run, **more):
    config = digits_methods.get_config(run)
    if run != "fed_avg":
        config.algorithm.steps = 4
    with config.unlocked(), config.ignore_type():
        config.algorithm.update(**more)
    return config


def several_architectures(**more):
    config = digits_codist.get_config("fed_sdd_pools")
    config.pools.small.cohort_size, config.pools.large.cohort_size = 3, 2
    config.algorithm.update(steps=3, **more)
    return config


def taught_clients(run):
    config = digits_methods.get_config(run)
    config.training.batch_size = 1  # the teacher's batches have no padding
    return config


def scaffold():
    config = digits_methods.get_config("scaffold")
    config.training.scaffold_option = 1
    return config


def personal(run, batch_size):
    config = digits_personal.get_config(run)
    config.training.batch_size = batch_size
    return config


def submodels(run, **more):
    config = digits_submodels.get_config(run)
    config.algorithm.update(**more)
    return config


CONFIGS = {
    "apfl": lambda: personal("apfl", 10),
    "p_fed_me": lambda: personal("p_fed_me", 10),
    "per_fed_avg": lambda: personal("per_fed_avg", 1000),  # whole clients fall into two parts
    "fed_avg": lambda: method("fed_avg"),
    "scaffold, option 1": scaffold,
    "fed_gkd": lambda: taught_clients("fed_gkd"),
    "fed_ntd": lambda: taught_clients("fed_ntd"),
    "periodic": lambda: codistillation("periodic_codistillation"),
    "merged": lambda: codistillation("merged_codistillation"),
    "merged, skipped": lambda: codistillation(
        "merged_codistillation", alpha=1.0, skip_at_alpha_one=True
    ),
    "fed_ensemble": lambda: digits_methods.get_config("fed_ensemble"),
    "hetero_fl": lambda: codistillation("hetero_fl"),
    "fed_rolex": lambda: submodels("fed_rolex"),
    "fjord": lambda: submodels("fjord"),
    "fjord, alone": lambda: submodels("fjord", self_distillation=False),
    "depth_fl": lambda: submodels("depth_fl"),
    "fed_df": lambda: method("fed_df"),
    "fed_df, validated": lambda: method(
        "fed_df",
        validation=dict(split="held_out", every=2, patience=2, or_start=True),
    ),
    "fed_be": lambda: method("fed_be", samples=2, batch_size=1, average_from=1),
    "fed_sdd": lambda: method("fed_sdd", num_models=2, cached=False, warm_up=1),
    # One image at a time: the teacher's batches have no padding.
    "fed_sdd, cached": lambda: method("fed_sdd", num_models=2, batch_size=1),
    "fed_sdd, all": lambda: method(
        "fed_sdd", num_models=2, cached=False, distilled="all", rounds_kept=1
    ),
    "fed_sdd, none": lambda: method("fed_sdd", num_models=2, steps=0),
    "fed_sdd_pools": lambda: several_architectures(cached=False, warm_up=1),
    # One image at a time, as above.
    "fed_sdd_pools, cached": lambda: several_architectures(batch_size=1, distilled="all"),
    "fed_et": lambda: method("fed_et"),
}


def count_examples(monkeypatch, *modules):
    """Counts examples that networks made in `modules` read: whether they learned -> examples."""
    seen = {True: 0.0, False: 0.0}

    def watched(create, *arguments, **options):
        model = create(*arguments, **options)

        def apply(variables, batch, *, train=False, mask=None, **more):
            # Parties are answered in batches of a size that divides their images.
            count = jnp.asarray(len(batch["image"]), jnp.float32) if mask is None else mask.sum()

            def add(number, train=train):
                seen[train] += float(number)

            jax.debug.callback(add, count)
            return model.apply(variables, batch, train=train, mask=mask, **more)

        return model._replace(apply=apply)

    for module in modules:
        if create := vars(module).get("from_flax_linen"):
            monkeypatch.setattr(module, "from_flax_linen", functools.partial(watched, create))
    # All networks are as large as one another, so that numbers of evaluations are compared.
    monkeypatch.setattr(work, "forward_flops_of", lambda model: 1.0)
    return seen


QUICK = ("fed_df",)


@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in CONFIGS],
)
def test_runs_compute_what_is_counted(name, monkeypatch):
    """Every evaluation of a network reports how many examples it saw, and whether it learned."""
    config = CONFIGS[name]()
    config.rounds, config.training.epochs = ROUNDS, 2
    seen = count_examples(monkeypatch, pool_methods, networks, exits, headed)
    data = load_data(config.data)
    algorithm = build_algorithm(config, data)
    rows = {"unlabelled": {"image": data.unlabelled}}
    if config.algorithm.get("validation") is not None:
        rows["validation"] = dict(data.splits["held_out"].columns)
    resident = jax.tree.map(jnp.asarray, resident_data(data.splits["train"], rows))
    key = jax.random.key(0)

    @jax.jit
    def round_(state, round):
        selection = algorithm.select(round, key)
        inputs = resident.read(selection)
        sizes = {pool: cohort.sizes.sum() for pool, cohort in inputs.cohorts.items()}
        first = {
            pool: jax.tree.map(
                lambda leaf, n=len(clients): jnp.broadcast_to(leaf, (n, *jnp.shape(leaf))),
                algorithm.client_states[pool].first,
            )
            for pool, clients in selection.clients.items()
        }
        state, _, metrics = algorithm.round(
            state, first, Round(round, key, inputs), algorithm.hyper
        )
        return state, metrics, sizes

    state, examples, steps = algorithm.init(key), dict.fromkeys(config.pools, 0.0), []
    for round in range(ROUNDS):
        state, metrics, sizes = round_(state, round)
        jax.effects_barrier()
        for pool, size in sizes.items():
            examples[pool_of(config.to_dict(), pool)] += 2.0 * int(size)
        steps += [float(v) for k, v in metrics.items() if k.endswith("distillation_steps")]
    found = flops_of_run(config.to_dict(), examples, np.mean(steps) if steps else None)
    assert sum(found.clients.values()) + found.server == seen[False] + LEARNING * seen[True]
    more = ("fed_gkd", "fed_ntd", "moon", "scaffold, option 1", "apfl", "p_fed_me", "per_fed_avg")
    alone = (
        "fed_avg",
        "hetero_fl",
        "fed_rolex",
        "fjord",
        "fjord, alone",
        "depth_fl",
        "fed_ensemble",
        *more,
        "merged, skipped",
        "fed_sdd, none",
    )
    assert (found.server > 0) == (name not in alone)
    if name not in (*more, "fjord"):
        assert sum(found.clients.values()) == LEARNING * sum(examples.values())


def test_fed_rep_counts_the_body_once_while_the_head_learns():
    config = digits_personal.get_config("fed_rep")
    config.pools.main.model = "digits_small"
    found = flops_of_run(config.to_dict(), {"main": 10.0})
    network, heads, bodies = 64 * 32 + 32 * 10, 5, 2
    share = (heads + 3 * bodies) / (heads + bodies)
    assert found.clients["main"] == pytest.approx(10 * 2 * network * share)


def test_a_level_of_hetero_fl_costs_what_its_part_of_the_network_does():
    config = digits_codist.get_config("hetero_fl")
    found = flops_of_run(config.to_dict(), {"small": 10.0, "large": 10.0})
    small, large = 64 * 32 + 32 * 16 + 16 * 10, 64 * 128 + 128 * 64 + 64 * 10
    assert found.clients == {"small": 30.0 * 2 * small, "large": 30.0 * 2 * large}


def party_method(run, **more):
    config = digits_parties.get_config(run)
    config.data.num_parties = 3
    config.evaluation.batch_size = 379  # half of the public images
    with config.ignore_type():
        config.parties.networks = (((6,), 0.0), ((5,), 0.0), ((6,), 0.0))
    if "size" in more:
        more = {
            {"fed_md": "alignment_size", "ds_fl": "open_size", "kt_pfl": "open_size"}[run]: more[
                "size"
            ]
        }
    with config.ignore_type():
        config.algorithm.update(more)
    return config


PARTY_CONFIGS = {
    "local_only": lambda: party_method("local_only", epochs=2),
    "fed_md": lambda: party_method("fed_md", digest_epochs=2, size=40),
    "fed_md, all public images": lambda: party_method("fed_md", size=None),
    "fd": lambda: party_method("fd"),
    "fd, in training": lambda: party_method("fd", averaged="in_training"),
    "ds_fl": lambda: party_method("ds_fl", distillation_epochs=2, size=40),
    "fml": lambda: party_method("fml"),
    "fed_kd_parties": lambda: party_method("fed_kd_parties"),
    "fed_proto": lambda: party_method("fed_proto"),
    "fed_gh": lambda: party_method("fed_gh"),
    "fed_tgp": lambda: party_method("fed_tgp"),
    "kt_pfl": lambda: party_method("kt_pfl", distillation_epochs=2, size=40),
    "lg_fed_avg": lambda: party_method("lg_fed_avg"),
    "fed_gen": lambda: party_method("fed_gen"),
    # All of a party's examples at a time: the teachers' batches have no padding.
    "fccl": lambda: party_method("fccl", public_epochs=2, batch_size=12),
    "fed_mrl": lambda: party_method("fed_mrl"),
    "fed_l2g": lambda: party_method("fed_l2g", warm_up=0, batch_size=9),  # 12 without the quiz
}


# Each of three parties has four labels, of ten; embeddings are of width 32. FedGH's server takes a step
# for each prototype, FedTGP's a hundred times one for ten and one for two of them.
SERVERS_ON_PROTOTYPES = {
    "fed_gh": ROUNDS * 12 * LEARNING * 2 * 32 * 10,
    "fed_tgp": ROUNDS * 100 * 2 * LEARNING * 2 * (2 * 32 * 32) * 10,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTY_CONFIGS)
def test_parties_compute_what_is_counted(name, monkeypatch):
    config = PARTY_CONFIGS[name]()
    seen = count_examples(monkeypatch, party_methods, headed)
    data = load_data(config.data)
    algorithm = build_algorithm(config, data)
    rows = {PUBLIC: {"image": data.public.train.columns["image"]}}
    resident = jax.tree.map(jnp.asarray, resident_data(data.splits["train"], rows))
    key = jax.random.key(0)

    @jax.jit
    def round_(state, round):
        inputs = resident.read(algorithm.select(round, key))
        hyper = jax.tree.map(jnp.float32, algorithm.hyper)
        state, _, metrics = algorithm.round(state, {}, Round(round, key, inputs), hyper)
        return state, metrics

    state, examples = algorithm.init(key), dict.fromkeys(algorithm.communication, 0.0)
    for round in range(ROUNDS):
        state, metrics = round_(state, round)
        jax.effects_barrier()
        for party in examples:
            examples[party] += float(metrics[f"{party}/client_examples"])
    epochs = config.algorithm.get("epochs", config.algorithm.get("revisit_epochs"))
    size = 12 - config.algorithm.get("quiz_size", 0)
    assert examples == dict.fromkeys(examples, ROUNDS * epochs * size)
    found = flops_of_parties(config.to_dict(), examples, ROUNDS)
    if name == "fccl":  # parties answer public images in training mode, but learn from them once
        answered = (seen[True] - sum(examples.values())) / 2
        seen = {True: seen[True] - answered, False: seen[False] + answered}
    expected = seen[False] + LEARNING * seen[True] + SERVERS_ON_PROTOTYPES.get(name, 0)
    if name == "fed_gen":
        expected += generating(config, data, sum(examples.values()))
    assert sum(found.clients.values()) + found.server == pytest.approx(expected)
    assert (found.server > 0) == (name in ("ds_fl", "fed_gen", *SERVERS_ON_PROTOTYPES))


def generating(config, data, examples):
    """FLOPs of FedGen's generator and of heads on its embeddings, one for each private example."""
    settings, width = config.algorithm, config.parties.embedding_width
    classes = data.public.num_classes
    network = EmbeddingGenerator(classes, settings.generator_hidden, width)
    inputs = jnp.zeros(1, jnp.int32), jnp.zeros((1, settings.generator_noise))
    variables = network.init(jax.random.key(0), *inputs)
    generator = forward_flops(network.apply, variables, *inputs)
    head = forward_flops(lambda z: z @ jnp.zeros((width, classes)), jnp.zeros((1, width)))
    made = ROUNDS * settings.generator_steps * settings.generator_batch_size
    return examples * (generator + 2 * head) + made * (LEARNING * generator + 2 * head)


def test_every_algorithm_has_a_count():
    assert all(entry.passes for entry in ENTRIES.values())
    assert {entry.kind for entry in ENTRIES.values()} == set(KINDS)
    config = digits_methods.get_config("fed_avg")
    config.training.method = "another_method"
    with pytest.raises(ValueError, match="FLOPs of 'another_method' are not counted"):
        flops_of_run(config.to_dict(), {})
    of_parties = {name for name, entry in ENTRIES.items() if entry.kind == PARTIES}
    assert {name.partition(",")[0] for name in PARTY_CONFIGS} == of_parties
    config = dict(digits_parties.get_config("fed_md").to_dict())
    config["algorithm"]["name"] = "another_exchange"
    with pytest.raises(ValueError, match="FLOPs of 'another_exchange' are not counted"):
        flops_of_parties(config, {}, 1)
    config = digits_mhd.get_config("local_only_steps")
    config.algorithm.name = "another_exchange"
    with pytest.raises(ValueError, match="FLOPs of 'another_exchange' are not counted"):
        flops_of_parties(config.to_dict(), {}, 1)
    with pytest.raises(ValueError, match="FLOPs of 'other' are not counted"):
        flops_of_run({"algorithm": {"name": "other"}}, {})


def test_the_paper_s_network_and_length_are_counted():
    """FedSDD's server work with R = 1 does not grow with the clients, FedDF's does."""
    config = digits_methods.get_config("fed_df").to_dict()
    own = forward_flops_of(MODELS["digits_small"])
    each = config["rounds"] * config["algorithm"]["steps"] * config["algorithm"]["batch_size"] * own
    more = []
    for cohort in (8, 14):
        config["pools"]["main"]["cohort_size"] = cohort
        more.append(flops_of_run(config, {"main": 0.0}).server)
    assert math.isclose(more[1] - more[0], 6 * each)


class OwnNetwork(nn.Module):
    """What a reference names: digits_small with other units."""

    hidden: tuple[int, ...] = (20,)

    @nn.compact
    def __call__(self, image):
        x = image.reshape(len(image), -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


@pytest.fixture
def own(monkeypatch):
    """The reference to OwnNetwork."""
    module = types.ModuleType("own_networks")
    module.network = OwnNetwork
    monkeypatch.setitem(sys.modules, "own_networks", module)
    return "own_networks:network"


def test_networks_of_ones_own_are_counted(own):
    config = digits_methods.get_config("fed_avg").to_dict()
    config["pools"]["main"]["model"] = own
    forward = 2 * (64 * 20 + 20 * 10)
    for samples in (0, 5):  # which networks of images do not read
        config["training"]["samples"] = samples
        assert flops_of_run(config, {"main": 7.0}).clients["main"] == 7 * LEARNING * forward
    config = digits_submodels.get_config("hetero_fl").to_dict()
    for pool in config["pools"].values():
        pool.update(model=own, share=0.5)
    half = 2 * (64 * 10 + 10 * 10)
    found = flops_of_run(config, dict.fromkeys(config["pools"], 1.0))
    assert set(found.clients.values()) == {LEARNING * half}


def test_networks_of_ones_own_are_counted_for_parties(own):
    config = digits_parties.get_config("local_only").to_dict()
    config["parties"]["networks"] = own
    groups = party_methods.party_groups(ConfigDict(config), load_data(ConfigDict(config["data"])))
    parties = [party for of_group in party_names(groups).values() for party in of_group]
    found = flops_of_parties(config, dict.fromkeys(parties, 2.0), 1)
    assert set(found.clients.values()) == {2 * LEARNING * 2 * (64 * 20 + 20 * 10)}


class OwnBackbone(nn.Module):
    @nn.compact
    def __call__(self, image):
        return nn.Dense(24)(image.reshape(len(image), -1))


def test_fed_gens_embeddings_have_the_width_of_the_networks(monkeypatch):
    """Networks of one's own need no `parties.embedding_width`."""
    module = types.ModuleType("own_networks")
    module.network = lambda: headed.headed(OwnBackbone(), jnp.zeros((1, 8, 8, 1)), 10)
    monkeypatch.setitem(sys.modules, "own_networks", module)
    config, found = digits_parties.get_config("fed_gen").to_dict(), []
    data = load_data(ConfigDict(config["data"]))
    for width in (24, None):
        config["parties"] = {"networks": "own_networks:network", "embedding_width": width}
        groups = party_methods.party_groups(ConfigDict(config), data)
        parties = [party for of_group in party_names(groups).values() for party in of_group]
        found.append(flops_of_parties(config, dict.fromkeys(parties, 2.0), 1))
    assert found[0] == found[1] and found[0].server > 0


def test_federated_dropouts_clients_compute_smaller_networks():
    config = digits_compression.get_config("fed_dropout").to_dict()
    counted = flops_of_run(config, {"main": 10.0})
    assert counted.clients["main"] == 10 * LEARNING * 2 * (64 * 19 + 19 * 10)  # 0.6 of 32 units
    assert counted.server == 0


@pytest.mark.parametrize(
    ("network", "percent"),
    [(lstm.small_lstm(), 3), (lstm.large_lstm(), 8), (transformer.large_transformer(), 20)],
)
def test_what_is_computed_of_padding(network, percent):
    """Logits of padding do not count; layers below run over all 20 positions, of which 13.3 predict."""
    each = flops_per_token(network, 20)
    tokens = jax.ShapeDtypeStruct((1, 20), jnp.int32)
    variables = jax.eval_shape(network.init, jax.random.key(0), tokens)
    width, classes = jax.eval_shape(network.apply, variables, tokens).kernel.shape
    below = each - 2 * width * classes
    share = (20 - 13.3) * below / (20 * below + 13.3 * 2 * width * classes)
    assert 100 * share == pytest.approx(percent, abs=0.6)
    assert f"{percent} %" in " ".join(language_model.__doc__.split())


def test_levels_of_one_width_are_one_part_that_fjord_draws():
    forward = {"small": 10.0, "as_small": 10.0, "whole": 20.0}
    of_pools = lambda flops_of: {pool: flops_of(pool) for pool in forward}
    run = types.SimpleNamespace(forward=forward, settings={}, additional_flops=of_pools)
    assert passes.fjord(run) == {"small": 30.0, "as_small": 30.0, "whole": 3 * (10 + 20) / 2}
