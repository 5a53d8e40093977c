"""One module per public data set: its reader, checks and splits.

Cards and the programs that prepare them are in the top-level `datasets/`.
"""
