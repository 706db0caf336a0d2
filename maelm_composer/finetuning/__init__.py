"""A pretrained checkpoint -> scores on GLUE and SQuAD 2.0.

(Meng et al., arXiv:2302.02060, preprint, Sec. 4.1 and Table 1; search spaces: Tables 5 and 6).
"""
