"""Fine-tuning a pretrained encoder on one task, which gives one record (arXiv:2302.02060, Sec. 4.1 and Table 1)."""
