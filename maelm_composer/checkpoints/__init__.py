"""Encoders on disk: finding, loading and saving them, and Hugging Face's models in and out."""
