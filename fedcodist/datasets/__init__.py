"""One module per public data set: reader, checks and splits.

Data cards and preparation programs are in the top-level `datasets/`.
"""
