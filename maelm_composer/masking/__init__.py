"""Masking: drawing the masked positions, and building the batches of pretraining."""
