"""Differential privacy: what clients send is clipped, sums are noised, and the cost is counted."""
