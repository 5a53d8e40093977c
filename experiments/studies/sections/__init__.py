"""Shared code of the studies' pages: cells, tables in Markdown, footnotes."""
