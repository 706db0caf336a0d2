"""Bad input ends a command with one line on standard error and exit code 2, without a traceback."""

import contextlib
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Iterator

SECONDS_FOR_RANK_ZERO = 5
REMEDIES = {  # of the operating system's errors
    errno.EACCES: 'change its permissions, or choose another path',
    errno.EDQUOT: 'free some of your quota',
    errno.EEXIST: 'move that file away, or choose another path',
    errno.EFBIG: 'raise the limit on the size of a file (ulimit -f)',
    errno.EMFILE: 'raise the limit on open files (ulimit -n)',
    errno.ENOSPC: 'free space on that disk',
    errno.ENOTDIR: 'choose another path',
    errno.EROFS: 'choose a path that can be written',
}


class InputError(ValueError):
    """The user's input cannot be used; the message names the input and a remedy."""

    def __init__(self, message: str) -> None:
        # A DataLoader worker wraps the message in the text of a traceback, which ends with the message.
        super().__init__(message.rsplit('InputError: ', 1)[-1].strip())


class Stopped(SystemExit):
    """Ends a process whose run was stopped by a signal: exit code 128 + its number."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__(128 + number)
        self.line = f'{signal.Signals(number).name}: {how}; the same command resumes the run'


def first_line(error: BaseException) -> str:
    """The first line of the message, or the error's class if there is no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def explain(error: Exception) -> str:
    """The message; that of the operating system with the file first and a remedy last, and without its number."""
    if not isinstance(error, OSError) or error.errno is None or error.strerror is None:
        return str(error)
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    text = ': '.join([*([' -> '.join(paths)] if paths else []), error.strerror])
    return '; '.join(filter(None, [text, REMEDIES.get(error.errno)]))


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an :class:`InputError`, an OSError such as a full disk, or exhausted memory into one line and exit code 2.

    Ctrl-C ends with exit code 130.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the locale lacks, such as '≥', is shown as '?'
            stream.reconfigure(errors='replace')
    interrupts, before = [], signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if interrupts or isinstance(error, KeyboardInterrupt):  # torch turns an interrupt into an error of its own
            raise SystemExit(128 + signal.SIGINT) from None
        is_expected = isinstance(error, InputError) or (isinstance(error, OSError) and error.errno is not None)
        if not is_expected and not _is_of_memory(error):
            raise
        if os.environ.get('RANK', '0') != '0':
            # If rank 0 has the same error, only rank 0 prints it: the launcher ends the other ranks meanwhile.
            time.sleep(SECONDS_FOR_RANK_ZERO)
        text = explain(error) if is_expected else f'memory ran out; use smaller batches or a smaller model: {error}'
        print(f'error: {" ".join(text.split())}', file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def telling_of_stop(line: str) -> Iterator[None]:
    """Print ``line`` on standard error if Ctrl-C or a signal ends the body; the exit code is 128 + its number."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        print(line, file=sys.stderr)
        raise SystemExit(stop.code if isinstance(stop, SystemExit) else 128 + signal.SIGINT) from None


def _is_of_memory(error: BaseException) -> bool:
    """Whether torch or Python could not allocate memory. torch is not imported, since some commands do without it."""
    is_of_torch = type(error).__name__ == 'OutOfMemoryError' or 'DefaultCPUAllocator' in str(error)
    return is_of_torch or isinstance(error, MemoryError)
