"""Results of this project: a package per paper, and shared code of their pages."""
