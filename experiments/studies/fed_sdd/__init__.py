"""Results on FedSDD."""
