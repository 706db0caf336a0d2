"""A search space, tasks and seeds -> fine-tuning runs on Ray, and the best point of each task (Tables 5 and 6)."""
