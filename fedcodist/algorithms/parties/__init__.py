"""Methods of parties: clients that each own a model, possibly of different architectures."""
