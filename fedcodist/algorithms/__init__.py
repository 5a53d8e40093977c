"""The methods, by what is trained: one model (`clients`), models of a server (`pools`), a network
of each client with a server (`parties`) or without one (`graph`)."""
