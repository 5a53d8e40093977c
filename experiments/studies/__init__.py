"""What this project found: a package per paper, and what their pages share."""
