"""What the tuner found."""
