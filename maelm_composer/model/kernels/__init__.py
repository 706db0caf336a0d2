"""Functions written by hand for speed, each beside a plain twin of the same arguments, but for hints of speed.

A kernel and its ``plain_`` twin are equal in value and in every gradient (tests/model/test_kernels.py). The twin
defines the function; the kernel computes the same faster.
"""
