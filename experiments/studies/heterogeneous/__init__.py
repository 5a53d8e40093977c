"""Results on methods for different networks, with each client evaluated on its own examples."""
