"""What a federated method is made of: models, examples, local training, aggregation, keys.

Imports no other room.
"""
