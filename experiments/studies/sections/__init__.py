"""Shared code of the pages: cells, commands, tables in Markdown, and last sections."""
