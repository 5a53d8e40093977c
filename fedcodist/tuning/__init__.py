"""Hyperparameter search with optuna: studies, trials, search spaces."""
