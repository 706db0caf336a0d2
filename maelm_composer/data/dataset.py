"""Rows of token ids in an order that no number of ranks or workers changes, resumable within an epoch."""

import contextlib
import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Any

from streaming import Stream
from streaming.base.compression import decompress
from streaming.base.distributed import get_world_size
from streaming.base.hashing import get_hash

from maelm_composer.config import DataConfig
from maelm_composer.data import storage
from maelm_composer.data.manifest import HASH, REMAKE, Manifest
from maelm_composer.errors import InputError, explain
from maelm_composer.files import assert_local, hash_file, parse_json
from maelm_composer.patches import RobustStreamingDataset


class VerifiedStream(Stream):
    """The shards under ``source``, unpacked into ``local``, each compared with its hash by a process of the machine.

    Streaming's own class writes every download to the same temporary file, even from several jobs that share a cache,
    and refuses a cache that a killed job seems to hold ('Reused local directory'). This class moves every unpacked
    shard into place in one atomic step, so any number of jobs can share a cache, whether they end or are killed.
    """

    def __init__(self, source: str, local: str, max_outage_minutes: float) -> None:
        # Without a remote Streaming neither downloads nor reserves the folder for one job.
        super().__init__(local=local, keep_zip=False)
        self.source, self.max_outage_minutes = source, max_outage_minutes
        self.whole: set[str] = set()  # unpacked shards whose hashes this process has compared
        content, cached = storage.read_file(storage.join(source, 'index.json')), os.path.join(local, 'index.json')
        if content is None:
            raise InputError(f'{source}/index.json is missing: {REMAKE}')
        _assert_harmless(content, f'{source}/index.json')
        if storage.read_file(cached) != content:  # the same rows may have been packed again, to other bytes
            storage.write_file(cached, content)

    def set_up_local(self, shards: list[Any], cache_usage_per_shard: Any) -> None:
        """Do nothing: :meth:`prepare_shard` looks at each shard when it is needed.

        Streaming's own method would delete unpacked shards that another job is reading.
        """

    def prepare_shard(self, shard: Any) -> int:
        """Fetch and unpack ``shard`` unless its file is complete; returns the bytes written."""
        ((raw, packed),) = shard.file_pairs
        target = os.path.join(self.local, raw.basename)
        if target in self.whole and os.path.isfile(target):
            return 0
        with contextlib.suppress(FileNotFoundError):  # also if the cache is emptied while the file is read
            if hash_file(target, HASH) == raw.hashes[HASH]:
                self.whole.add(target)
                return 0
            Path(target).unlink()  # so that no job reads a damaged file
        content = self._fetch(packed.basename, packed.hashes[HASH])
        storage.write_file(target, decompress(shard.compression, content))
        return int(raw.bytes)

    def _fetch(self, name: str, expected: str) -> bytes:
        source = storage.join(self.source, name)
        for _ in range(2):  # an answer may have been damaged on its way
            content = storage.wait_out(
                partial(storage.read_file, source), source, self.max_outage_minutes, Path(self.local, '.outage')
            )
            if content is None:
                raise InputError(f'shard {source} is missing: {REMAKE}')
            if get_hash(HASH, content) == expected:
                return content
        raise InputError(f'shard {source} is damaged: its {HASH} is not the one in index.json; {REMAKE}')


def _assert_harmless(index: bytes, where: str) -> None:
    """Raise InputError unless all shards hold arrays, since Streaming refuses others later, and lie in its folder."""
    shards = parse_json(index, where, ['shards', 'version'], REMAKE)['shards']
    try:
        for shard in shards:
            names = [shard[kind]['basename'] for kind in ('raw_data', 'zip_data') if shard.get(kind)]
            kinds = {encoding.split(':')[0] for encoding in shard.get('column_encodings', ['none'])}
            if kinds != {'ndarray'} or any({'..', ''} & {*name.split('/')} for name in names):
                raise InputError(f'{where}: {names} of {", ".join(sorted(kinds))} are no shards of `maelm shards`')
        if not shards:
            raise KeyError('no shards')
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f'{where} is not an index of shards ({error}): {REMAKE}') from None


class PretrainingRows(RobustStreamingDataset):
    """The rows of a split: iterated in whole global batches, shuffled anew in every epoch, or read by their index.

    Yields ``{'input_ids': (N,) uint16 or uint32, 'row': int, 'epoch': int}``. ``row`` is the index in the split and
    ``epoch`` counts from 0, so that a mask can be drawn from (seed, epoch, row) alone; a row read by its index, as in
    validation, has epoch -1.

    The k-th global batch of an epoch holds the same rows for any number of ranks and loader workers. Of R ranks on one
    node, rank r reads the rows at r, r + R, r + 2R, ... of the batch.

    Args:
        batch_size: rows of one rank in one optimizer step; the global batch is that times the number of ranks.
        max_outage_minutes: how long a shard in an object store that does not answer is waited for.

    Raises:
        InputError: an index or a shard is missing, or its hash is wrong.
    """

    def __init__(
        self,
        config: DataConfig,
        manifest: Manifest,
        split: str,
        *,
        batch_size: int,
        seed: int,
        max_outage_minutes: float = 0.0,
    ) -> None:
        global_batch_size = batch_size * get_world_size()
        source, local = storage.join(config.remote, split), str(cache_folder(config, manifest) / split)
        super().__init__(
            streams=[VerifiedStream(source, local, max_outage_minutes)],
            # Only whole batches, so that the rows of an epoch do not depend on the number of ranks. In training each
            # epoch leaves out other rows. None is all rows, those of a validation split smaller than a batch.
            epoch_size=manifest.splits[split].rows // global_batch_size * global_batch_size or None,
            batch_size=batch_size,
            shuffle=True,
            shuffle_seed=seed,
            shuffle_algo='py1e',
            shuffle_block_size=config.shuffle_block_size,
            num_canonical_nodes=1,
        )

    def __getitem__(self, at: Any) -> Any:
        try:
            item = super().__getitem__(at)
        except OSError as error:  # a loader worker's OSError reaches the trainer without its number
            raise InputError(explain(error)) from None
        return {'input_ids': item['input_ids'].copy(), 'row': int(at), 'epoch': self.current_epoch}


def cache_folder(config: DataConfig, manifest: Manifest) -> Path:
    """The folder of the unpacked shards in ``config.local``, else in $MAELM_CACHE, else in ~/.cache/maelm.

    The name of the folder is a hash of the shards' location and content.
    """
    root = config.local or os.environ.get('MAELM_CACHE') or '~/.cache/maelm'
    assert_local(root, 'data.local' if config.local else 'MAELM_CACHE')
    location = config.remote if storage.is_s3(config.remote) else os.path.abspath(config.remote)
    name = hashlib.sha256(os.fsencode(f'{location}\n{manifest.content_hash}')).hexdigest()[:16]
    return Path(root).expanduser() / name
