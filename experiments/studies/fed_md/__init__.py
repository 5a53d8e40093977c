"""What was found of FedMD."""
