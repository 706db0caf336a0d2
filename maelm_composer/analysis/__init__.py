"""What the hidden states of an encoder span, and when a model reaches an accuracy."""
