"""The whole report: files, bytes, page."""

import csv
import hashlib
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest

from maelm_composer.errors import InputError
from maelm_composer.files import LOCK
from maelm_composer.records import pack_numbers
from maelm_composer.reporting.artefacts import ARTEFACTS, LADDER, RECIPES
from maelm_composer.reporting.figures import DRAWINGS
from maelm_composer.reporting.formatting import format_interval, format_p, format_value
from maelm_composer.reporting.load import load_evidence, read_csv
from maelm_composer.reporting.report import report, write_tables
from maelm_composer.reporting.rows import HEADER, Row
from tests.reporting.conftest import PRETRAINING_SEEDS, Archive

DRAWN = DRAWINGS.keys() - {LADDER.name, RECIPES.name}  # all but those of a ladder
WITHOUT_TORCH = """
import sys
from pathlib import Path

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'composer', 'streaming', 'transformers'):
            raise ImportError(f'{name} is not installed here')

sys.meta_path.insert(0, Refuse())
from maelm_composer.reporting.report import report
report('medium', Path(sys.argv[1]))
"""


def hash_files(folder):
    paths = (path for path in folder.rglob('*') if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope='module')
def page(tmp_path_factory):
    """The page of a full archive."""
    made = Archive(tmp_path_factory.mktemp('results'), 'medium')
    made.add_everything()
    return report('medium', made.results)[0]


def test_made_again_in_another_process_without_torch_it_is_the_same_to_the_byte(page):
    results = page.parent.parent
    before = hash_files(results)
    expected = {f'medium/{a.name}.csv' for a in ARTEFACTS}
    expected |= {f'medium/{name}.{suffix}' for name in DRAWN for suffix in ('png', 'svg')}
    assert expected | {'medium/report.html'} <= set(before)
    with (page.parent / 'table1.csv').open() as file:
        assert next(csv.reader(file)) == HEADER
    command = [sys.executable, '-c', WITHOUT_TORCH, str(results)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, '')
    assert hash_files(results) == before


SMALL = ('small', 'small_batch_32', 'small_3e14', 'small_3e14_batch_32')


@pytest.mark.parametrize('scale', [*SMALL, 'ladder', 'ladder_batch_32'])
def test_the_committed_results_are_what_their_records_say(tmp_path, scale):
    committed = Path(__file__).resolve().parents[2] / 'results'
    for folder in ('records', 'recipes'):
        if (committed / scale / folder).exists():
            shutil.copytree(committed / scale / folder, tmp_path / scale / folder)
    report(scale, tmp_path)
    made, expected = (
        {name: found for name, found in hash_files(folder / scale).items() if '/' not in name}
        for folder in (tmp_path, committed)
    )
    by_hand = {path.name for path in (committed / scale).glob('*.md')} | {LOCK}
    assert made == {name: found for name, found in expected.items() if name not in by_hand}


def test_the_user_s_matplotlibrc_changes_nothing(page, monkeypatch):
    before = (page.parent / 'figure1.svg').read_bytes()
    for name, value in (('lines.linewidth', 9.0), ('savefig.bbox', 'tight'), ('svg.fonttype', 'none')):
        monkeypatch.setitem(matplotlib.rcParams, name, value)
    report('medium', page.parent.parent)
    assert (page.parent / 'figure1.svg').read_bytes() == before


def test_a_number_of_fewer_seeds_is_named_where_print_shows_it(full):
    (full.records / 'rank' / 'rank-medium-s18.json').unlink()
    text = Page(report('medium', full.results)[0].read_text()).text
    assert 'numbers lack seeds' in text
    assert 'effective rank of medium-s18 is not recorded' in text


@pytest.mark.parametrize(
    'p, text',
    [(0.0496, '= 0.0496'), (0.0504, '= 0.0504'), (0.05, '= 0.05'), (0.04996, '= 0.04996'), (0.012, '= 0.012')],
)
def test_a_p_beside_the_level_does_not_look_like_it(p, text):
    assert format_p(p) == text
    assert format_p(0.0004) == '< 0.001'


@pytest.mark.parametrize(
    'unit, value, low, high, text, interval',
    [
        ('points', 0.04, 0.01, 0.07, '+0.04', '0.01 to 0.07'),
        ('points', 0.04, -0.01, 0.09, '0.0', '−0.01 to 0.09'),  # as the interval says, too
        ('points', 0.34, 0.2, 0.48, '+0.3', '0.2 to 0.5'),
        ('rank', 3.0, 2.0, 4.0, '+3', '2.0 to 4.0'),
        ('share', -0.0002, -0.0003, -0.0001, '−0.0002', '−0.0003 to −0.0001'),
    ],
)
def test_a_difference_beside_zero_does_not_look_like_it(unit, value, low, high, text, interval):
    claim = Row('small', 'table1', 'MAE-LM − RoBERTa', 'rte', unit, value=value, low=low, high=high, verdict='holds: 3')
    assert (format_value(claim), format_interval(claim)) == (text, interval)


def test_a_scale_of_the_ladder_s_runs_says_whose_verdict_counts(archive):
    texts = {}
    for scale, run in (('small', 'ladder-1e14'), ('medium', 'medium')):
        made = archive(scale)
        for name in (run, f'{run}-roberta'):
            made.add_run(name)
            made.add_rank(name)
        texts[scale] = ' '.join(Page(report(scale, made.results)[0].read_text()).text.split())
    sentence = 'Where the ladder judges the same difference of the same runs'
    assert sentence in texts['small']
    assert sentence not in texts['medium']


def test_own_tasks_have_a_table_as_long_as_they_have_records(full):
    write_tables(full.results / 'medium', load_evidence(full.results / 'medium', 'medium'))
    before = hash_files(full.results / 'medium')
    declaration = {'kind': 'classification', 'metrics': ['f1', 'accuracy']}
    own = {'baseline': 0.4, 'protocol': {'source': 'files', 'declaration': declaration}}
    for nth, pretraining_seed in enumerate(PRETRAINING_SEEDS):
        for run, score in (('medium', 0.70), ('medium-roberta', 0.60 + nth / 1000)):
            for task, split in (('reviews', ''), ('pretrained', 'easy_')):  # the paper has a column of this name
                metrics = {f'{split}f1': score, f'{split}accuracy': 0.9}
                influences = {f'{split}f1': pack_numbers([0.1, -0.1])}
                own |= {'metrics': metrics, 'influences': influences}
                full.add_score(f'{run}-s{pretraining_seed}', task, 1, score, **own)
    page, _ = report('medium', full.results)
    rows = {(row['row'], row['column']): row for row in read_csv(page.parent / 'own.csv')}
    assert {column for _, column in rows} == {'pretrained easy_f1', 'reviews f1'}
    values = [rows[label, 'reviews f1']['value'] for label in ('MAE-LM', 'RoBERTa', 'a constant answer')]
    assert values == ['70', '60.1', '40']
    gap = rows['MAE-LM − RoBERTa', 'reviews f1']
    assert (gap['value'], gap['examples'], gap['margin'], gap['unit']) == ('9.9', '2', '1', 'points')
    assert gap['verdict'].startswith('holds: 3 pretraining seeds, one of 2 by Holm')
    assert {row['paper'] for row in rows.values()} == {''}
    assert 'Own tasks: development sets' in Page(page.read_text()).text
    after = hash_files(page.parent)
    assert {name for name in after if name.endswith('.csv') and before.get(name) != after[name]} == {'own.csv'}

    full.add_score('medium-s17', 'reviews', 2, 0.5, **own, data_hash='others')
    with pytest.raises(InputError, match=r'^reviews: records .* differ in data_hash: keep those of one experiment'):
        report('medium', full.results)
    for task in ('reviews', 'pretrained'):
        for path in full.records.glob(f'finetuning/{task}-*'):
            path.unlink()
    write_tables(full.results / 'medium', load_evidence(full.results / 'medium', 'medium'))
    after = hash_files(page.parent)
    assert {name: after.get(name) for name in before} == before
    assert 'own.csv' not in after


def test_a_failed_own_task_says_why(archive):
    made = archive('medium')
    made.add_run('medium')
    protocol = {'source': 'files', 'declaration': {'kind': 'span'}}
    made.add_score('medium', 'questions', 1, 0.0, error='no memory', protocol=protocol)
    rows = read_csv(report('medium', made.results)[0].parent / 'own.csv')
    assert {row['column'] for row in rows} == {'questions best_exact'}
    assert 'questions from medium failed: no memory' in [row['note'] for row in rows]


class Page(HTMLParser):
    """Collects text, tags and what would be loaded from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.sources = '', [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ('src', 'srcset') or tag == 'link']

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_else_and_escapes_what_it_is_given(page):
    text = page.read_text()
    page = Page(text)
    assert 'script' not in page.tags
    assert len(page.sources) == len(DRAWN) + 1  # all claims
    assert all(source.startswith('data:image/svg+xml;base64,') for source in page.sources)
    assert not re.search(r'url\(|@import', text)
    assert '<CPU>' not in text  # the processor's name is text and no tag
    assert 'Test <CPU> × 2 cores' in page.text
    assert "not comparable with the paper's absolute numbers" in page.text
    for artefact in ARTEFACTS:
        assert artefact.title in page.text


def test_a_page_of_one_run_says_what_is_missing(archive):
    made = archive('medium')
    made.add_run('medium')
    made.add_score('medium', 'mnli', 1, 0.6)
    text = Page(report('medium', made.results)[0].read_text()).text
    assert 'no finished pretraining run medium-roberta' in text
    assert not (made.results / 'medium' / 'figure1.svg').exists()
    assert (made.results / 'medium' / 'training.svg').exists()
    assert not (made.results / 'medium' / 'figure3.svg').exists()  # of one checkpoint


def test_a_run_whose_name_no_model_has_is_named(archive, capsys):
    made = archive('medium')
    made.add_run('medium-s17')
    made.add_run('medium-mae-s18')
    made.add_rank('medium-s19')
    report('medium', made.results)
    said = capsys.readouterr().err
    assert said.startswith(f'{made.records}: no table reads what is recorded of these runs')
    assert said.endswith('the record of the pretraining is missing: medium-mae-s18, medium-s19\n')


def test_a_figure_whose_records_are_gone_goes_too(archive):
    made = archive('medium')
    made.add_run('medium')
    page, _ = report('medium', made.results)
    assert (page.parent / 'training.png').exists()
    written = (page.parent / 'training.csv').read_bytes()
    for path in (made.records / 'pretraining').iterdir():
        path.unlink()
    with pytest.raises(
        InputError, match=r'medium/records has no finished run of a model of medium: nothing was written'
    ):
        report('medium', made.results)
    assert (page.parent / 'training.csv').read_bytes() == written
    made.add_run('medium-roberta')
    (made.records / 'pretraining/medium-roberta.csv').unlink()
    report('medium', made.results)
    assert not (page.parent / 'training.png').exists()
    assert 'no finished pretraining run medium' in (page.parent / 'training.csv').read_text()


def test_bad_records_are_named_in_one_line(archive):
    made = archive('medium')
    with pytest.raises(InputError, match=r'no records in .*medium/records'):
        report('medium', made.results)
    for name in ('medium/', '../results/medium'):
        with pytest.raises(InputError, match='is not the name of a scale, such as ladder'):
            report(name, made.results)
    made.add_run('medium')
    path = made.write('finetuning', 'broken', {'key': 'x', 'status': 'finished'})
    with pytest.raises(InputError, match=r'broken.json is no fine-tuning record: provenance: Field required'):
        report('medium', made.results)
    path.write_text('{')
    with pytest.raises(InputError, match=r'broken.json is damaged'):
        report('medium', made.results)
