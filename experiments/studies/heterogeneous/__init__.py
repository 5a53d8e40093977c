"""What was found of methods between different networks, each client judged on its own examples."""
