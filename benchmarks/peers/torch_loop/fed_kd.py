"""FedKD in PyTorch (Wu et al., 2022), clients one by one; students' changes are sent by exact SVD."""

import numpy as np
import torch
from peers import torch_device, torch_networks
from peers import workload as work


class Client:
    """A client's teacher, its copy of the student, maps W^h, and optimizers that last over rounds."""

    def __init__(self, pools):
        self.teacher, self.student = (
            make_network(pools[name]) for name in (work.TEACHER, work.STUDENT)
        )
        own, other = (
            work.hidden_widths(pools[name].network).values()
            for name in (work.TEACHER, work.STUDENT)
        )
        self.maps = [
            torch.eye(*widths, device=torch_device.current()).requires_grad_()
            for widths in zip(other, own, strict=True)
        ]
        private = [*self.teacher.parameters(), *self.maps]
        self.optimizers = [
            torch.optim.Adam(private, work.FED_KD_TEACHER_RATE),
            torch.optim.Adam(self.student.parameters(), work.FED_KD_STUDENT_RATE),
        ]


class Federation:
    """The shared student, and every client."""

    def __init__(self, pools, clients: int):
        self.student = make_network(pools[work.STUDENT])
        self.clients = [Client(pools) for _ in range(clients)]
        self.rounds = 0

    def train_round(self, cohort, examples) -> None:
        """Clients train one epoch; the mean of their students' changes is sent to all.

        Args:
          cohort: indices of clients.
          examples: (images, labels) of every client.
        """
        self.rounds += 1
        start, end = work.FED_KD_THRESHOLDS
        progress = min(self.rounds / work.FED_KD_ROUNDS, 1)
        share = start * (1 - progress) + end * progress
        shared = list(self.student.parameters())
        changes = [torch.zeros_like(parameter) for parameter in shared]
        for index in cohort:
            client = self.clients[index]
            client.student.load_state_dict(self.student.state_dict())
            train(client, *examples[index])
            with torch.no_grad():
                trained = zip(changes, client.student.parameters(), shared, strict=True)
                for change, own, before in trained:
                    change.add_(compressed(own - before, share), alpha=1 / len(cohort))
        with torch.no_grad():
            for parameter, change in zip(shared, changes, strict=True):
                parameter.add_(compressed(change, share))

    def weights(self) -> dict[str, dict[str, np.ndarray]]:
        """The student in the common layout, and all clients' teachers, stacked."""
        teachers = [torch_networks.common_weights(client.teacher) for client in self.clients]
        stacked = {name: np.stack([own[name] for own in teachers]) for name in teachers[0]}
        return {
            work.TEACHER: stacked,
            work.STUDENT: torch_networks.common_weights(self.student),
        }


def train(client, images, labels) -> None:
    """One epoch of mini-batches of teacher and student together, in the order of the examples."""
    for batch, own in zip(images.split(work.BATCH), labels.split(work.BATCH), strict=True):
        loss = losses(
            with_layers(client.teacher, batch), with_layers(client.student, batch), client.maps, own
        )
        for optimizer in client.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in client.optimizers:
            optimizer.step()


def losses(teacher, student, maps, labels) -> torch.Tensor:
    """L_t + L_s; in each of them the other model is a fixed target.

    Args:
      teacher, student: (logits, hidden states).
      maps: W^h of each layer, which belong to the teacher.
      labels: [batch].
    """
    cross_entropy = torch.nn.functional.cross_entropy
    fixed_teacher, fixed_student = _fixed(teacher), _fixed(student)
    task = cross_entropy(teacher[0], labels)
    total = task + cross_entropy(fixed_student[0], labels)
    hidden = distance(teacher[1], fixed_student[1], maps)
    of_teacher = task + (divergence(fixed_student[0], teacher[0]) + hidden) / total
    task = cross_entropy(student[0], labels)
    total = task + cross_entropy(fixed_teacher[0], labels)
    hidden = distance(fixed_teacher[1], student[1], [each.detach() for each in maps])
    return of_teacher + task + (divergence(fixed_teacher[0], student[0]) + hidden) / total


def divergence(target, logits) -> torch.Tensor:
    """KL(target || prediction), the mean over the batch."""
    return torch.nn.functional.kl_div(
        logits.log_softmax(1), target.log_softmax(1), log_target=True, reduction="batchmean"
    )


def distance(own, other, maps) -> torch.Tensor:
    """The mean squared distance of the teacher's hidden states to W^h times the student's, summed."""
    return sum(
        torch.nn.functional.mse_loss(state @ each, target)
        for target, state, each in zip(own, other, maps, strict=True)
    )


def compressed(change: torch.Tensor, share: float) -> torch.Tensor:
    """The tensor restored from the fewest singular vectors that have a share of its energy.

    It is sent whole if the factors have as many entries as the tensor or more; vectors are sent whole
    too.
    """
    if change.ndim < 2:
        return change
    matrix = change.flatten(1)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    energy = values.square().cumsum(0)
    rank = min(int((energy < share * energy[-1]).sum()) + 1, len(values))
    if rank * (matrix.shape[0] + 1 + matrix.shape[1]) >= matrix.numel():
        return change
    return ((left[:, :rank] * values[:rank]) @ right[:rank]).view_as(change)


def with_layers(network: torch_networks.Network, images) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and `workload.hidden_widths`' states."""
    x, hidden = images, []
    *layers, output = network.layers
    for layer, following in zip(layers, [*layers[1:], output], strict=True):
        x = layer(x)
        if isinstance(following, torch.nn.Conv2d | torch.nn.Flatten):
            hidden.append(x.mean((2, 3)))
        elif isinstance(layer, torch.nn.Linear):
            hidden.append(x)
    return output(x), hidden


def make_network(pool: work.Pool) -> torch_networks.Network:
    """A pool's network with its weights from the file."""
    network = torch_networks.make_network(pool.network)
    torch_networks.load_weights(network, pool.weights)
    return network


def _fixed(outputs):
    logits, hidden = outputs
    return logits.detach(), [state.detach() for state in hidden]
