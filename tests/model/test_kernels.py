"""Each kernel against its plain twin, in value and in every gradient, eager and compiled."""

import pytest
import torch
from torch.testing import assert_close

from maelm_composer.model.kernels.attention import attend_dense, materialize, plain_attend
from maelm_composer.model.kernels.embedding import embed, plain_embed
from maelm_composer.model.kernels.filled_row import fill_row, plain_fill_row

GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


FORBIDDEN = torch.rand(2, 1, 5, 7, generator=GENERATOR) < 0.3
FORBIDDEN[..., 0] = False


def attend_with(kernel):
    return lambda query, key, value, bias: kernel(query, key, value, bias.masked_fill(FORBIDDEN, float('-inf')), 0.0)


IDS, POSITIONS = torch.tensor([[3, 0, 3, 3], [1, 4, 0, 6]]), torch.tensor([[0, 5, 2], [4, 7, 7]])  # 7: dropped
ATTENTION_INPUTS = [draw(2, 3, 5, 8), draw(2, 3, 7, 8), draw(2, 3, 7, 8)]
CASES = {  # a kernel, its twin, what they are differentiated by
    'attend': (attend_with(attend_dense), attend_with(plain_attend), [*ATTENTION_INPUTS, draw(2, 3, 5, 7)]),
    'attend, one bias': (attend_with(attend_dense), attend_with(plain_attend), [*ATTENTION_INPUTS, draw(2, 1, 5, 7)]),
    'materialize': (lambda x: materialize(x.sin()) * x, lambda x: x.sin() * x, [draw(3, 4)]),
    'embed': (lambda table: embed(table, IDS), lambda table: plain_embed(table, IDS), [draw(9, 4)]),
    'embed, tied': (
        lambda table, x: embed(table, IDS, is_tied=True) @ (x @ table).T,
        lambda table, x: plain_embed(table, IDS) @ (x @ table).T,
        [draw(9, 4), draw(2, 9)],
    ),
    'fill_row': (
        lambda vectors, default: fill_row(vectors, default, POSITIONS, 7),
        lambda vectors, default: plain_fill_row(vectors, default, POSITIONS, 7),
        [draw(2, 3, 4), draw(4)],
    ),
}


@pytest.mark.parametrize('is_compiled', [False, True])
@pytest.mark.parametrize('name', CASES)
def test_kernel_is_its_plain_twin(name, is_compiled):
    kernel, twin, inputs = CASES[name]
    torch.compiler.reset()
    if is_compiled:
        kernel = torch.compile(kernel, fullgraph=True, backend='aot_eager')
    outputs, gradients = [], []
    for function in (kernel, twin):
        given = [tensor.clone().requires_grad_() for tensor in inputs]
        output = function(*given)
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=output.dtype)
        output.backward(cotangent)
        outputs.append(output.detach())
        gradients.append([tensor.grad for tensor in given])
    # The compiled attention computes its softmax in fp32.
    tolerance = 1e-5 if is_compiled and name.startswith('attend') else 1e-12
    assert_close(*outputs, rtol=tolerance, atol=tolerance)
    assert_close(*gradients, rtol=tolerance, atol=tolerance)
    assert all(gradient.abs().sum() > 0 for gradient in gradients[1])


def test_a_compiled_backward_pass_rounds_no_gradient_of_the_default_vector_to_bf16():
    vectors, default = draw(2, 3, 4).float(), draw(4).float().requires_grad_()
    torch.compiler.reset()
    kernel, cotangent, gradients = torch.compile(fill_row, backend='aot_eager'), draw(2, 7, 4).float(), []
    for function in (kernel, plain_fill_row):
        with torch.autocast('cpu', torch.bfloat16):
            filled = function(vectors, default, POSITIONS, 7)
        gradients += torch.autograd.grad(filled, default, cotangent)
    assert_close(*gradients)


@pytest.mark.parametrize('is_compiled', [False, True])
def test_gradients_of_a_tied_table_repeat_bitwise_with_several_threads(is_compiled):
    """Many rows for each id, so that the order of the sums matters."""
    torch.set_num_threads(4)
    torch.compiler.reset()
    ids = torch.randint(0, 50, (64, 64), generator=torch.Generator().manual_seed(0))
    table, weights = torch.randn(50, 96, requires_grad=True), torch.randn(64, 64, 96)

    def compute_loss(table):
        return (embed(table, ids, is_tied=True) * weights).sum() + table.sin().sum()

    kernel = torch.compile(compute_loss, fullgraph=True) if is_compiled else compute_loss
    runs = []
    for _ in range(5):
        table.grad = None
        kernel(table).backward()
        runs.append(table.grad.clone())
    assert all(torch.equal(run, runs[0]) for run in runs)
