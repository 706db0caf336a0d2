"""Ids of the special tokens in every vocabulary: [CLS] 0, [PAD] 1, [SEP] 2, [UNK] 3; [MASK] has the last id.

The RoBERTa and MPNet classes of Transformers expect the first four in an exported model.
"""

CLS_ID, PAD_ID, SEP_ID = 0, 1, 2
NUM_LEADING_SPECIALS = 4
SPECIAL_TOKENS = ('[CLS]', '[PAD]', '[SEP]', '[UNK]', '[MASK]')  # [MASK] has id vocab_size - 1
