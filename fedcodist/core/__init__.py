"""The parts of federated methods: models, examples, local training, aggregation, random keys.

This package imports no other package of the library.
"""
