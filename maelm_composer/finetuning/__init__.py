"""A pretrained encoder and a task -> one record (Meng et al., arXiv:2302.02060, preprint, Sec. 4.1 and Table 1)."""
