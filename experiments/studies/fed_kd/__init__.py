"""What was found of FedKD."""
