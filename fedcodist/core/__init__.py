"""What a federated method is made of: models, examples, local training, aggregation, keys.

This package imports no other package of the library.
"""
