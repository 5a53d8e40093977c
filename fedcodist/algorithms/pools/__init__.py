"""Servers of several pools of clients, a model each, which teach each other."""

# Of the function and its module, which have one name, the package gives the function.
from fedcodist.algorithms.pools.independent_pools import independent_pools as independent_pools
