"""What was found of "Knowledge codistillation": numbers, claims, tables, figures."""
