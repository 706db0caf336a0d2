"""The manifest of a folder of shards. ``maelm shards`` writes it last, so shards without one are incomplete."""

import dataclasses
import hashlib
import re
from dataclasses import dataclass
from typing import Any

from maelm_composer.data import storage
from maelm_composer.errors import InputError
from maelm_composer.files import parse_json

MANIFEST = 'manifest.json'
ID_COUNTS = 'id_counts.json'
SPLITS = ('train', 'validation')
HASH = 'sha1'  # of each shard, in the split's index.json
TOKENIZER, TOKENIZER_FILE = 'tokenizer', 'tokenizer.json'  # a folder, and the vocabulary in it
REMAKE = 'remove manifest.json and parts/ of these shards and run `maelm shards` again'
TOKENIZER_RECIPE = 'recipe.json'  # in that folder: hashes of its recipe and of its other files


@dataclass
class SplitStatistics:
    """Counts of one split, ``train`` or ``validation``."""

    documents: int = 0
    rows: int = 0
    tokens: int = 0  # ids that are not [PAD]; rows * max_seq_len * fill_rate
    fill_rate: float = 0.0
    dropped_tokens: int = 0  # in dropped rows: the last row of a task, if it is less than half full


@dataclass
class Manifest:
    """The content of ``manifest.json``."""

    vocab_size: int
    max_seq_len: int
    special_ids: dict[str, int]  # [CLS] [PAD] [SEP] [UNK] [MASK]
    splits: dict[str, SplitStatistics]
    unigram_entropy: float  # nats; of the validation split's ids without special tokens
    tokenizer_hash: str  # SHA-256 of tokenizer/tokenizer.json
    content_hash: str  # SHA-256 over the shards' hashes in order
    recipe_hash: str
    sources: list[dict[str, Any]]


def load_manifest(remote: str) -> Manifest:
    """Read the manifest of the shards under ``remote``, a local folder or s3://bucket/prefix.

    Raises:
        InputError: there are no shards, or another version of this package made them.
    """
    if (manifest := find_manifest(remote)) is None:
        raise InputError(f'no shards at {remote}: run `maelm shards RECIPE.yaml` first (yamls/data/)')
    return manifest


def find_manifest(remote: str) -> Manifest | None:
    """As :func:`load_manifest`; None if there are no shards."""
    where = storage.join(remote, MANIFEST)
    if (content := storage.read_file(where)) is None:
        return None
    fields = parse_json(content, where, remedy=REMAKE)
    try:
        found = fields.pop('splits')
        splits = {name: SplitStatistics(**found[name]) for name in SPLITS}
        return Manifest(splits=splits, **fields)
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f'{where} is not a manifest of this version ({error}): {REMAKE}') from None


def load_id_counts(remote: str) -> list[int]:
    """The (V,) number of occurrences of each id in the training rows; 0 for special tokens."""
    where = storage.join(remote, ID_COUNTS)
    content = storage.read_file(where)
    if content is None:
        raise InputError(f'{where} is missing: {REMAKE}')
    if content.startswith(b'['):  # version 0.1 wrote the list alone
        content = b'{"train": %s}' % content
    counts: list[int] = parse_json(content, where, ['train'], REMAKE)['train']
    return counts


def read_tokenizer_files(folder: str) -> dict[str, bytes]:
    """The files of the tokenizer in ``folder`` by name; empty if there are none.

    Raises:
        InputError: a file is missing or differs from its hash in recipe.json (a tokenizer of version 0.1 has none), or
            recipe.json names a file outside ``folder``.
    """
    place, remedy = storage.join(folder, TOKENIZER_RECIPE), 'restore it: the shards and every run on them hold a copy'
    recipe = storage.read_file(place)
    hashes = {} if recipe is None else parse_json(recipe, place, remedy=remedy).get('hashes', {})
    if foreign := [name for name in hashes if not re.fullmatch(r'\w[\w.-]*', name)]:  # a copy would be written there
        raise InputError(f'{place} names {foreign[0]!r}, which is no file of that folder: {remedy}')
    names = {*hashes, TOKENIZER_RECIPE} if hashes else storage.list_names(folder)
    files = {name: storage.read_file(storage.join(folder, name)) or b'' for name in sorted(names)}
    for name, expected in hashes.items():
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise InputError(f'{storage.join(folder, name)} is missing or damaged: {remedy}')
    return files


def assert_own_tokenizer(remote: str, manifest: Manifest) -> None:
    """Raise InputError if the tokenizer beside the shards under ``remote`` is not the one that made them."""
    folder = storage.join(remote, TOKENIZER)
    content = read_tokenizer_files(folder).get(TOKENIZER_FILE)
    if content is not None and hashlib.sha256(content).hexdigest() != manifest.tokenizer_hash:
        raise InputError(
            f'{folder} is not the tokenizer of the shards beside it: restore it (every run on them holds a copy), or '
            f'remove {remote} and make tokenizer and shards again'
        )


def save_manifest(remote: str, manifest: Manifest) -> None:
    """Write ``manifest.json`` in one atomic step."""
    storage.write_json_file(storage.join(remote, MANIFEST), dataclasses.asdict(manifest), indent=2)
