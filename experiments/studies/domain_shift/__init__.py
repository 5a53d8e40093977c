"""Results of the codistillation paper's experiment on text of two domains."""
