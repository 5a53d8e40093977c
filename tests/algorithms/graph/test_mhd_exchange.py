"""Checkpoint buffers: their content against a plain record of who got whose checkpoint when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.algorithms.graph import graphs
from fedcodist.algorithms.graph.mhd_exchange import exchange_schedule, first_banks, refresh
from fedcodist.algorithms.parties.groups import PartyGroup


def groups_of(architectures):
    """Architecture 'a', 'b', ... of each client; no models are needed here."""
    return {
        name: PartyGroup(
            None, np.flatnonzero(np.array(list(architectures)) == name).astype(np.int32)
        )
        for name in sorted(set(architectures))
    }


@st.composite
def runs(draw):
    clients = draw(st.integers(2, 6))
    rounds = draw(st.integers(1, 12))
    times = draw(st.sampled_from((None, rounds, rounds + 3)))
    seeds = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
    graph = graphs.random_graph(clients, 0.4, seeds[0])
    if times:
        graph = np.stack(
            [graphs.random_graph(clients, 0.3, seeds[t % len(seeds)]) for t in range(times)]
        )
        graph[1:] &= draw(st.booleans())  # later, nobody may have a neighbour
    return (
        groups_of([draw(st.sampled_from("abc")) for _ in range(clients)]),
        graph,
        draw(st.integers(1, 5)),
        rounds,
        draw(st.integers(0, 99)),
    )


def put(bank, slots, clients, round):
    for slot, client in zip(slots, clients, strict=True):
        if slot < len(bank):
            bank[slot] = (int(client), round)


@settings(max_examples=60)
@given(runs())
def test_pools_hold_neighbours_checkpoints_of_the_time_they_came(run):
    groups, graph, checkpoints_per_client, rounds, _ = run
    schedule = exchange_schedule(*run)
    edges = graphs.over_time(graph, rounds)
    clients = edges.shape[-1]
    names = list(groups)
    architecture = {int(c): i for i, g in enumerate(groups.values()) for c in g.clients}
    # A checkpoint is represented by the pair (client, round) of its origin.
    account = [[(int(c), 0) for c in own] for own in schedule.first_source]
    pools = schedule.first.copy()
    banks = {name: [None] * size for name, size in schedule.num_slots.items()}
    for name, group in groups.items():
        put(banks[name], schedule.first_slot[name], group.clients, 0)
    for client in range(clients):
        neighbours = np.flatnonzero(edges[0, client])
        first = [c for c, _ in account[client]]
        if checkpoints_per_client < len(neighbours):  # some of them, none twice
            assert len(set(first)) == len(first) and set(first) <= set(neighbours.tolist())
        else:
            assert first == np.resize(neighbours, checkpoints_per_client).tolist()
    for round in range(rounds):
        for client in range(clients):
            source, at = int(schedule.source[round, client]), schedule.replaced[round, client]
            assert (source >= 0) == (round > 0 and bool(edges[round, client].any()))
            if source >= 0:
                assert edges[round, client, source]
                account[client][at] = (source, round)
                pools[client, at] = schedule.entry[round, client]
        for name, group in groups.items():
            put(banks[name], schedule.slot[name][round], group.clients, round)
        for client in range(clients):
            assert len(account[client]) == checkpoints_per_client
            for (kind, slot), (source, when) in zip(pools[client], account[client], strict=True):
                assert kind == architecture[source]
                assert banks[names[kind]][slot] == (source, when)
    # Every place is used, and no architecture has more places than there are entries of buffers.
    assert max(schedule.num_slots.values()) <= clients * checkpoints_per_client
    for kind, name in enumerate(names):
        used = {int(s) for k, s in schedule.first.reshape(-1, 2) if k == kind}
        used |= {
            int(s)
            for (k, s), source in zip(
                schedule.entry.reshape(-1, 2), schedule.source.reshape(-1), strict=True
            )
            if source >= 0 and k == kind
        }
        assert used == set(range(schedule.num_slots[name]))


def test_refresh_follows_the_schedule():
    groups, clients, rounds = groups_of("aba"), 3, 6
    schedule = exchange_schedule(groups, graphs.complete(clients), 2, rounds, seed=3)

    def models(round):  # a model is the pair (client, round)
        return {
            name: {"w": jnp.stack([jnp.asarray([c, round]) for c in group.clients])}
            for name, group in groups.items()
        }

    pools, banks = jnp.asarray(schedule.first), first_banks(schedule, models(0))
    step = jax.jit(lambda pools, banks, models, t: refresh(schedule, pools, banks, models, t))
    account = [[(int(c), 0) for c in own] for own in schedule.first_source]
    for round in range(rounds):
        pools, banks = step(pools, banks, models(round), round)
        for client in range(clients):
            if round:
                source = int(schedule.source[round, client])
                account[client][schedule.replaced[round, client]] = (source, round)
            for (kind, slot), held in zip(np.asarray(pools)[client], account[client], strict=True):
                assert tuple(np.asarray(banks["ab"[kind]]["w"])[slot]) == held


def test_sources_and_replaced_entries_are_uniform():
    clients, checkpoints_per_client, rounds = 5, 4, 4001
    schedule = exchange_schedule(
        groups_of("a" * clients), graphs.complete(clients), checkpoints_per_client, rounds, seed=0
    )
    for client in range(clients):
        counts = np.bincount(schedule.source[1:, client], minlength=clients)
        assert counts[client] == 0
        others = np.delete(counts, client)
        expected, deviation = (rounds - 1) / 4, np.sqrt((rounds - 1) * 3 / 16)
        assert (np.abs(others - expected) < 4.5 * deviation).all()
        entries = np.bincount(schedule.replaced[1:, client], minlength=checkpoints_per_client)
        assert (np.abs(entries - expected) < 4.5 * deviation).all()


def test_a_checkpoint_that_several_take_is_kept_once():
    # On a star the others take the checkpoint of client 0, and client 0 takes one of theirs.
    star = np.zeros((6, 6), bool)
    star[1:, 0] = star[0, 1:] = True
    schedule = exchange_schedule(groups_of("abbbbb"), star, 1, 50, seed=0)
    assert schedule.num_slots == {"a": 1, "b": 1}


def test_other_seeds_exchange_otherwise_and_the_same_one_does_not():
    arguments = (groups_of("aabb"), graphs.complete(4), 3, 20)
    first, again, other = (exchange_schedule(*arguments, seed=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(first.source, again.source)
    assert (first.source != other.source).any()


def test_a_graph_that_is_too_short_is_one_clear_line():
    graph = np.stack([graphs.complete(3)] * 4)
    with pytest.raises(ValueError, match="each of the run's 5 rounds, it has those of 4"):
        exchange_schedule(groups_of("aaa"), graph, 2, 5, seed=0)
    with pytest.raises(ValueError, match="checkpoints_per_client must be at least 1"):
        exchange_schedule(groups_of("aaa"), graph, 0, 4, seed=0)


def test_a_small_buffer_starts_with_random_neighbours_none_twice():
    """And not with those of the lowest indices, who would then be heard alone for many steps."""
    groups = {"a": PartyGroup(None, np.arange(8))}
    first = exchange_schedule(groups, graphs.complete(8), 3, 1, 0).first_source
    assert all(
        len(set(row)) == 3 and client not in row for client, row in enumerate(first.tolist())
    )
    assert set(first.ravel().tolist()) == set(range(8))
