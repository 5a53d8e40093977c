"""FedCodist: federated learning of heterogeneous models by knowledge distillation, in JAX."""
