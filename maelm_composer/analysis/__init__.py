"""Effective ranks and subspaces of an encoder's hidden states."""
