"""FedMD's collaboration in PyTorch (Li and Wang, 2019), parties one by one."""

import torch
from peers import torch_networks
from peers import workload as work


class Party:
    """A party's network, and its two optimizers, which last over all rounds."""

    def __init__(self, pool: work.Pool):
        self.network = torch_networks.make_network(pool.network)
        torch_networks.load_weights(self.network, pool.weights)
        self.digest, self.revisit = (
            torch.optim.Adam(self.network.parameters(), work.PARTY_RATE, eps=work.PARTY_EPSILON)
            for _ in range(2)
        )


def collaborate(parties, images, private, orders) -> None:
    """One round: all send logits of public images, then each learns their mean and its own examples.

    Args:
      parties: Party by name.
      images: the public images of this round.
      private: name -> (images, labels).
      orders: name -> positions of public and of private images in the order of visits, [one epoch].
    """
    with torch.no_grad():
        logits = [_answers(party.network.eval(), images) for party in parties.values()]
    consensus = torch.stack(logits).mean(0)
    for name, party in parties.items():
        party.network.train()
        for rows in orders[name]["digest"].split(work.DIGEST_BATCH):
            error = (party.network(images[rows]) - consensus[rows]).abs().mean()
            _step(party, party.digest, error)
        own, labels = private[name]
        for rows in orders[name]["revisit"].split(work.BATCH):
            loss = torch.nn.functional.cross_entropy(party.network(own[rows]), labels[rows])
            _step(party, party.revisit, loss)


def _answers(network, images):
    return torch.cat([network(batch) for batch in images.split(work.ANSWER_BATCH)])


def _step(party, optimizer, loss) -> None:
    penalty = work.OUTPUT_PENALTY * party.network.output.weight.square().sum()
    optimizer.zero_grad(set_to_none=True)
    (loss + penalty).backward()
    optimizer.step()
