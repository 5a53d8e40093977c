"""Results on methods under user-level differential privacy."""
