"""Tables on standard output, by rich. Imports no torch."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH_OF_A_FILE = 200  # characters, where standard output is no terminal


def open_console() -> Console:
    """Standard output; brackets, as in [MASK], are printed as they are."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)


def begin_table(*left: str, right: Sequence[str] = (), last: Sequence[str] = ()) -> Table:
    """An empty table: columns ``left``, then right-aligned columns ``right``, then columns ``last``."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in (*left, *right, *last):
        table.add_column(name, justify='right' if name in right else 'left', overflow='fold')
    return table


def format_duration(seconds: float) -> str:
    """As ``2 h 05 min``, or ``5 min 20 s`` if it is less than an hour."""
    hours, rest = divmod(round(seconds), 3600)
    return f'{hours} h {rest // 60:02} min' if hours else f'{rest // 60} min {rest % 60:02} s'
