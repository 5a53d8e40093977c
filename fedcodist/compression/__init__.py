"""Fewer bytes between clients and server: compressors, and a wrapper that puts them on any method."""
