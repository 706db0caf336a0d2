"""The table of a campaign: one row a fault; a campaign that was interrupted goes on where it stopped."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.faults.campaign import Campaign, assert_possible
from bench.faults.faults import Fault, Kind, Outcome, draw
from maelm_composer.config import CorpusConfig
from maelm_composer.errors import InputError
from maelm_composer.records import collect_provenance


def run_campaign(
    folder: Path, table: Path, count: int, seed: int, jobs: Sequence[str], kinds: Sequence[Kind]
) -> list[dict[str, str]]:
    """Inflict the faults 0 to ``count`` that have no row without a defect; returns the last row of each.

    Raises:
        InputError: the table has faults of ``seed`` that another source, other jobs or other kinds have drawn, or this
            machine lacks what a kind needs.
    """
    rows = read_last_rows(table)
    assert_drawn_alike(rows, seed, jobs, kinds)
    assert_possible(kinds)
    ended = {(row['seed'], row['number']) for row in rows if row['outcome'] != Outcome.defect.value}
    left = [number for number in range(count) if (str(seed), str(number)) not in ended]
    if left:
        campaign = Campaign(folder, jobs)
        table.parent.mkdir(parents=True, exist_ok=True)
        revision = collect_provenance(CorpusConfig()).git_revision
        for number in left:
            fault = draw(number, seed, jobs, kinds)
            own = {'number': number, 'seed': seed, 'git_revision': revision, 'group': fault.kind.group}
            row = own | describe_draw(fault) | campaign.inflict(fault)
            append_row(table, row)
            print(*row.values(), sep='  ', flush=True)
    return read_last_rows(table)


def append_row(table: Path, row: dict[str, Any]) -> None:
    """Append ``row`` to a CSV, which gets the row's names as its header if it is new."""
    with table.open('a', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, row, lineterminator='\n')
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)


def describe_draw(fault: Fault) -> dict[str, str]:
    """The columns of a row that say what was drawn."""
    return {'kind': fault.kind.name, 'job': fault.job, 'at': f'{fault.at:.3f}'}


def assert_drawn_alike(rows: Sequence[dict[str, str]], seed: int, jobs: Sequence[str], kinds: Sequence[Kind]) -> None:
    """Raise InputError if ``rows`` has a fault of ``seed`` that this source does not draw for its number."""
    for row in rows:
        if row['seed'] == str(seed):
            drawn = describe_draw(draw(int(row['number']), seed, jobs, kinds))
            if any(row[name] != value for name, value in drawn.items()):
                raise InputError(
                    f'fault {row["number"]} of seed {seed} is recorded with other jobs or kinds than are drawn now '
                    f'(git_revision {row["git_revision"][:7]}): choose another --seed'
                )


def read_last_rows(table: Path) -> list[dict[str, str]]:
    """The last row of each fault: one that had shown a defect is inflicted again once that is mended."""
    if not table.exists():
        return []
    with table.open(newline='', encoding='utf-8') as file:
        return list({(row['seed'], row['number']): row for row in csv.DictReader(file)}.values())


def summarize(rows: Sequence[dict[str, str]]) -> str:
    """A Markdown table: how often each kind of fault had each outcome."""
    counts = Counter((row['group'], row['kind'], row['outcome']) for row in rows)
    kinds = list(dict.fromkeys((group, kind) for group, kind, _ in sorted(counts)))
    lines = ['| | fault | the same bytes | told, then the same bytes | defect |', '|---|---|---|---|---|']
    for group, kind in kinds:
        numbers = ' | '.join(str(counts[group, kind, outcome.value]) for outcome in Outcome)
        lines.append(f'| {group} | {kind} | {numbers} |')
    return '\n'.join(lines)
