"""Flower's simulation engine on Ray; several processes are several actors."""

import logging
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

# Before Flower and Ray are imported: neither may call home from a benchmark.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
sys.path.insert(0, str(Path(__file__).parents[2]))

import client_app
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peers import measuring, torch_networks
from peers import workload as work


def main() -> int:
    """Runs the benchmark."""
    arguments = measuring.parse_arguments(__doc__)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    app = ServerApp()
    reported = []

    @app.main()
    def serve(grid, context):
        reported.append(run_server(grid, arguments))

    run_simulation(
        server_app=app,
        client_app=client_app.app,
        # As many nodes as a round has clients; messages tell each node its client. With a node per
        # client Flower would only have more nodes to search.
        num_supernodes=work.WORKLOADS[arguments.workload].cohort,
        backend_config={
            "init_args": {"num_cpus": arguments.processes},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    if not reported:
        print("error: the simulation ended without a result.", file=sys.stderr)
        return 1
    times, memory = reported[0]
    name = f"{version('flwr')}, ray {version('ray')}, torch {torch.__version__}"
    measuring.report("flower", name, arguments, times, memory)
    return 0


def run_server(grid, arguments):
    """Runs all rounds; returns the times at which their parts ended, and the peak memory."""
    if arguments.double:
        torch.set_default_dtype(torch.float64)
    inputs = work.read_inputs(arguments.inputs, arguments.workload, arguments.double)
    network = torch_networks.make_network(inputs.pool.network)
    torch_networks.load_weights(network, inputs.pool.weights)
    strategy = ServerAdam(network, measuring.cohorts(inputs, arguments), arguments)
    while len(list(grid.get_node_ids())) < strategy.cohort:
        time.sleep(0.1)
    ends = []

    def after_round(round, arrays):  # and before the first
        ends.append(time.perf_counter())
        if round == 1:
            network.load_state_dict(arrays.to_torch_state_dict())
            weights = torch_networks.common_weights(network)
            measuring.save_weights({work.POOL: weights}, arguments)

    strategy.start(
        grid,
        ArrayRecord(network.state_dict()),
        num_rounds=measuring.total_rounds(arguments),
        evaluate_fn=after_round,
    )
    times = measuring.ends_of_parts(ends[0], ends[1:], arguments)
    return times, measuring.peak_memory_mb()


class ServerAdam(FedAvg):
    """Flower's FedAvg with given cohorts, whose mean is a gradient for Adam.

    Flower's own FedAdam has another bias correction and another place for epsilon.
    """

    def __init__(self, network, cohorts, arguments):
        super().__init__(fraction_evaluate=0.0)
        self.trained = [name for name, _ in network.named_parameters()]
        self.cohorts = cohorts
        self.cohort = work.WORKLOADS[arguments.workload].cohort
        self.config = {
            "inputs": str(arguments.inputs.resolve()),
            "workload": arguments.workload,
            "threads": arguments.threads,
            "double": arguments.double,
        }
        self.weights, self.first, self.second = {}, {}, {}

    def configure_train(self, server_round, arrays, config, grid):
        self.weights = {name: array.numpy() for name, array in arrays.items()}
        return [
            Message(
                content=RecordDict(
                    {
                        "arrays": arrays,
                        "config": ConfigRecord({**self.config, "client": int(client)}),
                    }
                ),
                message_type=MessageType.TRAIN,
                dst_node_id=node,
            )
            for node, client in zip(grid.get_node_ids(), next(self.cohorts), strict=True)
        ]

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) < self.cohort:
            raise RuntimeError(f"{len(replies)} replies, errors: {failed[:1]}")
        mean, metrics = super().aggregate_train(server_round, replies)
        return self.updated(server_round, mean), metrics

    def updated(self, step, mean):
        """Adam's step on the difference between the weights sent and the mean returned.

        Arrays that are not trained, such as batch statistics, become the mean.
        """
        (beta1, beta2), result = work.SERVER_BETAS, dict(mean)
        for name in self.trained:
            weights = self.weights[name]
            gradient = weights - mean[name].numpy()
            self.first[name] = beta1 * self.first.get(name, 0) + (1 - beta1) * gradient
            self.second[name] = beta2 * self.second.get(name, 0) + (1 - beta2) * gradient**2
            size = np.sqrt(self.second[name] / (1 - beta2**step)) + work.SERVER_EPSILON
            direction = self.first[name] / (1 - beta1**step) / size
            result[name] = Array(weights - work.SERVER_LEARNING_RATE * direction)
        return ArrayRecord(result)


if __name__ == "__main__":
    sys.exit(main())
