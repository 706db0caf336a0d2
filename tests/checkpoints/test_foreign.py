"""Loading encoders of Hugging Face's classes from local folders. Nothing is downloaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BertConfig,
    BertModel,
    BertTokenizerFast,
    DebertaV2Config,
    DebertaV2Model,
    DistilBertConfig,
    DistilBertModel,
    LongformerConfig,
    LongformerModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
    XLNetConfig,
    XLNetModel,
)

from maelm_composer.checkpoints.export import export
from maelm_composer.checkpoints.huggingface import HuggingFaceEncoder
from maelm_composer.checkpoints.pretrained import _ORIGIN_KEYS, _hash_content, load_pretrained
from maelm_composer.checkpoints.saved_model import save_model
from maelm_composer.config import Implementation, SpanConfig
from maelm_composer.data.tokenizer import write_tokenizer as save_tokenizer
from maelm_composer.errors import InputError
from maelm_composer.finetuning.model import FinetuningBatch, FinetuningModel
from maelm_composer.model.encoder import Encoder
from maelm_composer.tasks.catalogue import TASKS
from tests.tiny import HF_SETTINGS, SIZES, N, V, write_tokenizer

TOKENS = torch.arange(4, 12)[None], torch.arange(8)[None], torch.ones(1, 8, dtype=torch.long)


def write(folder: Path, model) -> Path:
    torch.manual_seed(0)
    model.init_weights()
    model.pooler = None
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(params=[(RobertaModel, RobertaConfig), (MPNetModel, MPNetConfig)], ids=['roberta', 'mpnet'])
def stock(request, tmp_path):
    model_class, config_class = request.param
    return write(tmp_path / 'stock', model_class(config_class(**HF_SETTINGS)))


@torch.no_grad()
def test_both_implementations_are_the_same_model(stock):
    ours = load_pretrained(str(stock), Implementation.auto)
    torch.manual_seed(1)  # the pooler, which the file need not hold, is drawn anew
    theirs = load_pretrained(str(stock), Implementation.huggingface)
    assert isinstance(ours.encoder, Encoder)
    assert isinstance(theirs.encoder, HuggingFaceEncoder)
    assert_close(ours.encoder(*TOKENS), theirs.encoder(*TOKENS), rtol=1e-5, atol=1e-5)
    assert (ours.max_seq_len, ours.hidden_size) == (theirs.max_seq_len, theirs.hidden_size) == (N, 32)
    assert ours.identity.hash == theirs.identity.hash
    assert [p.identity.implementation for p in (ours, theirs)] == ['ours', 'huggingface']
    assert theirs.config is None


def test_what_decides_its_hash(stock, tmp_path):
    def hash_after(changed: str, before: str, after: str) -> str:
        folder = shutil.copytree(stock, tmp_path / 'copy', dirs_exist_ok=True)
        text = (stock / changed).read_text()
        assert before in text
        (folder / changed).write_text(text.replace(before, after))
        return load_pretrained(str(folder)).identity.hash

    unchanged = load_pretrained(str(stock), dropout=0.3).identity.hash
    assert hash_after('config.json', '"transformers_version": "', '"transformers_version": "0') == unchanged
    assert hash_after('config.json', '"layer_norm_eps": 1e-', '"layer_norm_eps": 2e-') != unchanged
    assert hash_after('tokenizer.json', '"use_regex": true', '"use_regex": false') != unchanged
    weights = load_file(stock / 'model.safetensors')
    key = next(key for key in weights if 'layer.1.output.dense.weight' in key)
    save_file(weights | {key: weights[key] + 1}, stock / 'model.safetensors', {'format': 'pt'})
    assert load_pretrained(str(stock)).identity.hash != unchanged


def test_dropout_reaches_both(stock):
    ours, theirs = (load_pretrained(str(stock), Implementation[name], 0.3) for name in ('ours', 'huggingface'))
    assert ours.encoder.layers[0].dropout.p == ours.config.attention_probs_dropout_prob == 0.3
    rates = {module.p for module in theirs.encoder.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.3}


def test_what_is_not_ours_is_wrapped(tmp_path):
    config = DistilBertConfig(
        vocab_size=V, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=N, pad_token_id=1
    )
    folder = str(write(tmp_path / 'stock', DistilBertModel(config)))
    assert isinstance(load_pretrained(folder).encoder, HuggingFaceEncoder)
    assert load_pretrained(folder).max_seq_len == N
    with pytest.raises(InputError, match='it is a distilbert model'):
        load_pretrained(folder, Implementation.ours)


def test_an_encoder_with_a_decoder_is_refused(tmp_path):
    folder = tmp_path / 'bart'
    BartConfig().save_pretrained(folder)
    with pytest.raises(InputError, match='bart is an encoder with a decoder: name an encoder'):
        load_pretrained(str(folder))


def test_a_config_without_a_model_type_is_one_short_line(tmp_path):
    (tmp_path / 'config.json').write_text('{}')
    with pytest.raises(InputError, match=r'Should have a `model_type` key in its config\.json') as error:
        load_pretrained(str(tmp_path))
    assert 'albert' not in str(error.value)


def test_a_tokenizer_without_a_fast_version(tmp_path):
    DebertaV2Model(DebertaV2Config(vocab_size=V, **SIZES)).save_pretrained(tmp_path)
    (tmp_path / 'spm.model').write_bytes(b'of sentencepiece')
    with pytest.raises(InputError, match=r'as a fast one; save its tokenizer\.json there, or install sentencepiece'):
        load_pretrained(str(tmp_path))


def test_a_longformer_is_not_that_of_records_without_global_attention(tmp_path):
    config = LongformerConfig(attention_window=8, **HF_SETTINGS)
    pretrained = load_pretrained(str(write(tmp_path / 'stock', LongformerModel(config))))
    model, tokenizer = pretrained.encoder.model, pretrained.tokenizer.backend_tokenizer.to_str()
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith('pooler.')}
    architecture = {key: value for key, value in model.config.to_diff_dict().items() if key not in _ORIGIN_KEYS}
    assert pretrained.identity.hash != _hash_content(weights, architecture, tokenizer)
    architecture['global_attention'] = 'first token'
    assert pretrained.identity.hash == _hash_content(weights, architecture, tokenizer)


def test_a_folder_that_lacks_weights(stock):
    weights = load_file(stock / 'model.safetensors')
    key = next(key for key in weights if 'layer.1.output.dense.weight' in key)
    del weights[key]
    save_file(weights, stock / 'model.safetensors', {'format': 'pt'})
    with pytest.raises(InputError, match=r'lacks 1 weights.*layer\.1.output\.dense\.weight'):
        load_pretrained(str(stock))


def test_a_tokenizer_with_more_tokens_than_the_model(stock):
    write_tokenizer(stock, vocab_size=V + 2)
    with pytest.raises(InputError, match=f'has {V + 2} tokens, its model only {V}'):
        load_pretrained(str(stock))


def test_code_in_a_hugging_face_folder_never_runs(tmp_path):
    config = RobertaConfig(vocab_size=V, **SIZES)
    RobertaModel(config).save_pretrained(tmp_path / 'theirs')
    write_tokenizer(tmp_path / 'theirs')
    (tmp_path / 'theirs/evil.py').write_text(f'open({str(tmp_path / "ran")!r}, "w")\n')
    path = tmp_path / 'theirs/config.json'
    changed = json.loads(path.read_text()) | {'model_type': 'evil'}
    # Of a stock type, too: the code may compute more than the stock class.
    for model_type, auto in (('evil', 'AutoModel'), ('roberta', 'AutoModel'), ('roberta', 'AutoModelForMaskedLM')):
        with_code = {'model_type': model_type, 'auto_map': {'AutoConfig': 'evil.Config', auto: 'evil.Model'}}
        path.write_text(json.dumps(changed | with_code))
        with pytest.raises(InputError, match='theirs: the model has code of its own, which is never run'):
            load_pretrained(str(tmp_path / 'theirs'))
    path.write_text(json.dumps(changed | {'auto_map': None}))
    with pytest.raises(InputError, match='theirs: neither a checkpoint of ours nor a Hugging Face encoder'):
        load_pretrained(str(tmp_path / 'theirs'))
    path.write_text(json.dumps(changed | {'model_type': 'roberta'}))
    path = tmp_path / 'theirs/tokenizer_config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'auto_map': {'AutoTokenizer': ['evil.Words', None]}}))
    tokenizer = load_pretrained(str(tmp_path / 'theirs')).tokenizer
    assert tokenizer.mask_token_id == V - 1
    save_tokenizer(tokenizer, tmp_path / 'saved')
    assert 'evil' not in (tmp_path / 'saved/tokenizer_config.json').read_text()
    assert not (tmp_path / 'ran').exists()


class Hostile:
    """Creates the file ``ran`` when it is unpickled."""

    def __reduce__(self):
        return Path('ran').touch, ()


def test_an_old_pickle_of_weights_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = RobertaModel(RobertaConfig(vocab_size=V, **SIZES))
    model.save_pretrained('theirs')
    write_tokenizer(tmp_path / 'theirs')
    Path('theirs/model.safetensors').unlink()
    torch.save(model.state_dict() | {'more': Hostile()}, 'theirs/pytorch_model.bin')
    with pytest.raises(InputError, match='theirs: '):
        load_pretrained('theirs')
    assert not Path('ran').exists()


def test_a_position_table_without_a_limit(tmp_path):
    config = XLNetConfig(vocab_size=V, d_model=32, n_layer=2, n_head=2, d_inner=64)
    folder = write(tmp_path / 'xlnet', XLNetModel(config))
    assert config.max_position_embeddings == -1
    assert load_pretrained(str(folder)).max_seq_len == N  # the tokenizer's


@pytest.mark.parametrize('kind', ['roberta-prelayernorm', 'data2vec-text', 'xlm-roberta', 'esm'])
@torch.no_grad()
def test_the_longest_row_of_a_relative_of_roberta(tmp_path, kind):
    folder = write(tmp_path / kind, AutoModel.from_config(AutoConfig.for_model(kind, **HF_SETTINGS)))
    pretrained = load_pretrained(str(folder))
    assert pretrained.max_seq_len == N
    ids = torch.full((1, N), V - 2)
    assert pretrained.encoder(ids, torch.arange(N)[None], torch.ones_like(ids)).isfinite().all()


def test_another_id_for_padding_than_the_tokenizer_has(tmp_path):
    model = RobertaModel(RobertaConfig(**HF_SETTINGS | {'pad_token_id': 2}))
    folder = str(write(tmp_path / 'stock', model))
    assert isinstance(load_pretrained(folder).encoder, HuggingFaceEncoder)
    with pytest.raises(InputError, match='it takes id 2 for padding, its tokenizer 1'):
        load_pretrained(folder, Implementation.ours)


@pytest.mark.parametrize('kind', ['fnet', 'clip'])
def test_a_model_that_cannot_be_called_as_an_encoder_is_refused(tmp_path, kind):
    sizes = {'text_config': HF_SETTINGS} if kind == 'clip' else HF_SETTINGS
    folder = write(tmp_path / kind, AutoModel.from_config(AutoConfig.for_model(kind, **sizes)))
    with pytest.raises(InputError, match='Model is no text encoder with an attention mask'):
        load_pretrained(str(folder))


@pytest.mark.parametrize('name', ['rte', 'squad2'])
@torch.no_grad()
def test_a_fine_tuned_bert_is_exported_with_the_rows_it_was_trained_on(tmp_path, name):
    folder, task = tmp_path / 'bert', TASKS[name]
    write(folder, BertModel(BertConfig(**HF_SETTINGS)))
    (folder / 'vocab.txt').write_text('\n'.join(['[UNK]', '[PAD]', '[CLS]', '[SEP]', '[MASK]', 'good', 'grass', 'eat']))
    BertTokenizerFast(str(folder / 'vocab.txt')).save_pretrained(folder)
    pretrained = load_pretrained(str(folder))
    model = FinetuningModel(pretrained.encoder, pretrained.hidden_size, task, dropout=0.0, seed=0).eval()
    save_model(tmp_path / 'tuned', model.state_dict(), pretrained, task, N, SpanConfig())
    export(str(tmp_path / 'tuned'), str(tmp_path / 'exported'))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / 'exported')
    texts = ['eat grass', 'good good grass']
    sides = pretrained.tokenizer(texts, add_special_tokens=False)['input_ids']
    assert tokenizer(*texts)['input_ids'] == [2, *sides[0], 3, 3, *sides[1], 3]
    inputs = tokenizer(*texts, return_tensors='pt')
    ids, segments = inputs['input_ids'], inputs['attention_mask']
    scores = model(FinetuningBatch(ids, torch.arange(len(ids[0]))[None], segments, torch.zeros(1), segments > 0))
    auto = AutoModelForQuestionAnswering if name == 'squad2' else AutoModelForSequenceClassification
    found = auto.from_pretrained(tmp_path / 'exported')(**inputs)
    if name == 'squad2':
        assert_close(found.start_logits, scores[..., 0])
    else:
        assert_close(found.logits, scores)
