"""What is run from a command line: one experiment, sweeps, comparisons, demos."""
