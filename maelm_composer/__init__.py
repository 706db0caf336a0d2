"""MAE-LM and its RoBERTa baseline, from documents to published tables.

Read it in the order of the pipeline: data -> masking -> model -> training. A module imports its own stage or an
earlier one.

Shape legend of the docstrings and trailing comments; axes of another kind are written out, as in (questions,):

    B     batch (rows)
    N     length of a row, max_seq_len (paper: n)
    S     length that the encoder sees: N minus the [MASK]s kept from it
    T     positions of the sequence at hand: S in the encoder, N in the decoder
    Q, K  queries, keys
    M     positions to predict in a row
    I     indices, any number
    D     hidden size (D_dec: of the decoder)
    H     attention heads (paper: N); not the paper's H
    Dh    size of a head, D / H
    L     layers
    V     vocabulary

A position is an index in the N tokens of a row (``position_ids``: of a block). A slot is one in the S tokens that the
encoder sees, or the M predicted; ``visible_index``, ``predicted_index`` hold each slot's position, N if unused.

Source of the method: (Meng et al., arXiv:2302.02060, preprint). ``docs/deviations.md`` lists the choices
that the paper leaves open, and those taken otherwise than in its authors' released code.
"""

__version__ = '0.2.0.dev0'
