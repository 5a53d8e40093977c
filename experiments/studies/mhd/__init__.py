"""Results on Multi-Headed Distillation."""
