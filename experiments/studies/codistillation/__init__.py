"""Results on "Knowledge codistillation": numbers, claims, tables, figures."""
