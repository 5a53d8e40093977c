"""Experiments that need no download; `fedcodist run NAME` takes one of them without a path."""
