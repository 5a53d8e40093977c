"""Methods in which clients train one shared model: FedAvg and methods that change its local training."""
