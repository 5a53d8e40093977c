"""Servers of several pools of clients, a model each, which teach each other."""
