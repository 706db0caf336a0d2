"""Converts documents to MDS shards of packed rows, in Ray tasks. The output does not depend on the number of workers.

``remote``/parts/00000.json is the record of a finished task. The record is written after the task's shards, so a task
without a record is repeated. ``remote``/manifest.json is written after all records, so shards without a manifest are
incomplete.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import entr  # -p log p
from tqdm import tqdm

from maelm_composer.cluster import connect_ray, get_result
from maelm_composer.config import CorpusConfig
from maelm_composer.data import storage
from maelm_composer.data.corpora import (
    assert_readable,
    describe_source,
    group_documents,
    iterate_documents,
    name_sources,
)
from maelm_composer.data.manifest import (
    HASH,
    ID_COUNTS,
    SPLITS,
    Manifest,
    SplitStatistics,
    find_manifest,
    save_manifest,
)
from maelm_composer.data.packing import Block, build_blocks, pack_blocks
from maelm_composer.data.special_tokens import CLS_ID, PAD_ID, SEP_ID, SPECIAL_TOKENS
from maelm_composer.data.tokenizer import OUTAGE_MINUTES, load_tokenizer
from maelm_composer.errors import InputError
from maelm_composer.files import hash_json, lock_folder, parse_json
from maelm_composer.recipe import to_plain

MAX_TASK_CHARACTERS = 1 << 26  # a task also ends here, since documents may be whole books
NOT_THERE = (
    'a record of a finished task is missing: another conversion works in this folder, or the machines of the cluster '
    'do not share it (name a shared folder, or s3://)'
)
SECONDS_BETWEEN_LOOKS = 60  # at the object store, while no task ends
FORMAT_VERSION = 3  # version of a task's output; to be raised when the same recipe gives other shards


def build_shards(config: CorpusConfig, num_workers: int | None = None) -> tuple[Manifest, bool]:
    """Convert the documents of ``config`` into ``config.remote``/{train, validation, manifest.json}.

    ``num_workers`` Ray tasks run at a time; None: one per core of this machine, or of the cluster at ``RAY_ADDRESS``.
    Returns the manifest, and whether the shards were made now; False if the shards were complete before.

    Raises:
        InputError: there is no tokenizer or no text, a source is not readable, ``remote`` holds other shards, or
            another conversion works there.
    """
    tokenizer, tokenizer_hash = load_tokenizer(config)
    sources = [describe_source(source) for source in config.sources]
    recipe_hash = hash_json(
        {
            'format': FORMAT_VERSION,
            'max_seq_len': config.max_seq_len,
            'validation_fraction': config.validation_fraction,
            'documents_per_task': config.documents_per_task,
            'sources': sources,
            'tokenizer_hash': tokenizer_hash,
        }
    )
    if (complete := _find_own_manifest(config.remote, recipe_hash)) is not None:
        return complete, False

    with contextlib.ExitStack() as lock:
        if not storage.is_s3(config.remote):
            lock.enter_context(lock_folder(Path(config.remote), 'conversion'))
        if (complete := _find_own_manifest(config.remote, recipe_hash)) is not None:  # made before the lock was free
            return complete, False
        assert_readable(config.sources)
        records, counts = _convert(config, tokenizer.to_str(), recipe_hash, num_workers)
        _find_own_manifest(config.remote, recipe_hash)  # where no lock kept another conversion away
        for split in SPLITS:
            if not any(record[split]['rows'] for record in records):
                raise InputError(
                    f'{name_sources(config.sources)}: too little text for one {split} row of {config.max_seq_len} '
                    f'tokens: add text (a .txt is divided at blank lines), or change validation_fraction '
                    f'{config.validation_fraction}'
                )
            shards = [shard for record in records for shard in record[split]['shards']]
            there = set(storage.list_names(storage.join(config.remote, split), recursive=True))
            for name in (shard['zip_data']['basename'] for shard in shards):
                if name not in there:
                    lost, record = f'{split}/{name}', f'parts/{name.partition("/")[0]}.json'
                    raise InputError(
                        f'{config.remote}: {lost} is missing: remove {record} and run `maelm shards` again'
                    )
            storage.write_json_file(storage.join(config.remote, split, 'index.json'), {'version': 2, 'shards': shards})
        storage.write_json_file(storage.join(config.remote, ID_COUNTS), {'train': counts['train'].tolist()})
        if [describe_source(source) for source in config.sources] != sources:
            raise InputError(f'{name_sources(config.sources)}: files have changed while they were read: run it again')
        manifest = Manifest(
            vocab_size=config.tokenizer.vocab_size,
            max_seq_len=config.max_seq_len,
            special_ids=dict(zip(SPECIAL_TOKENS, (0, 1, 2, 3, config.tokenizer.vocab_size - 1), strict=True)),
            splits={split: _sum_statistics(records, split, config.max_seq_len) for split in SPLITS},
            unigram_entropy=round(float(entr(counts['validation'] / counts['validation'].sum()).sum()), 6),
            tokenizer_hash=tokenizer_hash,
            content_hash=_hash_content(records),
            recipe_hash=recipe_hash,
            sources=[to_plain(source) | facts for source, facts in zip(config.sources, sources, strict=True)],
        )
        save_manifest(config.remote, manifest)
        return manifest, True


def _find_own_manifest(remote: str, recipe_hash: str) -> Manifest | None:
    """The manifest of complete shards. Raises InputError if another recipe made them."""
    manifest = find_manifest(remote)
    if manifest is not None and manifest.recipe_hash != recipe_hash:
        raise InputError(
            f'{remote} holds shards of another recipe, tokenizer or text: remove it, or set another remote'
        )
    return manifest


def is_validation(document: str, fraction: float) -> bool:
    """Whether ``document`` belongs to the validation split, which depends on a hash of its text alone."""
    digest = hashlib.blake2b(document.encode(), digest_size=8, person=b'validation').digest()
    return int.from_bytes(digest, 'big') < fraction * 2**64


def convert_documents(
    documents: list[str], tokenizer_json: str, config: CorpusConfig, task: int, folder: Path
) -> dict[str, Any]:
    """Write the shards of one task below the local ``folder``; returns the task's record.

    The record holds for each split the statistics, the count of every id and the index entries of the shards.
    """
    from streaming import MDSWriter
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    dtype = np.uint16 if config.tokenizer.vocab_size <= 1 << 16 else np.uint32
    columns = {'input_ids': f'ndarray:{np.dtype(dtype).name}:{config.max_seq_len}'}
    blocks: dict[str, list[Block]] = {split: [] for split in SPLITS}
    counts = dict.fromkeys(SPLITS, 0)
    for document in documents:
        split = SPLITS[is_validation(document, config.validation_fraction)]
        lines = tokenizer.encode_batch_fast(document.split('\n'), add_special_tokens=False)
        blocks[split] += build_blocks([line.ids for line in lines], config.max_seq_len)
        counts[split] += 1
    record: dict[str, Any] = {}
    for number, split in enumerate(SPLITS):
        generator = np.random.default_rng((task, number))
        rows, dropped = pack_blocks(blocks[split], config.max_seq_len, generator, dtype)
        shards = []
        if len(rows):
            out = folder / split / f'{task:05}'
            with MDSWriter(out=str(out), columns=columns, compression='zstd', hashes=[HASH]) as writer:
                for row in rows:
                    writer.write({'input_ids': row})
            shards = json.loads((out / 'index.json').read_text())['shards']
            (out / 'index.json').unlink()
            for shard in shards:
                for file in (shard['raw_data'], shard['zip_data']):
                    file['basename'] = f'{task:05}/{file["basename"]}'
        record[split] = {
            'documents': counts[split],
            'rows': len(rows),
            'tokens': int((rows != PAD_ID).sum()),
            'dropped_tokens': dropped,
            'id_counts': np.bincount(rows.ravel(), minlength=config.tokenizer.vocab_size).tolist(),
            'shards': shards,
        }
    return record


def _convert(
    config: CorpusConfig, tokenizer_json: str, recipe_hash: str, num_workers: int | None
) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Convert the documents of every task that has no record yet; returns the records of all tasks, in order.

    Also returns for each split the (V,) occurrences of every id, 0 for special tokens.
    """
    import ray

    parts = storage.join(config.remote, 'parts')
    if not storage.is_s3(parts):  # a disk of the network may go on saying that a folder is not there
        Path(parts).mkdir(parents=True, exist_ok=True)
    finished = set(storage.list_names(parts))
    records: dict[int, dict] = {}
    counts = {split: np.zeros(config.tokenizer.vocab_size, np.int64) for split in SPLITS}

    def keep(task: int, record: dict) -> None:
        for split in SPLITS:  # summed at once, since thousands of (V,) counts would fill the memory
            counts[split] += record[split].pop('id_counts')
        records[task] = record

    with connect_ray(num_workers):
        remote_task = ray.remote(num_cpus=1, max_retries=3)(_run_task)
        home = config.remote if storage.is_s3(config.remote) else os.path.abspath(config.remote)
        endpoint = os.environ.get(storage.ENDPOINT)  # another node's environment may have none
        shared = ray.put((tokenizer_json, dataclasses.replace(config, remote=home), recipe_hash, endpoint))
        running: dict[Any, int] = {}
        with (
            tqdm(unit=' tokens', unit_scale=True, desc='shards', dynamic_ncols=True, mininterval=0.5) as progress,
            tempfile.NamedTemporaryFile() as lock,
        ):

            def ask(call: Callable[..., Any], *arguments: Any) -> Any:
                return storage.wait_out(partial(call, *arguments), config.remote, OUTAGE_MINUTES, Path(lock.name))

            def collect(at_most: int) -> None:
                while len(running) > at_most:
                    ended, _ = ray.wait(list(running), num_returns=1, timeout=SECONDS_BETWEEN_LOOKS)
                    if not ended:  # a task may wait for the object store, which only this process can tell
                        ask(find_manifest, config.remote)
                        continue
                    (done,) = ended
                    task = running.pop(done)
                    keep(task, get_result(done))
                    if not (storage.is_s3(parts) or Path(parts, f'{task:05}.json').exists()):
                        raise InputError(f'{config.remote}: {NOT_THERE}')
                    progress.update(sum(records[task][split]['tokens'] for split in SPLITS))
                    progress.set_postfix(documents=sum(r[s]['documents'] for r in records.values() for s in SPLITS))

            tasks = group_documents(iterate_documents(config.sources), MAX_TASK_CHARACTERS, config.documents_per_task)
            for task, documents in enumerate(tasks):
                text_hash = hash_json(documents)
                if f'{task:05}.json' in finished:
                    name = storage.join(parts, f'{task:05}.json')
                    record = parse_json(ask(storage.read_file, name) or b'{}', name, remedy='remove it')
                    if (record.get('recipe_hash'), record.get('text_hash')) == (recipe_hash, text_hash):
                        keep(task, record)
                        continue
                    ask(storage.write_file, name, b'{}')  # it must not vouch for the shards that the task will write
                running[remote_task.remote(documents, shared, task, text_hash)] = task
                # One task is queued beyond those running, so that no worker waits; more would fill the memory.
                # The cluster may have grown.
                collect(at_most=num_workers or max(1, int(ray.cluster_resources().get('CPU', 1))))
            collect(at_most=0)
    there = set(storage.list_names(parts))
    if not all(f'{task:05}.json' in there for task in records):
        raise InputError(f'{config.remote}: {NOT_THERE}')
    if not records:
        raise InputError(f'{name_sources(config.sources)}: no text in these sources')
    for split in SPLITS:
        counts[split][[CLS_ID, PAD_ID, SEP_ID]] = 0
    return [records[task] for task in sorted(records)], counts


def _run_task(
    documents: list[str], shared: tuple[str, CorpusConfig, str, str | None], task: int, text_hash: str
) -> dict[str, Any]:
    tokenizer_json, config, recipe_hash, endpoint = shared
    if endpoint is not None:
        os.environ[storage.ENDPOINT] = endpoint
    # Ray already runs a task per core, so the tokenizer must not start threads.
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'
    with tempfile.TemporaryDirectory() as scratch:
        record = convert_documents(documents, tokenizer_json, config, task, Path(scratch))
        record |= {'recipe_hash': recipe_hash, 'text_hash': text_hash}

        def save() -> None:
            _find_own_manifest(config.remote, recipe_hash)  # another conversion may have ended meanwhile
            for split in SPLITS:
                folder = Path(scratch) / split / f'{task:05}'
                if folder.exists():
                    storage.write_folder(storage.join(config.remote, split, f'{task:05}'), folder)
            storage.write_json_file(storage.join(config.remote, 'parts', f'{task:05}.json'), record)

        storage.wait_out(save, config.remote, OUTAGE_MINUTES, Path(scratch, '.outage'))
    return record


def _hash_content(records: list[dict]) -> str:
    shards = (shard for split in SPLITS for record in records for shard in record[split]['shards'])
    return hashlib.sha256(''.join(shard['raw_data']['hashes'][HASH] for shard in shards).encode()).hexdigest()


def _sum_statistics(records: list[dict], split: str, max_seq_len: int) -> SplitStatistics:
    counted = ('documents', 'rows', 'tokens', 'dropped_tokens')
    total = {name: sum(record[split][name] for record in records) for name in counted}
    return SplitStatistics(fill_rate=round(total['tokens'] / (total['rows'] * max_seq_len), 5), **total)
