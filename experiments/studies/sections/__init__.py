"""What pages of several studies share: cells, tables in Markdown, footnotes."""
