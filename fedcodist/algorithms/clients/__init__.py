"""Methods in which clients train the one model of their pool: FedAvg and what changes its clients."""
