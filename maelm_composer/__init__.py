"""MAE-LM and its RoBERTa baseline, from documents to published tables.

Read it in the order of the pipeline: data -> masking -> model -> training. A module imports its own stage or an
earlier one.

Shape legend, used by every docstring and trailing comment:

    B     batch (rows)
    N     original length of a row (max_seq_len)
    S     length that the encoder sees: N minus the [MASK]s kept from it
    T     positions of the sequence at hand: S in the encoder, N in the decoder
    Q, K  queries, keys
    M     positions to predict in a row
    D     hidden size (D_dec: of the decoder)
    H     attention heads
    Dh    size of a head, D / H
    L     layers
    V     vocabulary

A position is an index in the N tokens of a row. A slot is an index in the S tokens that the encoder sees, or in the M
that are predicted; ``visible_index`` and ``predicted_index`` hold the position of each slot, N if it is unused.

Source of the method: (Meng et al., arXiv:2302.02060, preprint). ``docs/deviations.md`` lists every choice
that the paper leaves open, or that is taken otherwise than its authors' released code.
"""

__version__ = '0.2.0.dev0'
