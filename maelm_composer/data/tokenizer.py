"""Trains a byte-level BPE tokenizer, saves it for ``AutoTokenizer``, and loads it for the conversion to shards."""

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from maelm_composer.config import CorpusConfig, TokenizerConfig
from maelm_composer.data import storage
from maelm_composer.data.corpora import assert_readable, describe_source, iterate_documents, name_sources
from maelm_composer.data.manifest import (
    MANIFEST,
    TOKENIZER,
    TOKENIZER_FILE,
    TOKENIZER_RECIPE,
    assert_own_tokenizer,
    find_manifest,
    read_tokenizer_files,
)
from maelm_composer.data.special_tokens import CLS_ID, SEP_ID, SPECIAL_TOKENS
from maelm_composer.errors import InputError
from maelm_composer.files import hash_file, hash_json, parse_json, raising_os_errors
from maelm_composer.recipe import to_plain

*LEADING_SPECIALS, MASK = SPECIAL_TOKENS
SETTINGS = 'tokenizer_config.json'
OUTAGE_MINUTES = 60.0  # so long the object store may be away when hours of work are to be saved


def build_tokenizer(config: CorpusConfig) -> bool:
    """Train the tokenizer of ``config`` and save it under ``config.remote``/tokenizer.

    Returns whether the tokenizer was trained now; False if the same recipe had made the tokenizer before, or version
    0.1 the one of the shards beside it.

    Raises:
        InputError: the folder holds another recipe's tokenizer, cannot be written or is that of complete shards, or the
            text is too small for the vocabulary.
    """
    folder = storage.join(config.remote, TOKENIZER)
    recipe = hash_json(
        {
            'tokenizer': to_plain(config.tokenizer),
            'max_seq_len': config.max_seq_len,
            'sources': [describe_source(source) for source in config.sources],
        }
    )
    files = read_tokenizer_files(folder)
    if TOKENIZER_RECIPE not in files and (manifest := find_manifest(config.remote)) is not None:
        assert_own_tokenizer(config.remote, manifest)
        if TOKENIZER_FILE in files:  # of version 0.1
            return False
        raise InputError(
            f'{folder} has no {TOKENIZER_FILE}, but there are shards beside it, which need their own tokenizer: '
            f'restore the folder (every run on these shards holds a copy), or remove {config.remote}'
        )
    if written := files.get(TOKENIZER_RECIPE):
        where = storage.join(folder, TOKENIZER_RECIPE)
        if parse_json(written, where, ['recipe_hash'], f'remove {folder}')['recipe_hash'] != recipe:
            has_shards = find_manifest(config.remote) is not None
            old = f'{config.remote}, whose shards need that tokenizer,' if has_shards else folder
            raise InputError(f'{folder} holds the tokenizer of another recipe: remove {old} or set another remote')
        return False
    storage.assert_can_write(folder)
    assert_readable(config.sources)
    documents = sample_documents(iterate_documents(config.sources), config.tokenizer.max_training_bytes)
    try:
        tokenizer = train_tokenizer(documents, config.tokenizer)
    except InputError as error:
        raise InputError(f'{name_sources(config.sources)}: {error}') from None
    with tempfile.TemporaryDirectory() as scratch:
        save_tokenizer(tokenizer, Path(scratch), config.max_seq_len)
        hashes = {path.name: hash_file(path) for path in sorted(Path(scratch).iterdir())}
        facts = {'recipe_hash': recipe, 'hashes': hashes}

        def save() -> None:
            storage.write_folder(folder, Path(scratch))
            # Written last, so that an interrupted upload is not mistaken for a tokenizer.
            storage.write_json_file(storage.join(folder, TOKENIZER_RECIPE), facts, indent=2)

        with tempfile.NamedTemporaryFile() as lock:
            storage.wait_out(save, folder, OUTAGE_MINUTES, Path(lock.name))
    return True


def sample_documents(documents: Iterable[str], max_bytes: int) -> list[str]:
    """Sample documents of at most ``max_bytes`` in UTF-8, chosen by a hash of their text; their order is kept."""
    kept: list[tuple[int, str]] = []
    total, threshold = 0, 1 << 64
    for text in documents:
        encoded = text.encode()
        rank = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), 'big')
        if rank >= threshold:
            continue
        kept.append((rank, text))
        total += len(encoded)
        while total > max_bytes and len(kept) > 1:
            threshold //= 2
            kept = [item for item in kept if item[0] < threshold] or kept[:1]
            total = sum(len(item[1].encode()) for item in kept)
    return [text for _, text in kept]


def train_tokenizer(documents: list[str], config: TokenizerConfig) -> Tokenizer:
    """Learn ``config.vocab_size`` pieces, including the five special tokens, from ``documents``.

    Raises:
        InputError: there are no documents, or too few for that many pieces.
    """
    if not documents:
        raise InputError('the sources hold no text')
    tokenizer = Tokenizer(models.BPE(unk_token='[UNK]'))
    # NFC changes nothing that a reader sees. Every byte has a piece, so [UNK] never occurs.
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if config.lowercase else [])]
    tokenizer.normalizer = normalizers.Sequence(steps)
    # With the prefix space, a word has the same pieces at the start of a line as within it.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - 1,  # [MASK] is added as the last id
        min_frequency=2,
        special_tokens=LEADING_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.split('\n') for document in documents), trainer)
    if (learned := tokenizer.get_vocab_size() + 1) != config.vocab_size:
        raise InputError(
            f'the text is too small for tokenizer.vocab_size {config.vocab_size}: it yields {learned} pieces; '
            'give more text or a smaller vocabulary'
        )
    # [MASK] goes into the model's own vocabulary, so that every count of the pieces includes it.
    state = json.loads(tokenizer.to_str())
    state['model']['vocab'][MASK] = config.vocab_size - 1
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([MASK])
    # This ByteLevel step only removes the leading space from a piece's offsets, for extractive question answering.
    template = make_template('[CLS]', CLS_ID, '[SEP]', SEP_ID)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return tokenizer


def make_template(cls: str, cls_id: int, sep: str, sep_id: int) -> processors.TemplateProcessing:
    """The rows of ``tasks.examples.encode``: RoBERTa's, with two separators within a pair and one segment."""
    return processors.TemplateProcessing(
        single=f'{cls} $A {sep}',
        pair=f'{cls} $A {sep} {sep} $B:0 {sep}:0',
        special_tokens=[(cls, cls_id), (sep, sep_id)],
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_seq_len: int) -> None:
    """Save ``tokenizer`` so that ``AutoTokenizer.from_pretrained(folder)`` loads it."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_seq_len,
        add_prefix_space=True,
        **{f'{token.strip("[]").lower()}_token': token for token in SPECIAL_TOKENS},
        model_input_names=['input_ids', 'attention_mask'],
    )
    write_tokenizer(wrapped, folder)


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a Hugging Face ``tokenizer`` so that Transformers 4 and 5 load it."""
    with raising_os_errors(folder / TOKENIZER_FILE):
        tokenizer.save_pretrained(folder)
    path = folder / SETTINGS
    settings = json.loads(path.read_text(encoding='utf-8'))
    before = dict(settings)
    settings.pop('auto_map', None)  # the address of code in a Hugging Face repository, which was not used
    if settings['tokenizer_class'] == 'TokenizersBackend':  # the class's name in Transformers 5, unknown to 4
        settings['tokenizer_class'] = 'PreTrainedTokenizerFast'
    if settings != before:
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')


def load_tokenizer(config: CorpusConfig) -> tuple[Tokenizer, str]:
    """Load the tokenizer under ``config.remote``; returns the tokenizer and the SHA-256 (hex) of its file.

    The tokenizer reads the spelling of a special token, such as "[MASK]", as ordinary text.

    Raises:
        InputError: there is no tokenizer, or its vocabulary, case or length differ from the recipe's.
    """
    folder = storage.join(config.remote, TOKENIZER)
    files = read_tokenizer_files(folder)
    content, settings = files.get(TOKENIZER_FILE), files.get(SETTINGS)
    # Version 0.1 wrote no recipe.json; only shards tell such a tokenizer from an interrupted `maelm tokenizer`.
    is_whole = TOKENIZER_RECIPE in files or storage.read_file(storage.join(config.remote, MANIFEST)) is not None
    if content is None or settings is None or not is_whole:
        found = f'{folder} has no {TOKENIZER_RECIPE}' if content and settings else f'no tokenizer at {folder}'
        raise InputError(f'{found}: run `maelm tokenizer` with the same recipe first')
    facts = parse_json(settings, f'{folder}/{SETTINGS}', ['model_max_length'], 'run `maelm tokenizer` again')
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise InputError(f'{folder}/{TOKENIZER_FILE} is damaged: {error}; remove {folder}') from None
    tokenizer.encode_special_tokens = True
    lowercases = tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str('A') == 'a'
    for name, theirs, ours in (
        ('tokenizer.vocab_size', tokenizer.get_vocab_size(), config.tokenizer.vocab_size),
        ('tokenizer.lowercase', lowercases, config.tokenizer.lowercase),
        ('max_seq_len', facts['model_max_length'], config.max_seq_len),
        ('[MASK]', tokenizer.token_to_id(MASK), config.tokenizer.vocab_size - 1),
        *((name, tokenizer.token_to_id(name), wanted) for wanted, name in enumerate(LEADING_SPECIALS)),
    ):
        if theirs != ours:
            raise InputError(f'{folder}: {name} is {theirs}, the recipe needs {ours}')
    return tokenizer, hashlib.sha256(content).hexdigest()
