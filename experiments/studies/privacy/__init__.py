"""What was found of methods under user-level differential privacy."""
