"""Where a run's files lie (checkpoints/names.py): a local folder, or an object store with a local working copy."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from composer.utils import dist

from maelm_composer.checkpoints.names import CHECKPOINT_PREFIX, LATEST
from maelm_composer.data.storage import delete, download, is_s3, join, list_names, read_file, upload, write_file
from maelm_composer.errors import InputError
from maelm_composer.files import write_text


class RunFolder:
    """Reads, writes and publishes by name, relative to ``save_folder``.

    Raises:
        InputError: the object store cannot be reached or refuses; told before training by :meth:`assert_writable`.
    """

    def __init__(self, save_folder: str, run_name: str) -> None:
        self.uri = save_folder.rstrip('/')
        self.is_remote = is_s3(self.uri)
        self.local = Path(f'runs/{run_name}' if self.is_remote else self.uri).absolute()

    def assert_writable(self) -> None:
        """Write something and read it back; a working copy must not lie over a run of its own."""
        self.local.mkdir(parents=True, exist_ok=True)
        if self.is_remote and (self.local / LATEST).is_symlink():
            raise InputError(
                f'{self.local} holds a local run, and {self.uri} needs that place for its working copy: '
                'choose another run_name, or move it'
            )
        self.write('.probe', 'probe\n')
        if self.read('.probe') is None:
            raise InputError(f'{self.uri} takes a file and does not give it back: check its credentials')
        self.remove('.probe')

    def read(self, name: str) -> str | None:
        """The text of a file, or None where there is none."""
        content = read_file(join(self.uri, name))
        return None if content is None else content.decode()

    def write(self, name: str, text: str) -> None:
        """A reader sees the old text or the new one."""
        write_text(self.local / name, text)
        if self.is_remote:
            write_file(join(self.uri, name), text.encode())

    def upload(self, name: str) -> None:
        """Bring a file of the working copy to the object store, if there is one."""
        if self.is_remote:
            upload(self.local / name, join(self.uri, name))

    def remove(self, name: str) -> None:
        """A file, or a folder and what is in it."""
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
        """Names of the checkpoints, oldest first; in an object store one may still be half uploaded."""
        if self.is_remote:
            names = {name.split('/')[0] for name in list_names(self.uri, recursive=True)}
        else:
            names = {path.name for path in self.local.iterdir()}
        return sorted(name for name in names if name.startswith(CHECKPOINT_PREFIX))

    def latest(self) -> str | None:
        """Name of the newest whole checkpoint."""
        if self.is_remote:
            return self.read(LATEST)
        link = self.local / LATEST
        return os.readlink(link) if link.is_symlink() else None

    def publish(self, staged: Path, name: str, with_file: str) -> None:
        """Name a checkpoint once every byte of it is there; a kill before then leaves the one before.

        Called by every rank. Nodes need not share a disk where there is an object store; without one they must.

        Args:
            with_file: of the working copy, brought to an object store before.
        """
        with refusing_together():
            if dist.get_global_rank() == 0:
                self.upload(with_file)
            if self.is_remote and dist.get_local_rank() == 0:
                for file in list_names(str(staged), recursive=True):
                    upload(staged / file, join(self.uri, name, file))
        with refusing_together():
            if dist.get_global_rank() == 0:
                if self.is_remote:
                    self.write(LATEST, name)
                else:
                    if (self.local / name).exists():  # of a run that was killed before the next two lines
                        shutil.rmtree(self.local / name)
                    staged.rename(self.local / name)
                    link = self.local / f'.{LATEST}'
                    link.unlink(missing_ok=True)
                    link.symlink_to(name)
                    link.replace(self.local / LATEST)
        if self.is_remote and dist.get_local_rank() == 0:
            shutil.rmtree(staged, ignore_errors=True)

    def fetch(self, name: str) -> Path:
        """A checkpoint as a local folder, on every node. Called by every rank."""
        folder = self.local / name
        with refusing_together():
            if self.is_remote and dist.get_local_rank() == 0:
                url = join(self.uri, name)
                for file in list_names(url, recursive=True):
                    download(join(url, file), folder / file)
        return folder

    def forget(self, name: str) -> None:
        """Delete what :meth:`fetch` downloaded."""
        dist.barrier()
        if self.is_remote and dist.get_local_rank() == 0:
            shutil.rmtree(self.local / name)


@contextlib.contextmanager
def refusing_together() -> Iterator[None]:
    """What one rank refuses in the body, all refuse at its end, which they reach together.

    The launcher ends only the ranks of its own node; the others would wait for what was refused. Called by every rank.
    """
    refusal = None
    try:
        yield
    except (InputError, OSError) as error:
        refusal = str(error)
    for reason in dist.all_gather_object(refusal):
        if reason is not None:
            raise InputError(reason)
