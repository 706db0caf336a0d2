"""An exported folder, loaded by the Auto classes, has our model's outputs to 1e-5 in fp32, with padding."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    MPNetModel,
    RobertaModel,
    pipeline,
)

from maelm_composer.checkpoints.export import export
from maelm_composer.checkpoints.mask_predictor import MaskPredictor
from maelm_composer.checkpoints.pretrained import load_pretrained
from maelm_composer.checkpoints.saved_model import save_model
from maelm_composer.config import RelativePositionFunction, SpanConfig
from maelm_composer.errors import InputError
from maelm_composer.finetuning.model import FinetuningBatch, FinetuningModel
from maelm_composer.model.maelm import build_model
from maelm_composer.records import CONTENT_HASH
from maelm_composer.tasks.catalogue import TASKS
from tests.records import make_finetuning
from tests.tiny import CHECKPOINT, MODEL, SAMPLES, write_run, write_tokenizer

TOLERANCE = {'rtol': 1e-5, 'atol': 1e-5}
V, N = 300, 260
ROW = 200  # tokens, with which a model is fine-tuned
TEXTS = ['every good boy does fine ' * 9, 'all cows eat grass, and some eat hay ' * 9]
LONG = ' '.join([*TEXTS, TEXTS[1]])  # beyond the farthest bucket, which starts at 240
KINDS = {  # relative positions -> class; None: the class in the exported folder
    'roberta': ({'relative_position_buckets': 0}, RobertaModel),
    'mpnet': ({}, MPNetModel),
    'base_pp': ({'relative_position_buckets': 64}, None),
    'large_pp': ({'relative_position_buckets': 128, 'relative_position_max_distance': 256}, None),
    'authors': ({'relative_position_function': RelativePositionFunction.authors}, None),
}


@pytest.fixture(autouse=True)
def modules_cache(tmp_path, monkeypatch):
    """Transformers copies the code of exported folders to this folder instead of the user's cache."""
    monkeypatch.setattr('transformers.dynamic_module_utils.HF_MODULES_CACHE', str(tmp_path / 'modules'))


@pytest.fixture(scope='session')
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('tokenizer')
    write_tokenizer(folder, TEXTS, V, N)
    return folder


@pytest.fixture
def make_run(tmp_path, tokenizer):
    """``make_run(kind)`` -> a finished run of pretraining with random weights, biases and norms."""

    def make(kind: str, **changes) -> str:
        keys = {'vocab_size': V, 'max_seq_len': N, 'layer_norm_eps': 1e-3} | KINDS[kind][0] | changes
        model = dataclasses.replace(MODEL, **keys)
        weights = build_model(model, seed=1).state_dict()
        generator = torch.Generator().manual_seed(2)
        weights = {name: torch.randn(value.shape, generator=generator) / 3 for name, value in weights.items()}
        identity = {CONTENT_HASH: 'd' * 64}
        record = {'status': 'finished', 'samples': SAMPLES, 'eval_loss': 2.34567, 'eval_accuracy': 0.5}
        folder = write_run(tmp_path / kind, model, weights, 's3://secret/here', identity=identity, **record)
        (folder / 'tokenizer').symlink_to(tokenizer)
        return str(folder)

    return make


def encode(folder):
    """Two texts of different length through the exported tokenizer."""
    inputs = AutoTokenizer.from_pretrained(folder)([LONG, TEXTS[0]], padding=True, return_tensors='pt')
    mask = inputs['attention_mask']
    assert 241 < inputs['input_ids'].shape[1] <= N
    assert mask.sum(1)[0] > mask.sum(1)[1] + 20
    positions = torch.arange(mask.shape[1]).expand(2, -1)
    return inputs, (inputs['input_ids'], positions, mask)


@pytest.mark.parametrize('kind', KINDS)
@torch.no_grad()
def test_auto_model_computes_the_same(make_run, tmp_path, kind):
    run, folder = make_run(kind), tmp_path / 'exported'
    export(run, str(folder))
    stock = KINDS[kind][1]
    model = AutoModel.from_pretrained(folder, trust_remote_code=stock is None, add_pooling_layer=False)
    assert stock or model.config.tokenizer_class == 'PreTrainedTokenizerFast'  # by which pipelines find it
    if stock is None:
        assert type(model).__module__.startswith('transformers_modules')  # the folder's own code, not ours
    else:
        assert type(model) is stock
    inputs, ours = encode(folder)
    outputs = model(**inputs, output_hidden_states=True)
    if stock is RobertaModel:  # BERT's tokenizer calls a second segment 1
        second = model(**inputs, token_type_ids=torch.ones_like(inputs['input_ids']))
        assert_close(second.last_hidden_state, outputs.last_hidden_state, rtol=0, atol=0)
    is_real = inputs['attention_mask'] > 0
    states = load_pretrained(run).encoder.layer_states(*ours)
    for theirs, state in zip(outputs.hidden_states, states, strict=True):
        assert_close(theirs[is_real], state[is_real], **TOLERANCE)
    files = {path.name for path in folder.iterdir()}
    assert ('modeling_maelm.py' in files) == (stock is None)
    assert not {name for name in files if name.endswith(('.bin', '.pt'))}
    assert not {key for key in load_file(folder / 'model.safetensors') if 'decoder' in key or 'head' in key}


@pytest.mark.parametrize('kind', KINDS)
@torch.no_grad()
def test_an_exported_folder_comes_back_as_our_encoder(make_run, tmp_path, kind):
    run, folder = make_run(kind), str(tmp_path / 'exported')
    export(run, folder)
    ours, again = load_pretrained(run), load_pretrained(folder)
    _, inputs = encode(folder)
    assert again.identity.implementation == 'ours'
    assert again.max_seq_len == N
    assert_close(again.encoder.state_dict(), ours.encoder.state_dict(), rtol=0, atol=0)
    is_real = inputs[2] > 0
    assert_close(again.encoder(*inputs)[is_real], ours.encoder(*inputs)[is_real], rtol=0, atol=0)


@pytest.mark.parametrize('kind', KINDS)
@torch.no_grad()
def test_the_baseline_predicts_masks_with_its_head(make_run, tmp_path, kind):
    run, folder, is_stock = make_run(kind, decoder=None), tmp_path / 'exported', KINDS[kind][1] is not None
    export(run, str(folder))
    model, info = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=not is_stock, output_loading_info=True)
    assert not info['missing_keys']
    assert not info['unexpected_keys']
    tokenizer, predictor = AutoTokenizer.from_pretrained(folder), MaskPredictor.from_checkpoint(run)
    texts = [f'{TEXTS[0]} every [MASK] boy does [MASK].', 'all [MASK] eat grass']
    inputs = tokenizer(texts, padding=True, return_tensors='pt')
    logits = model(**inputs).logits[inputs['input_ids'] == tokenizer.mask_token_id]
    assert_close(logits, predictor.compute_logits(predictor.encode(texts)), **TOLERANCE)
    card = (folder / 'README.md').read_text()
    assert 'AutoModelForMaskedLM.from_pretrained(FOLDER' in card
    assert 'pipeline_tag: fill-mask' in card
    assert 'tags: [masked-language-modeling]' in card
    assert 'random head' not in card
    if is_stock:
        found = predictor.predict(texts[1:], top_k=3)
        answers = pipeline('fill-mask', model=str(folder), top_k=3)(texts[1])
        assert [answer['token'] for answer in answers] == found.ids[0].tolist()
        assert_close(torch.tensor([answer['score'] for answer in answers]), found.probabilities[0], **TOLERANCE)
    # The encoder alone, as others use it, and as ours reads it.
    encoder = AutoModel.from_pretrained(folder, trust_remote_code=not is_stock, add_pooling_layer=False)
    assert_close(encoder.state_dict(), model.base_model.state_dict(), rtol=0, atol=0)
    again = load_pretrained(str(folder)).encoder.state_dict()
    assert_close(again, load_pretrained(run).encoder.state_dict(), rtol=0, atol=0)


def test_the_exported_tokenizer_is_the_run_s(make_run, tmp_path):
    run, folder = make_run('mpnet'), str(tmp_path / 'exported')
    export(run, folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    sides = [load_pretrained(run).tokenizer(side, add_special_tokens=False)['input_ids'] for side in ('fine', 'hay')]
    assert theirs('fine', 'hay')['input_ids'] == [0, *sides[0], 2, 2, *sides[1], 2]
    assert theirs('[MASK]')['input_ids'] == [0, V - 1, 2]  # here a text may hold the mask
    assert theirs.model_max_length == N


def fine_tune(run, task_name, tmp_path):
    """A fine-tuned model's folder with a random head, and the model."""
    pretrained, task = load_pretrained(run), TASKS[task_name]
    model = FinetuningModel(pretrained.encoder, pretrained.hidden_size, task, dropout=0.1, seed=1).eval()
    folder = tmp_path / 'finetuned' / f'{task_name}-0'
    folder.parent.mkdir()
    save_model(folder, model.state_dict(), pretrained, task, ROW, SpanConfig())
    folder.with_name(f'{folder.name}.json').write_text(
        json.dumps(make_finetuning(task_name, metrics={'accuracy': 0.75}))
    )
    return str(folder), model


@pytest.mark.parametrize('kind', ['roberta', 'mpnet', 'base_pp'])
@pytest.mark.parametrize('task', ['mnli', 'stsb', 'squad2'])
@torch.no_grad()
def test_a_fine_tuned_model_answers_the_same(make_run, tmp_path, kind, task):
    finetuned, ours = fine_tune(make_run(kind), task, tmp_path)
    folder = tmp_path / 'exported'
    export(finetuned, str(folder))
    auto = AutoModelForQuestionAnswering if task == 'squad2' else AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, trust_remote_code=KINDS[kind][1] is None)
    inputs, (ids, positions, segments) = encode(folder)
    outputs = model(**inputs)
    scores = ours(FinetuningBatch(ids, positions, segments, torch.zeros(len(ids)), is_candidate=segments > 0))
    if task == 'squad2':
        is_real = segments > 0
        assert_close(outputs.start_logits[is_real], scores[..., 0][is_real], **TOLERANCE)
        assert_close(outputs.end_logits[is_real], scores[..., 1][is_real], **TOLERANCE)
    elif task == 'stsb':
        assert_close(outputs.logits.squeeze(-1), scores * 5, **TOLERANCE)  # the data's own scale
        assert model.config.problem_type == 'regression'
    else:
        assert_close(outputs.logits, scores, **TOLERANCE)
        assert model.config.id2label == {0: 'entailment', 1: 'neutral', 2: 'contradiction'}
    assert AutoTokenizer.from_pretrained(folder).model_max_length == ROW
    card = (folder / 'README.md').read_text()
    assert f'fine-tuned on {task}' in card
    assert 'base_model' not in card  # a local folder
    for fact in (
        'learning rate | 3e-05',
        'batch size | 32',
        'epochs | 3',
        'seed | 1',
        'data | 96 training examples from files',
    ):
        assert fact in card
    assert '| accuracy | 0.7500 |' in card


def test_every_checkpoint_of_a_run_is_a_folder_of_its_own(make_run, tmp_path):
    run = Path(make_run('mpnet'))
    earlier, unfinished = run / 'samples-000000000032', run / 'samples-000000000096'
    for folder in (earlier, unfinished):
        shutil.copytree(run / CHECKPOINT, folder)
    weights = load_file(earlier / 'model.safetensors')
    save_file({name: value + 1 for name, value in weights.items()}, earlier / 'model.safetensors')
    (earlier / 'progress.json').write_text(json.dumps({'samples': 32}))

    revisions = export(str(run), str(tmp_path / 'exported'), all_checkpoints=True)
    assert {name: path.name for name, path in revisions.items()} == {
        earlier.name: earlier.name,
        CHECKPOINT: CHECKPOINT,
        'main': CHECKPOINT,  # `latest` does not name the third one, which may be incomplete
    }
    assert {path.name for path in (tmp_path / 'exported').iterdir()} == {earlier.name, CHECKPOINT}
    for name in (earlier.name, CHECKPOINT):
        model = AutoModel.from_pretrained(tmp_path / 'exported', subfolder=name, add_pooling_layer=False)
        expected = load_pretrained(str(run / name)).encoder.token_embeddings.weight
        assert_close(model.embeddings.word_embeddings.weight, expected, rtol=0, atol=0)
    assert '| pretraining rows | 32 |' in (tmp_path / 'exported' / earlier.name / 'README.md').read_text()
    with pytest.raises(InputError, match='is a fine-tuned model, which has no other checkpoints'):
        export(fine_tune(str(run), 'mnli', tmp_path)[0], str(tmp_path / 'none'), all_checkpoints=True)


class TestRefusals:
    def test_a_folder_that_holds_something(self, make_run, tmp_path):
        (tmp_path / 'exported').mkdir()
        (tmp_path / f'.exported.{os.getpid()}/old').mkdir(parents=True)  # left by a kill
        export(make_run('mpnet'), str(tmp_path / 'exported'))  # empty: taken
        assert not (tmp_path / 'exported/old').exists()
        before = (tmp_path / 'exported/README.md').stat().st_mtime_ns
        with pytest.raises(InputError, match='exists and is not empty'):
            export(str(tmp_path / 'mpnet'), str(tmp_path / 'exported'))
        assert (tmp_path / 'exported/README.md').stat().st_mtime_ns == before

    def test_what_is_not_ours(self, make_run, tmp_path):
        export(make_run('mpnet'), str(tmp_path / 'exported'))
        with pytest.raises(InputError, match='is not an encoder of ours'):
            export(str(tmp_path / 'exported'), str(tmp_path / 'again'))
        with pytest.raises(InputError, match=r"^'.*/nowhere' does not exist: name a run folder"):
            export(str(tmp_path / 'nowhere'), str(tmp_path / 'again'))

    def test_the_working_directory(self, make_run, tmp_path, monkeypatch):
        run = make_run('mpnet')
        (tmp_path / 'here').mkdir()
        monkeypatch.chdir(tmp_path / 'here')
        for name in ('.', ''):
            with pytest.raises(InputError, match='the exported folder is the working directory: name another folder'):
                export(run, name)

    def test_a_failure_leaves_nothing(self, make_run, tmp_path, monkeypatch):
        run = make_run('mpnet')

        def fail(*_):
            raise OSError(28, 'No space left on device')

        monkeypatch.setattr('maelm_composer.checkpoints.export.write_card', fail)
        before = sorted(tmp_path.iterdir())
        with pytest.raises(OSError, match='No space'):
            export(run, str(tmp_path / 'exported'))
        assert sorted(tmp_path.iterdir()) == before


def test_an_export_to_object_storage_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match='the exported folder s3://bucket/out: must be a local or shared folder'):
        export('runs/any', 's3://bucket/out')
    assert not list(tmp_path.iterdir())
