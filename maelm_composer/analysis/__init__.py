"""Effective ranks and subspaces of an encoder's hidden states, and time to accuracy."""
