"""Records are read as they were written, and a file that is none is refused by name and field."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from maelm_composer.config import SourceConfig
from maelm_composer.errors import InputError
from maelm_composer.records import (
    collect_provenance,
    format_record,
    load_record,
    parse_finetuning,
    parse_pretraining,
    parse_rank,
    write_record,
)

from .records import make_finetuning, make_pretraining, make_rank

RESULTS = Path(__file__).resolve().parents[1] / 'results'
KINDS = {
    'pretraining': (parse_pretraining, make_pretraining('run')),
    'finetuning': (parse_finetuning, make_finetuning('rte')),
    'rank': (parse_rank, make_rank('run')),
}


@pytest.mark.parametrize('kind', KINDS)
def test_every_committed_record_is_read_and_written_unchanged(kind):
    paths = sorted(path for folder in ('records', 'recipes/*') for path in RESULTS.glob(f'*/{folder}/{kind}/*.json'))
    assert len(paths) > 5
    for path in paths:
        record = format_record(load_record(path, KINDS[kind][0]))
        content = json.loads(path.read_text())
        content.pop('checksum', None)  # of newer files; loading has compared it
        # As text, in which 1 and 1.0 differ.
        assert json.dumps(record, sort_keys=True) == json.dumps(content, sort_keys=True), path


@pytest.mark.parametrize('kind', KINDS)
def test_a_new_record_has_a_version_and_survives_its_file(kind, tmp_path):
    parse, plain = KINDS[kind]
    assert parse(json.dumps(plain), 'x').version == 1
    record = parse(json.dumps(plain | {'version': 2}), 'x')
    write_record(tmp_path / 'x.json', record)
    assert load_record(tmp_path / 'x.json', parse) == record
    written = json.loads((tmp_path / 'x.json').read_text())
    assert len(written.pop('checksum')) == 64
    assert written == plain | {'version': 2}


def test_records_name_the_source_that_the_process_began_with(monkeypatch):
    begun = collect_provenance(SourceConfig()).git_revision
    monkeypatch.setattr(subprocess, 'run', lambda *_, **options: SimpleNamespace(stdout='committed meanwhile'))
    assert collect_provenance(SourceConfig()).git_revision == begun != 'committed meanwhile'


@pytest.mark.parametrize('name', ['../x', '/tmp/x', '.x', ''])
def test_a_record_that_names_another_folder_is_refused(name):
    for parse, key, plain in (
        (parse_pretraining, 'run_name', make_pretraining('run')),
        (parse_finetuning, 'key', make_finetuning('rte')),
        (parse_rank, 'key', make_rank('run')),
    ):
        with pytest.raises(InputError, match=f'{key}: String should match pattern'):
            parse(json.dumps(plain | {key: name}), 'file.json')


@pytest.mark.parametrize('kind', KINDS)
def test_what_is_no_record_is_one_line(kind):
    parse, plain = KINDS[kind]
    for change, message in (
        ({'version': 3}, 'version: Input should be 1 or 2'),
        ({'provenance': plain['provenance'] | {'cpu_count': 'two'}}, 'provenance.*cpu_count'),
        ({'sample': 1}, 'sample: Extra inputs are not permitted'),
    ):
        with pytest.raises(InputError, match=f'^a/file.json is no .*{message}'):
            parse(json.dumps(plain | change), 'a/file.json')
    for text, message in (
        ('[]', 'damaged: it is no'),
        ('{}', 'no '),
        ('3', 'damaged: it is no'),
        ('{', 'damaged: Exp'),
    ):
        with pytest.raises(InputError, match=f'^a/file.json is {message}'):
            parse(text, 'a/file.json')
