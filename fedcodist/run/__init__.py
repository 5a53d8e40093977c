"""The experiment loop: compiled programs, blocks of rounds, evaluation, checkpoints, run folders."""
