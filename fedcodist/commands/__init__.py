"""Programs for the command line: one experiment, sweeps, comparisons, demos."""
