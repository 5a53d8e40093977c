"""A straightforward PyTorch loop, clients one by one; the reference for the results of a round."""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import fed_kd
import mhd
import torch
from codistillation import distill, merge
from fed_md import Party, collaborate
from fed_sdd import teach
from peers import measuring, torch_device, torch_networks
from peers import workload as work
from private import add_noise, clip

ROWS = ("digest", "revisit", "private", "public")  # orders that are indices of images


class Server:
    """A pool's model: `network` is the server's, `trained` the copy that its clients train.

    With `plain` the server takes the clients' mean, otherwise a step of Adam. With `privacy` the mean
    is private.
    """

    def __init__(self, pool: work.Pool, plain: bool = False, privacy: work.Privacy | None = None):
        self.plain, self.privacy = plain, privacy
        self.network = torch_networks.make_network(pool.network)
        torch_networks.load_weights(self.network, pool.weights)
        self.trained = copy.deepcopy(self.network)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        weights = self.network.parameters()
        if self.plain:
            self.optimizer = torch.optim.SGD(weights, lr=1.0)
        else:
            rate, epsilon = work.SERVER_LEARNING_RATE, work.SERVER_EPSILON
            self.optimizer = torch.optim.Adam(weights, rate, work.SERVER_BETAS, epsilon)


def main() -> int:
    """Runs the benchmark."""
    arguments = measuring.parse_arguments(__doc__, most_processes=1, accelerated=True)
    torch_device.use(arguments.accelerator)
    torch.set_num_threads(arguments.threads)
    if arguments.double:
        torch.set_default_dtype(torch.float64)
    inputs = work.read_inputs(arguments.inputs, arguments.workload, arguments.double)
    clients = [torch_networks.client_tensors(inputs, i) for i in range(len(inputs.offsets) - 1)]
    distillation = work.WORKLOADS[inputs.workload].distillation
    method = distillation and distillation.method
    if method in ("fed_md", "mhd"):
        kind = {"fed_md": Party, "mhd": mhd.Client}[method]
        servers = {name: kind(pool) for name, pool in inputs.pools.items()}
        orders = {
            name: {
                # Orders of images become tensors on the device; indices of models stay on the host.
                purpose: (torch_device.tensor if purpose in ROWS else torch.from_numpy)(own).long()
                for purpose, own in pool.orders.items()
            }
            for name, pool in inputs.pools.items()
        }
    elif method == "fed_kd":
        federation = fed_kd.Federation(inputs.pools, len(clients))
    else:
        plain = method == "fed_sdd"
        servers = {name: Server(pool, plain, inputs.privacy) for name, pool in inputs.pools.items()}
    if inputs.unlabelled is not None:
        unlabelled = torch_networks.image_tensor(inputs.unlabelled)
    rounds = measuring.rounds(arguments)

    def train(count):
        for _ in range(count):
            round = next(rounds)
            if method == "fed_kd":
                drawn = inputs.pools[work.STUDENT].cohorts
                federation.train_round(drawn[round % len(drawn)], clients)
                continue
            cohorts = {}
            for name, pool in inputs.pools.items():
                drawn = pool.cohorts[round % len(pool.cohorts)]
                cohorts[name] = [clients[client] for client in drawn]
            if distillation is None:
                train_round(servers, cohorts)
                continue
            if method == "mhd":
                mhd.exchange(servers, orders, round)
                for name, client in servers.items():
                    mhd.train(client, cohorts[name][0], unlabelled, orders[name], round)
                continue
            rows = inputs.unlabelled_rows[round % len(inputs.unlabelled_rows)]
            if method == "fed_md":
                private = {name: cohort[0] for name, cohort in cohorts.items()}
                aligned = unlabelled[torch_device.tensor(rows.reshape(-1)).long()]
                collaborate(servers, aligned, private, orders)
                continue
            batches = (unlabelled[torch_device.tensor(each).long()] for each in rows)
            train_together = {
                "merged": merged_round,
                "periodic": periodic_round,
                "fed_sdd": sdd_round,
            }
            train_together[method](servers, cohorts, batches)

    def save():
        if method == "fed_kd":
            weights = federation.weights()
        else:
            weights = {n: torch_networks.common_weights(s.network) for n, s in servers.items()}
        measuring.save_weights(weights, arguments)

    times = measuring.run(train, save, arguments, torch_device.clock)
    memory, device_mb = measuring.peak_memory_mb(), torch_device.peak_mb()
    measuring.report(
        "torch_loop", torch.__version__, arguments, times, memory, peak_device_mb=device_mb
    )
    return 0


def train_round(servers, cohorts) -> None:
    """One round of federated averaging in every pool."""
    for name, server in servers.items():
        aggregate(server, cohorts[name])
        server.optimizer.step()


def merged_round(servers, cohorts, batches) -> None:
    """One round of MergedCodist; its students start from the models before the round's update."""
    for name, server in servers.items():
        aggregate(server, cohorts[name])
    students = distill({name: server.network for name, server in servers.items()}, batches)
    for name, server in servers.items():
        merge(server.network, students[name])
        server.optimizer.step()


def periodic_round(servers, cohorts, batches) -> None:
    """One round of PeriodicCodist, at whose end students replace the updated models."""
    train_round(servers, cohorts)
    students = distill({name: server.network for name, server in servers.items()}, batches)
    for name, server in servers.items():
        server.network.load_state_dict(students[name].state_dict())
        server.reset_optimizer()


def sdd_round(servers, cohorts, batches) -> None:
    """One round of FedSDD: the first model learns from the mean logits of all models."""
    train_round(servers, cohorts)
    teach([server.network for server in servers.values()], batches)


def aggregate(server: Server, cohort) -> None:
    """Clients train; the weighted mean of their updates becomes the server's gradient.

    Batch statistics become the clients' weighted mean. Clients' weights are their numbers of examples;
    if the server is private they are equal.
    """
    privacy = server.privacy
    received = list(server.network.parameters())
    statistics = _statistics(server.network)
    means = [torch.zeros_like(value) for value in statistics]
    for parameter in received:
        parameter.grad = torch.zeros_like(parameter)
    weights = [1 if privacy is not None else len(labels) for _, labels in cohort]
    for weight, (images, labels) in zip(weights, cohort, strict=True):
        trained = list(server.trained.parameters())
        with torch.no_grad():
            own = [*trained, *_statistics(server.trained)]
            for value, sent in zip(own, [*received, *statistics], strict=True):
                value.copy_(sent)
        torch_networks.train_client(server.trained, images, labels)
        share = weight / sum(weights)
        with torch.no_grad():
            update = [old - new for old, new in zip(received, trained, strict=True)]
            if privacy is not None:
                clip(update, privacy.clip)
            for tensor, parameter in zip(update, received, strict=True):
                parameter.grad.add_(tensor, alpha=share)
            # Training replaces running variances by new tensors.
            for value, mean in zip(_statistics(server.trained), means, strict=True):
                mean.add_(value, alpha=share)
    if privacy is not None:
        add_noise([parameter.grad for parameter in received], privacy, len(cohort))
    for value, mean in zip(statistics, means, strict=True):
        value.copy_(mean)


def _statistics(network: torch.nn.Module) -> list[torch.Tensor]:
    """Running means and variances, as they are now."""
    return [value for value in network.buffers() if value.is_floating_point()]


if __name__ == "__main__":
    sys.exit(main())
