"""A straightforward PyTorch loop, clients one by one; the reference for what a round computes."""

import copy
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from peers import measuring, torch_networks
from peers import workload as work


def main() -> int:
    """Runs the benchmark."""
    arguments = measuring.parse_arguments(__doc__, most_processes=1)
    torch.set_num_threads(arguments.threads)
    inputs = work.read_inputs(arguments.inputs, arguments.workload)
    clients = [torch_networks.client_tensors(inputs, i) for i in range(len(inputs.offsets) - 1)]
    server = torch_networks.Network(inputs.network)
    torch_networks.load_weights(server, inputs.weights)
    optimizer = torch.optim.Adam(
        server.parameters(), work.SERVER_LEARNING_RATE, work.SERVER_BETAS, work.SERVER_EPSILON
    )
    network = copy.deepcopy(server)
    cohorts = measuring.cohorts(inputs, arguments)

    def train(rounds):
        for _ in range(rounds):
            train_round(server, optimizer, network, [clients[i] for i in next(cohorts)])

    def save():
        measuring.save_weights(torch_networks.common_weights(server), arguments)

    times = measuring.run(train, save, arguments, time.perf_counter)
    memory = measuring.peak_memory_mb()
    measuring.report("torch_loop", torch.__version__, arguments, times, memory)
    return 0


def train_round(server, optimizer, network, cohort) -> None:
    """One round of federated averaging: the server takes the weighted mean of clients' updates."""
    received = list(server.parameters())
    for parameter in received:
        parameter.grad = torch.zeros_like(parameter)
    examples = sum(len(labels) for _, labels in cohort)
    for images, labels in cohort:
        with torch.no_grad():
            for own, parameter in zip(network.parameters(), received, strict=True):
                own.copy_(parameter)
        torch_networks.train_client(network, images, labels)
        with torch.no_grad():
            for own, parameter in zip(network.parameters(), received, strict=True):
                parameter.grad.add_(parameter - own, alpha=len(labels) / examples)
    optimizer.step()


if __name__ == "__main__":
    sys.exit(main())
