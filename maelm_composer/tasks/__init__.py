"""GLUE, SQuAD 2.0 and the demo's tasks: their rows, their inputs and their metrics."""
