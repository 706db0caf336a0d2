"""Functions written by hand for speed.

Each kernel has a plain twin, ``plain_...``, in the same module. The twin defines the function; the kernel computes the
same values and gradients faster (tests/model/test_kernels.py). Arguments that only choose how a kernel computes
(``is_tied`` of ``embed``, ``backend`` of ``attend``) are missing in the twin. ``materialize`` is the identity.
"""
