"""From an ml_collections config to an experiment."""
