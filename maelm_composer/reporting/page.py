"""Rows and figures -> one HTML file that needs nothing else: no script, no font, no network."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

from maelm_composer.reporting.artefacts import DEMO, PAPER_SETTINGS, Artefact, find_artefact, label_of
from maelm_composer.reporting.findings import describe_findings
from maelm_composer.reporting.grid import format_interval, format_number, render_grid
from maelm_composer.reporting.rows import Row
from maelm_composer.reporting.verdicts import NOT_COMPARABLE, is_claim, is_comparable

SIGNED = ('points', 'rank', 'percent')
CLAIMS = 'claims'  # the figure of all of them
COLUMNS = ('', 'score', 'paper', 'ours', '95 % interval', 'could have seen', 'verdict')
NUMBERS = COLUMNS[2:6]

STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --soft: #5c6470; --line: #d9dde3; --back: #ffffff; --card: #f5f6f8;
  --good: #1d6b3a; --bad: #a12622; --open: #7a5a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa3ae; --line: #363c45; --back: #15181c;
  --card: #1e2228; --good: #6fcf97; --bad: #ff8f87; --open: #e5c265; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--back);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.5rem 0 .25rem; }
p { margin: .4rem 0; max-width: 46rem; }
.claim, .note, small { color: var(--soft); }
.notice { border-left: 4px solid var(--open); background: var(--card); padding: .6rem .9rem; max-width: 46rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: 1rem 0; font-size: .95rem; }
a { color: inherit; }
figure { margin: 1rem 0; }
figure img { width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem; }
figure.narrow img { max-width: 34rem; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
table.grid { width: auto; } table.grid th:first-child { position: sticky; left: 0; background: var(--back); }
td.best { font-weight: 700; } td[title] { cursor: help; }
figcaption { max-width: 60rem; font-size: .9rem; }
tr.claims { background: var(--card); }
.holds { color: var(--good); } .fails { color: var(--bad); } .undecided, .no-difference { color: var(--open); }
summary { cursor: pointer; padding: .3rem 0; }
code { font: .85em ui-monospace, monospace; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  body { font-size: 15px; }
  .list thead { display: none; }
  .list, .list tbody, .list tr, .list td { display: block; width: 100%; }
  .list tr { border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; padding: .3rem .2rem; }
  .list td, .list td.number { border: 0; padding: .1rem .6rem; text-align: left; white-space: normal; }
  .list td.number { display: inline-block; width: auto; }
  .list td[data-name]:not([data-name=""])::before { content: attr(data-name) ": "; color: var(--soft); }
  .list td:empty { display: none; }
  dl { grid-template-columns: 1fr; } dt { margin-top: .4rem; }
}
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --back: #fff; --card: #f5f6f8; }
  body { max-width: none; font-size: 11px; padding: 0; } nav { display: none; }
  section, figure, tr { break-inside: avoid; } .scroll { overflow: visible; }
}
"""


def render_page(scale: str, tables: Mapping[str, Sequence[Row]], pictures: Mapping[str, bytes], cost: str) -> str:
    """The page of one scale.

    Args:
        tables: artefact name -> rows
        pictures: artefact name -> SVG; that of all claims is called :data:`CLAIMS`
        cost: a sentence on what the records cost
    """
    artefacts = [find_artefact(name) for name in tables]
    body = [
        f'<h1>MAE-LM at scale <code>{escape(scale)}</code>: what the recorded runs show</h1>',
        '<p>Reproduction of <a href="https://arxiv.org/abs/2302.02060">Representation Deficiency in Masked Language '
        'Modeling</a>. Every number is computed from the committed records.</p>',
        _describe_scale(scale),
        _render_findings(tables),
        f'<p class="note">{escape(cost)}</p>',
        _render_picture('Every claim: difference, interval, margin, the paper’s value', pictures.get(CLAIMS), LEGEND),
        '<nav>' + ''.join(f'<a href="#{a.name}">{escape(a.title.split(":")[0])}</a>' for a in artefacts) + '</nav>',
        *(_render_artefact(a, tables[a.name], pictures.get(a.name)) for a in artefacts),
        _render_provenance([row for rows in tables.values() for row in rows]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>MAE-LM, scale {escape(scale)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
        + '\n'.join(body)
        + '\n</body>\n</html>\n'
    )


LEGEND = (
    'MAE-LM − RoBERTa, where no other difference is named. Line: 95 % interval. Filled: from '
    'several pretraining seeds; hollow: from one, so without an interval. Grey bar: '
    'the margin within which a difference is none. Orange: the paper’s difference, of its base setting. Green circle: '
    'holds; red cross: fails; blue square: no difference; grey: undecided.'
)
NOTE = (
    '<p class="note">A score is the mean over pretraining seeds of the median over fine-tuning seeds; models are '
    'paired by pretraining seed, and by example where the records hold what that needs. Intervals are 95 %: of scores '
    'they are about other seeds and, by the column <code>examples</code> of the CSV files, about other examples; of '
    'all else about other seeds. A claim holds or fails where p &lt; 0.05, by Holm’s correction where it is one of '
    'several. “Could have seen” is the true difference that as many seeds would find in four of five experiments.</p>\n'
)


def _render_findings(tables: Mapping[str, Sequence[Row]]) -> str:
    found = describe_findings(tables)
    items = ''.join(f'<li><strong>{escape(title)}.</strong> {escape(text)}</li>' for title, text in found)
    return f'<section id="findings">\n<h2>What was found</h2>\n<ul>{items}</ul>\n{NOTE}</section>' if found else ''


def _render_picture(title: str, picture: bytes | None, legend: str = '', kind: str = '') -> str:
    if picture is None:
        return ''
    encoded = base64.b64encode(picture).decode()
    caption = f'<figcaption class="note">{escape(legend)}</figcaption>' if legend else ''
    image = f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{encoded}">'
    return f'<figure class="{kind}">{image}{caption}</figure>'


def _describe_scale(scale: str) -> str:
    if is_comparable(scale):
        return f"<p>This is the paper's setting {escape(PAPER_SETTINGS[scale])}.</p>"
    if scale == DEMO:
        return (
            '<p class="notice">The demo shows that every part runs. Its tasks are made from documentation text and are '
            'not GLUE; its numbers are evidence of nothing. The paper’s column is its base setting.</p>'
        )
    return (
        '<p class="notice">This scale is smaller than any in the paper: its numbers are not comparable with the '
        'paper’s absolute numbers. The paper’s column is its base setting, to compare directions only.</p>'
    )


def _render_artefact(artefact: Artefact, rows: Sequence[Row], picture: bytes | None) -> str:
    parts = [
        f'<section id="{artefact.name}">\n<h2>{escape(artefact.title)}</h2>',
        f'<p class="claim">Claim: {escape(artefact.claim)}.</p>',
    ]
    if not is_comparable(rows[0].scale):
        parts.append(f'<p class="note">Our numbers are {NOT_COMPARABLE}, which stand beside them, small.</p>')
    parts.append(_render_picture(artefact.title, picture, kind='narrow' if artefact.name == 'training' else ''))
    claims = [row for row in rows if is_claim(row)]
    values = [row for row in rows if row.value is not None and not is_claim(row)]
    points = [row for row in values if picture is not None and row.x is not None]
    if plain := [row for row in values if row not in points]:
        parts.append(render_grid(plain))
    if claims:
        parts.append(_render_claims(claims))
    if points:
        grid = render_grid(points)
        parts.append(f'<details><summary>The {len(points)} points of the figure</summary>{grid}</details>')
    parts.append(_render_missing([row for row in rows if row.value is None]))
    return '\n'.join(parts) + '\n</section>'


def _render_claims(rows: Sequence[Row]) -> str:
    """A line for each claim, with the columns that some row fills."""
    lines = [_list_cells(row) for row in rows]
    used = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines)]
    head = ''.join(f'<th{_class_of(i)}>{COLUMNS[i]}</th>' for i in used)
    body = '\n'.join(
        '<tr class="claims">'
        + ''.join(f'<td{_class_of(i)} data-name="{COLUMNS[i]}">{line[i]}</td>' for i in used)
        + '</tr>'
        for line in lines
    )
    return (
        f'<div class="scroll"><table class="list"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


def _class_of(column: int) -> str:
    return ' class="number"' if COLUMNS[column] in NUMBERS else ''


def _list_cells(row: Row) -> list[str]:
    """HTML by :data:`COLUMNS`."""
    is_signed = row.unit.split()[0] in SIGNED
    where = '' if row.x is None else f', {row.x_unit} {row.x:,g}'
    seeds = f' <small>({row.pretraining_seeds})</small>' if row.pretraining_seeds > 1 else ''
    verdict = _shorten(row.verdict)
    word = verdict.split(':')[0]
    return [
        f'<strong>{escape(row.row)}</strong>',
        escape(label_of(row.column) + where),
        format_number(row.paper, row.unit, is_signed),
        format_number(row.value, row.unit, is_signed) + seeds,
        format_interval(row),
        format_number(row.detectable, row.unit),
        f'<strong class="{word.replace(" ", "-")}">{word}</strong>{escape(verdict[len(word) :])}',
    ]


def _shorten(verdict: str) -> str:
    """Without what the section says of all its rows."""
    return verdict.removesuffix(NOT_COMPARABLE).removesuffix('; ')


def _render_missing(rows: Sequence[Row]) -> str:
    """What is wanted and not there, once for every reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row.note, []).append(f'{row.row}, {row.column}')
    if not reasons:
        return ''
    items = ''.join(
        f'<li>{escape(reason)} <small>({escape("; ".join(dict.fromkeys(names)))})</small></li>'
        for reason, names in reasons.items()
    )
    return f'<details class="note"><summary>{len(rows)} numbers are missing</summary><ul>{items}</ul></details>'


def _render_provenance(rows: Sequence[Row]) -> str:
    traces = [row.trace for row in rows if row.value is not None]
    names = {
        'run_keys': 'runs',
        'recipe_hash': 'recipes (SHA-256)',
        'git_revision': 'source revision',
        'data_hash': 'data (SHA-256)',
        'tokenizer_hash': 'tokenizer (SHA-256)',
        'seeds': 'seeds',
        'versions': 'versions',
        'hardware': 'hardware',
    }
    items = []
    for name, label in names.items():
        values = dict.fromkeys(value for trace in traces for value in getattr(trace, name).split(';') if value)
        shown = ', '.join(f'<code>{escape(value)}</code>' for value in sorted(values)) or 'not recorded'
        if len(values) > 12:
            shown = f'<details><summary>{len(values)}</summary>{shown}</details>'
        items.append(f'<dt>{label}</dt><dd>{shown}</dd>')
    return (
        f'<section id="provenance">\n<h2>Provenance</h2>\n<dl>{"".join(items)}</dl>\n'
        '<p class="note">The CSV files beside this page carry the same for every single number.</p>\n</section>'
    )
