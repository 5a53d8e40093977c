"""Compression of messages: compressors, and a wrapper that applies them to any method."""
