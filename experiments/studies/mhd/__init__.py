"""What was found of multi-headed distillation."""
