"""Documents -> tokenizer -> packed shards -> rows of token ids."""
