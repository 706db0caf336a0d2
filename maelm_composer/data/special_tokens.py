"""Ids that every vocabulary shares: [CLS] 0, [PAD] 1, [SEP] 2, [UNK] 3, the pieces, and [MASK] as the last id.

The first four agree with what RoBERTa's and MPNet's classes expect of an exported model.
"""

CLS_ID, PAD_ID, SEP_ID, UNK_ID = 0, 1, 2, 3
NUM_LEADING_SPECIALS = 4
SPECIAL_TOKENS = ('[CLS]', '[PAD]', '[SEP]', '[UNK]', '[MASK]')  # [MASK] has id vocab_size - 1
