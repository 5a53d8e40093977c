"""Methods with pools of clients, each with one model; on the server the models teach each other."""

# The function and its module have the same name: the package's attribute is the function.
from fedcodist.algorithms.pools.independent_pools import independent_pools as independent_pools
