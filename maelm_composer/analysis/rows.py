"""The rows of token ids that a rank is measured on, from validation shards or text, and their views with [MASK]."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from maelm_composer.config import DataConfig, MaskingConfig, SourceConfig, SourceKind
from maelm_composer.data.corpora import find_files, group_documents, iterate_documents
from maelm_composer.data.dataset import PretrainingRows
from maelm_composer.data.manifest import TOKENIZER, TOKENIZER_FILE, load_manifest, read_tokenizer_files
from maelm_composer.data.packing import build_blocks, pack_blocks
from maelm_composer.data.special_tokens import CLS_ID, NUM_LEADING_SPECIALS, PAD_ID, SEP_ID
from maelm_composer.data.storage import join
from maelm_composer.errors import InputError
from maelm_composer.files import hash_file, hash_json
from maelm_composer.masking.collate import MaskingCollator

SPLIT = 'validation'
LONGEST_TEXT_ROW = 512  # tokens, the paper's length, also for encoders that take longer rows
CHARACTERS_PER_PACK = 1 << 20  # text is read and packed into rows in pieces of this size, only as far as needed
TOKENS_PER_BATCH = 16_384
# PAPER-SILENT: which tokens are "real". Not [CLS] and [SEP], whose number depends on how text is cut into blocks.
NOT_REAL = (CLS_ID, PAD_ID, SEP_ID)
Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class RowSource:
    """Packed rows, ``[CLS] line [SEP] line [SEP] [CLS] ...``, of ids in our shards' numbering, which masking needs."""

    identity: dict[str, Any]  # for the record (JSON); its ``hash`` is that of the rows
    open: Callable[[], Iterator[Ids]]  # yields (N,) rows in a fixed order
    vocab_size: int  # of the rows' ids; [MASK] is the last id
    model_ids: NDArray[np.int64]  # (vocab_size,) the encoder's id for each id of the rows


def find_shards(config: DataConfig, tokenizer: PreTrainedTokenizerFast, max_seq_len: int) -> RowSource:
    """The validation rows of ``config.remote``.

    Raises:
        InputError: the shards are missing, have longer rows than the encoder takes, or another vocabulary than
            ``tokenizer``.
    """
    manifest = load_manifest(config.remote)
    if manifest.max_seq_len > max_seq_len:
        raise InputError(
            f'{config.remote} has rows of {manifest.max_seq_len} tokens, the encoder takes {max_seq_len}: '
            'give other shards (--data) or text files (--text)'
        )
    content = read_tokenizer_files(join(config.remote, TOKENIZER)).get(TOKENIZER_FILE)
    if content is None or Tokenizer.from_buffer(content).get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"{config.remote} was made with another vocabulary than the checkpoint's: choose other shards or text files"
        )

    def open_rows() -> Iterator[Ids]:
        dataset = PretrainingRows(config, manifest, SPLIT, batch_size=1, seed=0)
        for row in range(manifest.splits[SPLIT].rows):
            yield dataset[row]['input_ids']

    identity = {'kind': 'shards', 'remote': config.remote, 'split': SPLIT, 'hash': manifest.content_hash}
    return RowSource(identity, open_rows, manifest.vocab_size, np.arange(manifest.vocab_size))


def find_text(
    patterns: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    max_seq_len: int,
    column: str = SourceConfig.text_column,
) -> RowSource:
    """Rows packed from .txt, .jsonl and .parquet files as ``maelm shards`` packs them, with any fast tokenizer.

    Args:
        patterns: globs of the files.
        column: of .jsonl and .parquet files.

    Raises:
        InputError: a glob has no match, a file is unreadable, it has no such column, or the tokenizer lacks one of
            [CLS], [PAD], [SEP] and [MASK].
    """
    source = SourceConfig(kind=SourceKind.files, paths=list(patterns), text_column=column)
    length = min(max_seq_len, LONGEST_TEXT_ROW)
    specials = {CLS_ID: 'cls_token', PAD_ID: 'pad_token', SEP_ID: 'sep_token', -1: 'mask_token'}
    # The tokenizer's ids are shifted past our leading special ids, so that no piece has the id of a special token.
    model_ids = np.arange(len(tokenizer) + NUM_LEADING_SPECIALS + 1) - NUM_LEADING_SPECIALS
    for ours, name in specials.items():
        theirs = getattr(tokenizer, f'{name}_id')
        if theirs is None:
            raise InputError(f"the checkpoint's tokenizer has no {name}: [MASK] representations need one")
        model_ids[ours] = theirs
    backend = tokenizer.backend_tokenizer  # set to raw text by load_pretrained

    def tokenize(document: str) -> list[list[int]]:
        encodings = backend.encode_batch_fast(document.split('\n'), add_special_tokens=False)
        return [[piece + NUM_LEADING_SPECIALS for piece in encoding.ids] for encoding in encodings]

    def open_rows() -> Iterator[Ids]:
        for number, pack in enumerate(group_documents(iterate_documents([source]), CHARACTERS_PER_PACK)):
            blocks = [block for document in pack for block in build_blocks(tokenize(document), length)]
            rows, _ = pack_blocks(blocks, length, np.random.default_rng(number), np.uint32)
            yield from rows

    files = find_files(source)
    pieces = hashlib.sha256(backend.to_str().encode()).hexdigest()
    facts = [length, CHARACTERS_PER_PACK, pieces, [hash_file(file) for file in files]]
    facts += [column] if column != SourceConfig.text_column else []  # records of earlier versions have no column
    names = [Path(file).name for file in files]
    # The suffix decides how a file is read. Without .txt the key is that of earlier versions.
    kinds = [Path(name.removesuffix('.gz').removesuffix('.zst')).suffix for name in names]
    facts += [kinds] if '.txt' in kinds else []
    identity = {'kind': 'text', 'files': names, 'row_length': length, 'hash': hash_json(facts)}
    return RowSource(identity, open_rows, len(model_ids), model_ids)


@dataclass(frozen=True)
class View:
    """One batch of rows with and without [MASK]. All fields are (B, S)."""

    plain_ids: Tensor  # the original tokens
    masked_ids: Tensor  # the same with [MASK] at the masked positions
    position_ids: Tensor
    segment_ids: Tensor  # 0 is padding
    is_real: Tensor  # neither [CLS], [SEP] nor padding
    is_masked: Tensor  # True for the real tokens that are [MASK] in ``masked_ids``

    def to(self, device: torch.device) -> 'View':
        return View(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def number_blocks(self) -> Tensor:
        """(B, S) a number for each position that identifies its row and block."""
        rows = torch.arange(len(self.segment_ids), device=self.segment_ids.device)
        return self.segment_ids + rows[:, None] * (self.segment_ids.max() + 1)


def iterate_views(
    source: RowSource, *, max_tokens: int, mlm_probability: float, seed: int, is_packed: bool
) -> Iterator[View]:
    """Batches of the first rows of ``source`` until they contain ``max_tokens`` real tokens, or of all rows.

    The masks are drawn as in pretraining, and the encoder's input contains every [MASK], as in plain MLM (Sec. 2.2).

    Args:
        is_packed: False for an encoder without block-wise attention: each block becomes a padded row of its own.
    """
    masking = MaskingConfig(mlm_probability=mlm_probability, encoder_mask_fraction=1.0)
    collator = MaskingCollator(masking, source.vocab_size, seed)
    model_ids = torch.from_numpy(source.model_ids)
    rows, tokens = enumerate(source.open()), 0
    while tokens < max_tokens:
        samples: list[dict[str, Any]] = []
        for number, row in rows:
            samples.append({'input_ids': row, 'row': number, 'epoch': 0})
            tokens += int(np.isin(row, NOT_REAL, invert=True).sum())
            if tokens >= max_tokens or len(samples) * len(row) >= TOKENS_PER_BATCH:
                break
        if not samples:
            return
        batch = collator(samples)
        is_masked = batch.labels >= 0
        plain = torch.where(is_masked, batch.labels, batch.input_ids)
        is_real = torch.isin(plain, torch.tensor(NOT_REAL), invert=True)
        ids = model_ids[plain], model_ids[batch.input_ids]
        view = View(*ids, batch.position_ids, batch.segment_ids, is_real, is_masked)
        yield from [view] if is_packed else split_blocks(view, int(model_ids[PAD_ID]))


def split_blocks(view: View, pad_id: int) -> Iterator[View]:
    """Unpack ``view``: each block becomes a row, longest first, padded to the longest of its batch."""
    rows, length = view.segment_ids.shape
    pieces = [
        (row * length + (segments == segment).nonzero().flatten())
        for row, segments in enumerate(view.segment_ids)
        for segment in range(1, int(segments.max()) + 1)
    ]
    pieces.sort(key=len, reverse=True)
    fills = {'plain_ids': pad_id, 'masked_ids': pad_id, 'position_ids': 0, 'is_real': 0, 'is_masked': 0}
    flat = {name: functional.pad(getattr(view, name).flatten(), (0, 1), value=fill) for name, fill in fills.items()}
    while pieces:
        count = max(rows * length // len(pieces[0]), 1)
        # (B, S) index into the flattened packed rows; padding has the index after the last position.
        index = nn.utils.rnn.pad_sequence(pieces[:count], batch_first=True, padding_value=rows * length)
        taken = {name: values[index] for name, values in flat.items()}
        yield View(**taken, segment_ids=(index < rows * length).long())
        pieces = pieces[count:]
