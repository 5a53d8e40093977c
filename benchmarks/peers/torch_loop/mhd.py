"""Multi-Headed Distillation in PyTorch (Zhmoginov et al., 2023), clients one by one."""

import copy
import math

import torch
from peers import torch_networks
from peers import workload as work


class Client:
    """A client's network, its optimizer, and its buffer of checkpoints, at first the neighbours'."""

    def __init__(self, pool: work.Pool):
        self.network = torch_networks.make_network(pool.network)
        torch_networks.load_weights(self.network, pool.weights)
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), work.MHD_RATE, work.MHD_MOMENTUM
        )
        self.checkpoints: list[torch.nn.Module] = []


def exchange(clients, orders, round) -> None:
    """Fills buffers before the first round; later it puts one new checkpoint into each.

    Args:
      clients: Client by name, in their order.
      orders: name -> purpose -> array, see `workload.Pool`.
      round: counted from 0.
    """
    everyone = list(clients.values())
    present = [copy.deepcopy(client.network) for client in everyone]
    for name, client in clients.items():
        own = orders[name]
        if not client.checkpoints:
            client.checkpoints = [present[source] for source in own["first"].tolist()]
        elif round > 0:
            at = int(own["replaced"][round])
            client.checkpoints[at] = present[int(own["source"][round])]


def train(client, private, public, orders, round) -> None:
    """One client's steps of a round.

    Args:
      client: Client.
      private: (images, labels).
      public: images.
      orders: purpose -> array: indices of the private and the public examples of each step, and the
        entry of the checkpoint buffer that teaches.
      round: counted from 0, for the learning rate.
    """
    images, labels = private
    steps = len(orders["private"])
    for step in range(steps):
        done = (round * steps + step) / (work.MHD_ROUNDS * steps)
        for group in client.optimizer.param_groups:
            group["lr"] = work.MHD_RATE * (1 + math.cos(math.pi * done)) / 2
        rows = orders["private"][step]
        main = client.network.main(images[rows])
        seen = public[orders["public"][step]]
        own = client.network(seen)
        with torch.no_grad():
            teacher = client.checkpoints[int(orders["drawn"][step])](seen)
        loss = torch.nn.functional.cross_entropy(main, labels[rows])
        loss = loss + work.EMBEDDING_WEIGHT * _apart(own[1], teacher[1])
        loss = loss + work.HEAD_WEIGHT * _taught(own[0], teacher[0])
        client.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        client.optimizer.step()


def _apart(own, teacher):
    """The mean squared distance of normalised embeddings."""
    normalise = torch.nn.functional.normalize
    return (normalise(own) - normalise(teacher)).square().sum(1).mean()


def _taught(own, teacher):
    """Cross-entropy of each auxiliary head to the previous head, the teacher's or its own.

    Of these two heads, the more confident one is the target.

    Args:
      own, teacher: logits [batch, 1 + heads, classes].
    """
    mine, theirs = own.detach()[:, :-1].softmax(-1), teacher[:, :-1].softmax(-1)
    is_mine = mine.amax(-1, keepdim=True) > theirs.amax(-1, keepdim=True)
    target = torch.where(is_mine, mine, theirs)
    return -(target * own[:, 1:].log_softmax(-1)).sum(-1).mean(0).sum()
