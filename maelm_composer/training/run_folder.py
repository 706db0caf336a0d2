"""The folder of a run (checkpoints/names.py): a local folder, or an object store with a local working copy."""

import contextlib
import shutil
import uuid
from collections import ChainMap
from collections.abc import Iterable, Set
from itertools import chain
from pathlib import Path

from composer.utils import dist

from maelm_composer.checkpoints.find import REMEDY, read_latest
from maelm_composer.checkpoints.names import (
    CHECKPOINT_PREFIX,
    FETCHED,
    LATEST,
    METRICS,
    PROGRESS,
    RECIPE,
    RECORD,
    UNSENT,
)
from maelm_composer.config import PretrainingConfig
from maelm_composer.data.manifest import MANIFEST, TOKENIZER, read_tokenizer_files
from maelm_composer.data.storage import (
    OutageError,
    delete,
    download,
    is_s3,
    join,
    list_names,
    read_file,
    upload,
    write_file,
)
from maelm_composer.errors import InputError
from maelm_composer.files import format_json, hash_file, parse_json, write_bytes, write_text
from maelm_composer.recipe import to_yaml
from maelm_composer.records import Pretraining, format_record
from maelm_composer.training.processes import raise_on_all_ranks, take_from_first_rank

ADDRESS = 'address'  # file that says where the checkpoints beside it are to be sent


class RunFolder:
    """Reads and writes files, and publishes checkpoints, by their names relative to ``save_folder``.

    Every method raises InputError where the object store denies access, and OutageError where it does not answer;
    :meth:`assert_writable` finds that out before training.
    """

    def __init__(self, save_folder: str, run_name: str) -> None:
        self.uri = save_folder.rstrip('/')
        self.is_remote = is_s3(self.uri)
        self.local = Path(f'runs/{run_name}' if self.is_remote else self.uri).absolute()
        if {'{', '}'} & {*str(self.local)}:
            raise InputError(f'{self.local}: Composer would replace the braces in this path: choose another folder')
        self.unsent: list[str] = []  # checkpoints of this process that the object store lacks; the same on every rank

    def assert_writable(self) -> None:
        """Write a file; refuse a working copy in the folder of a local run, which has checkpoints beside its recipe."""
        self.local.mkdir(parents=True, exist_ok=True)
        if self.is_remote and any(self.local.glob(f'{CHECKPOINT_PREFIX}*')):
            raise InputError(
                f'{self.local} holds a local run, where the working copy of {self.uri} would be: '
                'choose another run_name, or move the local run'
            )
        self.write('.probe', 'probe\n')
        with contextlib.suppress(InputError):  # the right to write does not include that to delete
            self.remove('.probe')

    def assert_shared(self) -> None:
        """Refuse a local folder that is another one on another node: no node would have a whole checkpoint.

        Called by every rank, after :meth:`assert_writable` by the first.
        """
        if self.is_remote or dist.get_world_size() == dist.get_local_world_size():
            return
        probe = take_from_first_rank(f'.probe-{uuid.uuid4().hex}')  # a new name, which no disk's cache knows
        with raise_on_all_ranks():
            if dist.get_global_rank() == 0:
                self.write(probe, '')
        try:
            with raise_on_all_ranks():
                if dist.get_local_rank() == 0 and self.read(probe) is None:
                    raise InputError(
                        f'{self.local} of node {dist.get_node_rank()} is not that of node 0: several machines need a '
                        'save_folder on a disk that they share, or in an object store'
                    )
        finally:
            if dist.get_global_rank() == 0:
                with contextlib.suppress(OSError):  # of one rank alone
                    self.remove(probe)

    def read(self, name: str) -> str | None:
        """The text of a file, or None if it does not exist."""
        content = read_file(join(self.uri, name))
        return None if content is None else content.decode()

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file in one atomic step.

        Raises:
            OutageError: the object store has accepted the file, but does not return it.
        """
        content = content.encode() if isinstance(content, str) else content
        write_bytes(self.local / name, content)
        if self.is_remote:
            write_file(join(self.uri, name), content)
            if read_file(join(self.uri, name)) != content:
                raise OutageError(f'{self.uri} accepts a file but does not return it: check its credentials')

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with its files."""
        path = self.local / name
        if path.is_dir() and not path.is_symlink():
            removed = self.local / '.removed'  # a kill leaves no part of a checkpoint under its name
            shutil.rmtree(removed, ignore_errors=True)
            path.rename(removed)
            shutil.rmtree(removed)
        else:
            path.unlink(missing_ok=True)
        if self.is_remote:
            url = join(self.uri, name)
            # progress.json first: a checkpoint without this file is not listed, so a kill leaves no damaged one.
            files = sorted(list_names(url, recursive=True), key=lambda file: file != PROGRESS)
            for target in [url, *(join(url, file) for file in files)]:
                delete(target)

    def write_record(self, record: Pretraining) -> None:
        self.write(RECORD, format_json(format_record(record)))

    def copy_inputs(self, config: PretrainingConfig) -> None:
        """Write the recipe, the tokenizer and the shards' manifest: checkpoints can be used without the shards."""
        self.write(RECIPE, to_yaml(config))
        for name, content in read_tokenizer_files(join(config.data.remote, TOKENIZER)).items():
            self.write(f'{TOKENIZER}/{name}', content)
        manifest = read_file(join(config.data.remote, MANIFEST))
        assert manifest is not None
        self.write(MANIFEST, manifest)

    def publish(self, staged: Path, name: str) -> None:
        """Move the folder ``staged``, a complete checkpoint, to ``name`` and point ``latest`` to it. For every rank.

        A kill before the last step leaves ``latest`` at the previous checkpoint. Without an object store all nodes must
        share the disk; with one, :meth:`send` does the last step, and the checkpoint is in ``unsent`` until then.
        """
        with raise_on_all_ranks():
            if self.is_remote and dist.get_local_rank() == 0:
                write_text(self.local / UNSENT / ADDRESS, self.uri)
                with contextlib.suppress(FileNotFoundError):  # another node on the same disk has moved it
                    staged.rename(self.local / UNSENT / name)
            elif dist.get_global_rank() == 0:
                if (self.local / name).exists():  # left by a run that was killed before the link was set
                    shutil.rmtree(self.local / name)
                staged.rename(self.local / name)
                link = self.local / f'.{LATEST}'
                link.unlink(missing_ok=True)
                try:
                    link.symlink_to(name)
                    link.replace(self.local / LATEST)
                except OSError:  # a file system without links, such as exFAT
                    write_text(self.local / LATEST, name)
        if self.is_remote:
            self.unsent.append(name)

    def send(self) -> None:
        """Upload the log and the checkpoints in ``unsent``, oldest first. Called by every rank.

        Raises:
            OutageError: the object store does not answer; the checkpoints that it lacks are still in ``unsent``.
        """
        while self.unsent:
            folder = self.local / UNSENT / self.unsent[0]
            files: list[str] = []
            with raise_on_all_ranks():
                if dist.get_local_rank() == 0:
                    files = list_names(str(folder), recursive=True)
                    # With ddp, a node that shares no disk with the one that wrote has an empty folder.
                    if not folder.is_dir():
                        raise InputError(f'{folder} has vanished: something else deletes the files of this run')
            held_before = {*chain(*dist.all_gather_object(files)[: dist.get_global_rank()])}  # as on a shared disk
            with raise_on_all_ranks():
                if dist.get_global_rank() == 0 and (self.local / METRICS).exists():  # a new machine has none yet
                    upload(self.local / METRICS, join(self.uri, METRICS))
                if own := {*files} - held_before:
                    url = join(self.uri, folder.name)
                    for file in sorted(own, key=lambda file: (file == PROGRESS, file)):  # that last, see remove
                        upload(folder / file, join(url, file))
                    if lost := own - {*list_names(url, recursive=True)}:
                        raise OutageError(f'{join(url, min(lost))}: was accepted, but is not there')
            with raise_on_all_ranks():
                if dist.get_global_rank() == 0:
                    if missing := self._find_missing(folder.name):
                        where = join(self.uri, folder.name, min(missing))
                        raise InputError(f'{where} is missing: something else deletes the files of this run')
                    self.write(LATEST, folder.name)
            del self.unsent[0]
            if dist.get_local_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)

    def recover(self) -> None:
        """Upload the checkpoints that an earlier process of this run could not upload. Called by every rank.

        Raises:
            InputError: these checkpoints are of another address, the object store no longer has their run, or a node
                that holds a part of them was not started or has lost it.
        """
        if not self.is_remote:
            return
        parts: dict[str, dict[str, str]] = {}  # checkpoint -> the files of this node's part, with their hashes
        hashes: dict[str, dict[str, str]] = {}  # checkpoint -> all of its files, if this node holds their list
        with raise_on_all_ranks():
            if dist.get_local_rank() == 0:
                waiting = {path.name for path in (self.local / UNSENT).glob(f'{CHECKPOINT_PREFIX}*')}
                if waiting:
                    address = read_file(str(self.local / UNSENT / ADDRESS)) or b'its object store'
                    if address != self.uri.encode() or self.read(RECORD) is None:
                        raise InputError(
                            f'{self.local / UNSENT} holds checkpoints of another run, which were not uploaded to '
                            f'{address.decode()}: resume that run there, or delete the folder'
                        )
                    latest = read_latest(self.uri) or ''
                    waiting = {name for name in waiting if name > latest}
                for name in waiting:
                    place = self.local / UNSENT / name
                    parts[name] = {file: hash_file(place / file) for file in list_names(str(place), recursive=True)}
                    hashes[name] = _read_hashes(str(place))
        held, lists = dist.all_gather_object(parts), dist.all_gather_object(hashes)
        self.unsent = sorted(set().union(*held))  # a node may hold a part, all or nothing of a checkpoint
        with raise_on_all_ranks():
            for name in self.unsent if dist.get_global_rank() == 0 else ():
                files = {item for of_node in held for item in of_node.get(name, {}).items()}
                self._assert_whole(name, files, dict(ChainMap(*(of_node.get(name, {}) for of_node in lists))))
            for name in self.unsent if dist.get_local_rank() == 0 else ():
                write_text(self.local / UNSENT / ADDRESS, self.uri)
                (self.local / UNSENT / name).mkdir(exist_ok=True)
        self.send()
        if dist.get_local_rank() == 0:
            shutil.rmtree(self.local / UNSENT, ignore_errors=True)

    def _assert_whole(self, name: str, files: set[tuple[str, str]], hashes: dict[str, str]) -> None:
        """Raise InputError unless ``files`` and the object store hold the whole checkpoint, and no file of another."""
        otherwise = f'delete {self.local / UNSENT} on every machine to resume from the checkpoint before'
        if missing := self._find_missing(name, {file for file, _ in files}, hashes):
            raise InputError(
                f'{join(self.uri, name)} lacks {min(missing)}, which another machine holds: start the run on every '
                f'machine that trained it, or {otherwise}'
            )
        if others := {file for file, digest in files if hashes.get(file, digest) != digest}:
            raise InputError(f'{min(others)} in a {UNSENT}/{name} is not of this checkpoint, or damaged: {otherwise}')

    def _find_missing(self, name: str, held: Set[str] = frozenset(), needed: Iterable[str] = ()) -> set[str]:
        """The files that the checkpoint ``name`` needs, as its progress.json says, and that nobody holds."""
        url = join(self.uri, name)
        return {PROGRESS, *needed, *_read_hashes(url)} - held - {*list_names(url, recursive=True)}

    def fetch(self, name: str) -> Path:
        """Return a checkpoint's local folder, downloaded to every node if need be. Called by every rank."""
        folder = self.local / FETCHED / name if self.is_remote else self.local / name
        with raise_on_all_ranks():
            if self.is_remote and dist.get_local_rank() == 0:
                url = join(self.uri, name)
                for file in list_names(url, recursive=True):
                    if {'..', ''} & {*file.split('/')}:
                        raise InputError(f'{join(url, file)} leads out of the run folder: delete the object')
                    download(join(url, file), folder / file)
        return folder

    def forget(self) -> None:
        """Delete the folder that :meth:`fetch` downloaded. Called by every rank."""
        dist.barrier()
        if self.is_remote and dist.get_local_rank() == 0:
            shutil.rmtree(self.local / FETCHED, ignore_errors=True)  # several nodes may share the disk


def _read_hashes(checkpoint: str) -> dict[str, str]:
    """The hashes of all files of a checkpoint, in progress.json of the folder ``checkpoint``; {} without this file."""
    place = join(checkpoint, PROGRESS)
    content = read_file(place)
    hashes: dict[str, str] = parse_json(content, place, remedy=REMEDY).get('hashes', {}) if content else {}
    return hashes
