"""The device of a process (the GPU, if there is one), and the memory of device and host."""

import contextlib
import ctypes
import os
import re
import resource
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from maelm_composer.errors import InputError

FILES = 65_536
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LESS_MEMORY = 'lower training.device_train_microbatch_size or data.num_workers'
MORE_SHARED_MEMORY = 'enlarge /dev/shm (docker run --shm-size) or run `maelm doctor --clean`'


def find_device() -> torch.device:
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def name_device() -> str:
    """The GPU's name, or the number of CPU threads of this process, as in records."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f'CPU, {torch.get_num_threads()} threads'


@contextlib.contextmanager
def explain_shortage(microbatch_size: int, key: str = 'training.device_train_microbatch_size') -> Iterator[None]:
    """Turn what the machine lacks into an InputError that says what to change: ``key`` is to be lowered.

    That is memory, shared memory, open files, or a compiler for ``training.compile``.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f'{microbatch_size} rows in one forward pass do not fit into the memory of {name_device()}: lower {key}'
        ) from error
    except (EOFError, OSError, RuntimeError) as error:
        if re.search(r'No working C\+\+ compiler|Failed to find C compiler', str(error)):  # torch's words, and Triton's
            raise InputError('the machine has no C++ compiler: install g++, or give training.compile=false') from None
        if 'Too many open files' in str(error):  # from a loader worker, which sends batches as shared memory
            raise InputError('too many open files: raise the limit (ulimit -n) or lower data.num_workers') from None
        if re.search(r'DataLoader worker .*killed by signal: Bus error', str(error)):
            raise InputError(f'a loader worker was killed, since /dev/shm is full: {MORE_SHARED_MEMORY}') from None
        if 'Pin memory thread exited' in str(error):  # which receives the batches on a GPU's machine
            raise InputError(
                'the thread that receives batches has ended: raise the limit of open files (ulimit -n), or '
                + LESS_MEMORY
            ) from None
        is_killed = re.search(r'DataLoader worker .*(killed by signal: Killed|exited unexpectedly)', str(error))
        if not (is_killed or _is_lost_worker(error)):
            raise
        raise InputError(f'a loader worker was killed, most likely because memory ran out: {LESS_MEMORY}') from None


def _is_lost_worker(error: BaseException) -> bool:
    """Whether the other end of a connection of ``multiprocessing`` went away, at whichever of its messages.

    The main process fetches each tensor from the worker that made it, as the descriptor of an open file. If the worker
    dies meanwhile, the connection is refused or reset, or ends before or within a message or before the descriptor.
    """
    if isinstance(error, RuntimeError):
        return False
    innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return innermost.f_globals.get('__name__') in ('multiprocessing.connection', 'multiprocessing.reduction')


def raise_file_limit() -> None:
    """Let this process and its loader workers open as many files as the system allows, at most 65,536.

    A worker sends each tensor as an open file. One that runs out of files loses a batch, for which the trainer waits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_freed_memory(keeps: bool = True) -> None:
    """Have the C library reuse the memory of large tensors instead of returning it to the system.

    By default the pages of a large tensor are returned when the tensor is freed, and the next allocation faults them in
    again. On two CPU cores the page faults took 9 % of an fp32 and 13 % of a bf16 training step (6 layers of width
    256). Reuse costs memory: the peak of a step of Hugging Face's eager RoBERTa is 6 % (fp32) and 11 to 33 % (bf16)
    higher.

    The setting holds for the whole process; False sets the largest thresholds that glibc would have reached by itself.
    A C library without ``mallopt`` is not changed.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, 'mallopt'):
        # Older versions of glibc accept at most 32 MiB, which is also the largest threshold that they choose.
        library.mallopt(M_MMAP_THRESHOLD, 2**30 if keeps else 2**25) or library.mallopt(M_MMAP_THRESHOLD, 2**25)
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1 if keeps else 64 * 2**20)
        if not keeps:
            library.malloc_trim(0)


def find_dead_segments() -> list[Path]:
    """This user's shared memory and lock files of StreamingDataset that belong to no live process.

    StreamingDataset numbers its datasets: 000000_locals and so on. A number is dead when no process has any of its
    segments mapped; its lock files are dead, too.
    """
    memory = Path('/dev/shm')
    if not memory.is_dir():  # not Linux
        return []
    candidates = [*memory.glob('[0-9]*_*'), *Path(tempfile.gettempdir()).glob('[0-9]*_filelock')]
    mapped = ''  # read after the files were listed: a run that starts in between is alive
    for maps in Path('/proc').glob('[0-9]*/maps'):
        with contextlib.suppress(OSError):  # the process ended, or is another user's
            mapped += maps.read_text(errors='replace')
    live = set(re.findall(rf'{re.escape(str(memory))}/(\d{{6}})_', mapped))
    return sorted(
        path
        for path in candidates
        if (match := re.fullmatch(r'(\d{6})_[a-z_]+', path.name)) and match[1] not in live and _is_own(path)
    )


def _is_own(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # its run has just ended
        return path.stat().st_uid == os.getuid()
    return False
