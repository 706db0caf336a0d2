"""docs/tour.ipynb: a run that it trains, and a run that it is given."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TOUR = Path(__file__).resolve().parents[1] / 'docs/tour.ipynb'


def execute(folder: Path) -> tuple[str, int]:
    """What the cells print, and the number of their pictures."""
    notebook = nbformat.read(TOUR, as_version=4)
    assert not any(cell.get('outputs') for cell in notebook.cells), 'the notebook is committed without outputs'
    resources = {'metadata': {'path': str(folder)}}
    NotebookClient(notebook, timeout=None, startup_timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get('outputs', [])]
    pictures = sum('image/png' in output.get('data', {}) for output in outputs)
    return ''.join(output.get('text', '') for output in outputs), pictures


@pytest.mark.slow
def test_the_tour_trains_a_run_and_another_execution_loads_it(tmp_path, monkeypatch):
    monkeypatch.delenv('MAELM_RUN', raising=False)
    monkeypatch.setenv('MAELM_CACHE', str(tmp_path / 'cache'))
    text, pictures = execute(tmp_path)
    assert pictures == 1
    predicted = [line for line in text.splitlines() if '  predicted: ' in line]
    assert len(predicted) == 5  # one line for each [MASK] of the text
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / 'tour').rglob('*') if path.is_file()}
    assert (tmp_path / 'tour/run/latest/model.safetensors').is_file()
    for run in ('', 'tour/run'):
        if run:
            monkeypatch.setenv('MAELM_RUN', run)
        again, pictures = execute(tmp_path)
        assert pictures == 1
        assert [line for line in again.splitlines() if '  predicted: ' in line] == predicted
        weights = {path: time for path, time in before.items() if path.suffix == '.safetensors'}
        assert weights == {path: path.stat().st_mtime_ns for path in weights}
