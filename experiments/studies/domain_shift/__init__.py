"""What was found of the codistillation paper on text of two domains."""
