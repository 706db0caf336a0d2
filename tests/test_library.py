"""The snippets of docs/library.md run as they stand."""

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path('docs/library.md').read_text(encoding='utf-8')


def test_the_snippets_run_one_after_another(checkpoint, tmp_path, monkeypatch):
    Path(tmp_path, 'runs').mkdir()
    Path(tmp_path, 'runs/base').symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    states, *others = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)
    exec(states, names)
    assert names['hidden'].shape == (*names['is_real'].shape, names['pretrained'].hidden_size)
    assert len(names['ranks']) == 1 + names['pretrained'].config.num_hidden_layers
    assert not names['is_real'].all()
    for number, row in enumerate(names['texts']):  # alone, a text has the same states: padding is not read
        alone = names['tokenizer'](row, return_tensors='pt').input_ids
        where = torch.arange(alone.shape[1])[None], torch.ones_like(alone)
        hidden = names['encoder'](alone, *where)[0]
        torch.testing.assert_close(names['hidden'][number, : len(hidden)], hidden, rtol=0, atol=1e-5)
    for snippet in others:
        exec(snippet, names)
    assert names['loss'].isfinite()
    assert [scores.shape for scores in names['logits']] == [(2,), (2,)]
