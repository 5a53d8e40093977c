"""Results of this project: a package per study, and shared code of their pages."""
