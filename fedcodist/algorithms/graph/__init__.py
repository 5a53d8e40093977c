"""Decentralised methods, without a server: clients learn from their neighbours in a graph."""
