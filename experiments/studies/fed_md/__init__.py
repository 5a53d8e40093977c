"""Results on FedMD."""
