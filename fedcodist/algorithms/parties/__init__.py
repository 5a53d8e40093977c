"""Methods in which every client has an architecture of its own and shares only what it knows."""
