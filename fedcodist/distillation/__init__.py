"""Distillation between models: the loop, ensembles, cached teachers, early stopping, weight averaging."""
