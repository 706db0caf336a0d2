"""Tables on standard output, by rich, and progress on standard error. Imports no torch."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

WIDTH_OF_A_FILE = 200  # characters, where standard output is no terminal
SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES = 5, 30
Item = TypeVar('Item')


def open_console() -> Console:
    """Standard output; brackets, as in [MASK], are printed as they are."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)


def begin_table(*left: str, right: Sequence[str] = (), last: Sequence[str] = ()) -> Table:
    """An empty table: columns ``left``, then right-aligned columns ``right``, then columns ``last``."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in (*left, *right, *last):
        table.add_column(name, justify='right' if name in right else 'left', overflow='fold')
    return table


@cache  # so that a process with many runs prints a notice once
def tell(notice: str) -> None:
    """Print ``notice`` on standard error, unless it is empty."""
    if notice:
        print(notice, file=sys.stderr, flush=True)


def track(items: Iterable[Item], total: int, name: str, unit: str) -> Iterator[Item]:
    """Yield ``items``; on a terminal with a progress bar, else with a line now and then if they take long."""
    if sys.stderr.isatty():
        yield from tqdm(items, desc=name, total=total, unit=f' {unit}', leave=False, dynamic_ncols=True)
        return
    start = time.monotonic()
    next_line = start + SECONDS_TO_FIRST_LINE
    for done, item in enumerate(items):
        if (now := time.monotonic()) >= next_line:
            print(f'{name}: {done:,}/{total:,} {unit}, {now - start:.0f} s', file=sys.stderr, flush=True)
            next_line = now + SECONDS_BETWEEN_LINES
        yield item


def format_duration(seconds: float) -> str:
    """As ``2 h 05 min``, or ``5 min 20 s`` if it is less than an hour."""
    hours, rest = divmod(round(seconds), 3600)
    return f'{hours} h {rest // 60:02} min' if hours else f'{rest // 60} min {rest % 60:02} s'
