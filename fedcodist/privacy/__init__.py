"""Differential privacy and secure sums around any method."""
