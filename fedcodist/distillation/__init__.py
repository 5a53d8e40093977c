"""Teaching models by the outputs of others: the loop, ensembles, cached teachers, early stopping."""
