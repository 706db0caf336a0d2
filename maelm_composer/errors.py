"""Bad input: one clear line on standard error and exit code 2, never a traceback."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator

SECONDS_FOR_RANK_ZERO = 5


class InputError(ValueError):
    """Something the user gave cannot be used; the message names it and what to do."""

    def __init__(self, message: str) -> None:
        # From a DataLoader worker it comes back wrapped in a printed traceback: the message is its end.
        super().__init__(message.rsplit('InputError: ', 1)[-1].strip())


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an :class:`InputError`, or a full or forbidden disk, into one line and exit code 2."""
    try:
        yield
    except (InputError, OSError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise
        if os.environ.get('RANK', '0') != '0':
            # The launcher ends all ranks when one has failed: rank 0, if it met the same error, is the one to speak.
            time.sleep(SECONDS_FOR_RANK_ZERO)
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr, flush=True)
        raise SystemExit(2) from None
