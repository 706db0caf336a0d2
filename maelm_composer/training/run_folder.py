"""The folder of a run (checkpoints/names.py): a local folder, or an object store with a local working copy."""

import os
import shutil
from pathlib import Path

from composer.utils import dist

from maelm_composer.checkpoints.names import CHECKPOINT_PREFIX, LATEST
from maelm_composer.data.storage import delete, download, is_s3, join, list_names, read_file, upload, write_file
from maelm_composer.errors import InputError
from maelm_composer.files import write_text
from maelm_composer.training.ranks import raise_on_all_ranks


class RunFolder:
    """Reads and writes files, and publishes checkpoints, by their names relative to ``save_folder``.

    Every method raises InputError where the object store cannot be reached or denies access;
    :meth:`assert_writable` finds that out before training.
    """

    def __init__(self, save_folder: str, run_name: str) -> None:
        self.uri = save_folder.rstrip('/')
        self.is_remote = is_s3(self.uri)
        self.local = Path(f'runs/{run_name}' if self.is_remote else self.uri).absolute()

    def assert_writable(self) -> None:
        """Write a file and read it back; refuse a working copy in the folder of a local run."""
        self.local.mkdir(parents=True, exist_ok=True)
        if self.is_remote and (self.local / LATEST).is_symlink():
            raise InputError(
                f'{self.local} holds a local run, where the working copy of {self.uri} would be: '
                'choose another run_name, or move the local run'
            )
        self.write('.probe', 'probe\n')
        if self.read('.probe') is None:
            raise InputError(f'{self.uri} accepts a file but does not return it: check its credentials')
        self.remove('.probe')

    def read(self, name: str) -> str | None:
        """The text of a file, or None if it does not exist."""
        content = read_file(join(self.uri, name))
        return None if content is None else content.decode()

    def write(self, name: str, text: str) -> None:
        """Write a file in one atomic step."""
        write_text(self.local / name, text)
        if self.is_remote:
            write_file(join(self.uri, name), text.encode())

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with its files."""
        path = self.local / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if self.is_remote:
            url = join(self.uri, name)
            for target in [url, *(join(url, file) for file in list_names(url, recursive=True))]:
                delete(target)

    def checkpoints(self) -> list[str]:
        """Names of the checkpoints, oldest first; in an object store one may be incompletely uploaded."""
        if self.is_remote:
            names = {name.split('/')[0] for name in list_names(self.uri, recursive=True)}
        else:
            names = {path.name for path in self.local.iterdir()}
        return sorted(name for name in names if name.startswith(CHECKPOINT_PREFIX))

    def latest(self) -> str | None:
        """Name of the newest complete checkpoint."""
        if self.is_remote:
            return self.read(LATEST)
        link = self.local / LATEST
        return os.readlink(link) if link.is_symlink() else None

    def publish(self, staged: Path, name: str, with_file: str) -> None:
        """Move a complete checkpoint to ``name`` and point ``latest`` to it. Called by every rank.

        A kill before the last step leaves ``latest`` at the previous checkpoint. Without an object store all nodes must
        share the disk.

        Args:
            staged: folder that holds the checkpoint's files.
            with_file: file of the working copy that is uploaded before the checkpoint.
        """
        with raise_on_all_ranks():
            if self.is_remote and dist.get_global_rank() == 0:
                upload(self.local / with_file, join(self.uri, with_file))
            if self.is_remote and dist.get_local_rank() == 0:
                for file in list_names(str(staged), recursive=True):
                    upload(staged / file, join(self.uri, name, file))
        with raise_on_all_ranks():
            if dist.get_global_rank() == 0:
                if self.is_remote:
                    self.write(LATEST, name)
                else:
                    if (self.local / name).exists():  # left by a run that was killed before the link was set
                        shutil.rmtree(self.local / name)
                    staged.rename(self.local / name)
                    link = self.local / f'.{LATEST}'
                    link.unlink(missing_ok=True)
                    link.symlink_to(name)
                    link.replace(self.local / LATEST)
        if self.is_remote and dist.get_local_rank() == 0:
            shutil.rmtree(staged, ignore_errors=True)

    def fetch(self, name: str) -> Path:
        """Return a checkpoint's local folder, downloaded to every node if need be. Called by every rank."""
        folder = self.local / name
        with raise_on_all_ranks():
            if self.is_remote and dist.get_local_rank() == 0:
                url = join(self.uri, name)
                for file in list_names(url, recursive=True):
                    if not name.startswith(CHECKPOINT_PREFIX) or {'..', ''} & {*f'{name}/{file}'.split('/')}:
                        raise InputError(f'{join(url, file)} leads out of the run folder: look at {self.uri}/{LATEST}')
                    download(join(url, file), folder / file)
        return folder

    def forget(self, name: str) -> None:
        """Delete the files that :meth:`fetch` downloaded. Called by every rank."""
        dist.barrier()
        if self.is_remote and dist.get_local_rank() == 0:
            shutil.rmtree(self.local / name)
