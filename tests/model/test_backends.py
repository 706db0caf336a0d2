"""Every attention backend against the dense one, through whole models; a compiled step is one graph."""

import pytest
import torch
from torch.testing import assert_close

from maelm_composer.config import AttentionBackend, DecoderAttention
from maelm_composer.masking.collate import Batch
from maelm_composer.model.kernels.attention import attend, choose_backend
from maelm_composer.model.layer import recompute_layers
from maelm_composer.model.maelm import build_model

AUTO, DENSE, SDPA = AttentionBackend
DECODER_WITH_BIAS = {'relative_position_buckets': 16}
COMPILERS = ('aot_eager', 'inductor')
on_every_way_to_attend = pytest.mark.parametrize('backend, compiled', [(SDPA, False), (DENSE, True)])


def run(model_config, batch, backend, device='cpu', dtype=None, compiled=False):
    """Loss and every parameter's gradient on the CPU, of the same weights whatever the backend."""
    model = build_model(model_config, seed=3).to(device)
    model.select_attention(backend)
    if compiled:
        torch.compiler.reset()
        model.compile(fullgraph=True, dynamic=False, backend='aot_eager' if device == 'cpu' else 'inductor')
    with torch.autocast(device, dtype, enabled=dtype is not None):
        loss = model(batch.to(device)).loss
    loss.backward()
    return loss.cpu(), {name: p.grad.cpu() for name, p in model.named_parameters()}


def assert_equal_training(actual, expected, tolerance):
    """The loss, and each gradient relative to its largest entry."""
    assert_close(actual[0], expected[0], rtol=tolerance, atol=tolerance)
    for name, gradient in expected[1].items():
        scale = gradient.abs().max()
        # A key's bias shifts all scores of a query alike: its gradient is zero but for rounding.
        assert_close(actual[1][name] / (scale + 1e-6), gradient / (scale + 1e-6), rtol=0, atol=max(tolerance, 1e-5))


@on_every_way_to_attend
@pytest.mark.parametrize('buckets', [0, 16])
@pytest.mark.parametrize('has_decoder', [True, False])
def test_backends_train_alike(config, make_batch, backend, compiled, buckets, has_decoder):
    """Packed and padded rows, gaps in the positions, the last layer's shortcut; the bias table's gradient too."""
    decoder = DECODER_WITH_BIAS if buckets else {}
    model_config = config(has_decoder, decoder, relative_position_buckets=buckets)
    batch = make_batch(model_config, encoder_mask_fraction=0.5 if has_decoder else 1.0)
    expected = run(model_config, batch, DENSE)
    assert_equal_training(run(model_config, batch, backend, compiled=compiled), expected, 1e-5)
    if buckets:
        assert expected[1]['encoder.relative_position.weight'].abs().max() > 0


@on_every_way_to_attend
def test_backends_train_alike_in_bf16(config, make_batch, backend, compiled):
    model_config = config(True, DECODER_WITH_BIAS)
    batch = make_batch(model_config)
    expected = run(model_config, batch, DENSE, dtype=torch.bfloat16)
    actual = run(model_config, batch, backend, dtype=torch.bfloat16, compiled=compiled)
    assert_close(actual[0], expected[0], rtol=2e-2, atol=0)
    exact = run(model_config, batch, DENSE)[1]
    for name, gradient in actual[1].items():
        off, reference_off = ((g - exact[name]).norm() / exact[name].norm() for g in (gradient, expected[1][name]))
        # Where rounding alone moves the reference (a key's bias has no true gradient), it may move this one as far.
        assert off <= max(2e-2, 2 * reference_off), name


@pytest.mark.parametrize('backend', [DENSE, SDPA])
@pytest.mark.parametrize('compiled', [True, False])
def test_dropout_leaves_the_mean_of_the_probabilities(compiled, backend):
    query, key = torch.randn(2, 8, 2, 256, 16, generator=torch.Generator().manual_seed(0))
    kernel = torch.compile(attend, fullgraph=True, backend='aot_eager') if compiled else attend
    sums = kernel(query, key, torch.ones(8, 2, 256, 16), torch.zeros(8, 1, 256, 256), 0.5, backend)[..., 0]
    assert sums.std() > 0.05
    assert_close(sums.mean(), torch.tensor(1.0), rtol=0, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [None, torch.bfloat16])
@pytest.mark.parametrize('backend, compiled', [(DENSE, False), (SDPA, False), (DENSE, True), (SDPA, True)])
def test_backends_train_alike_on_a_gpu(config, make_batch, backend, compiled, dtype):
    """bf16 alone moves an entry by up to 3 %, on a CPU too."""
    model_config = config(True, DECODER_WITH_BIAS)
    batch = make_batch(model_config)
    expected = run(model_config, batch, DENSE)
    actual = run(model_config, batch, backend, 'cuda', dtype, compiled)
    assert_equal_training(actual, expected, 5e-2 if dtype else 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize('backend', [DENSE, SDPA])
@pytest.mark.parametrize('has_decoder', [True, False])
@torch.no_grad()
def test_a_compiled_model_is_validated_on_a_gpu(config, make_batch, backend, has_decoder):
    """Without gradients the compiler stores fewer tensors than in training."""
    model_config = config(has_decoder, DECODER_WITH_BIAS)
    batch = make_batch(model_config, encoder_mask_fraction=0.0 if has_decoder else 1.0)
    model = build_model(model_config, seed=3)
    expected = model(batch).loss
    model.to('cuda').select_attention(backend)
    torch.compiler.reset()
    model.compile(fullgraph=True, dynamic=False)
    assert_close(model(batch.to('cuda')).loss.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_auto_is_dense_on_a_cpu_and_sdpa_elsewhere():
    assert choose_backend(AUTO, 'cpu') is DENSE
    assert choose_backend(AUTO, 'cuda') is SDPA
    assert choose_backend(SDPA, 'cpu') is SDPA
    assert choose_backend(DENSE, 'cuda') is DENSE


@pytest.mark.parametrize('backend', [DENSE, SDPA])
@pytest.mark.parametrize('has_decoder', [True, False])
def test_compiled_step_is_one_graph_and_never_recompiles(config, make_batch, has_decoder, backend):
    """``fullgraph`` refuses a second graph, ``fail_on_recompile`` a second compilation; other batches, same graph."""
    model_config = config(has_decoder)
    model = build_model(model_config, seed=3)
    eager = build_model(model_config, seed=3)
    model.select_attention(backend)
    torch.compiler.reset()
    model.compile(fullgraph=True, dynamic=False, backend='aot_eager')
    fraction = 0.0 if has_decoder else 1.0
    batches = [make_batch(model_config, encoder_mask_fraction=fraction, epoch=epoch) for epoch in range(3)]
    model(batches[0]).loss.backward()
    with torch.compiler.set_stance('fail_on_recompile'):
        for batch in batches[1:]:
            model.zero_grad()
            loss = model(batch).loss
            loss.backward()
            assert_close(loss, eager(batch).loss, rtol=1e-5, atol=1e-5)
        with pytest.raises(RuntimeError, match='recompil'):
            model(Batch(*(tensor[:2] for tensor in batches[0])))


@pytest.mark.parametrize('compiler', [None, *(pytest.param(c, marks=pytest.mark.slow) for c in COMPILERS)])
@pytest.mark.parametrize('decoder', [None, {}, {'attention': DecoderAttention.causal_cross}])
def test_layers_computed_again_have_the_same_gradients_and_keep_less(config, make_batch, gradients, compiler, decoder):
    """With dropout, whose masks are drawn again; the compiler's own random numbers, too."""
    dropout = {'hidden_dropout_prob': 0.1, 'attention_probs_dropout_prob': 0.1}
    stack = None if decoder is None else dropout | DECODER_WITH_BIAS | decoder
    model_config = config(decoder is not None, stack, **dropout)
    batch = make_batch(model_config, encoder_mask_fraction=1.0 if decoder is None else 0.0)
    found, kept = [], []
    for is_recomputed in (False, True):
        model = build_model(model_config, seed=3)
        if is_recomputed:
            recompute_layers(model)
        if compiler is not None:
            torch.compiler.reset()
            model.compile(fullgraph=True, dynamic=False, backend=compiler)
        torch.manual_seed(7)
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found.append(gradients(model, batch))
        kept.append(sum(sizes))
    tolerance = {'rtol': 0, 'atol': 0} if compiler is None else {'rtol': 1e-4, 'atol': 1e-6}
    assert_close(found[1], found[0], **tolerance)
    assert kept[1] < kept[0]
