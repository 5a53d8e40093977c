"""Results of the tuner's studies."""
