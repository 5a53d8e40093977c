"""Distillation between models: loop, ensembles, cached teachers, early stopping, weight averaging."""
