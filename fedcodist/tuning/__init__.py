"""Hyperparameter search with Optuna: studies, trials, search spaces."""
