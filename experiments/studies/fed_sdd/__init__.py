"""What was found of FedSDD."""
