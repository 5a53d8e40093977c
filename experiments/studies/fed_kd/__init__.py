"""Results on FedKD."""
