"""Buckets of distances against Hugging Face's functions; the bias against a loop over every pair."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.t5.modeling_t5 import T5Attention

from maelm_composer.config import DecoderConfig, ModelConfig, RelativePositionFunction, RelativePositionInit
from maelm_composer.model.relative_position import RelativePositionBias, bucket_distances

SETTINGS = [(32, 128), (64, 128), (128, 256)]  # base, base++, large++
T5, AUTHORS = RelativePositionFunction.t5, RelativePositionFunction.authors
OFFSETS = torch.arange(-600, 601)


@pytest.mark.parametrize('buckets, max_distance', SETTINGS)
def test_t5_function_is_t5s(buckets, max_distance):
    expected = T5Attention._relative_position_bucket(
        OFFSETS, bidirectional=True, num_buckets=buckets, max_distance=max_distance
    )
    assert_close(bucket_distances(OFFSETS, buckets, max_distance, T5), expected, rtol=0, atol=0)


@pytest.mark.parametrize('buckets, max_distance', SETTINGS)
def test_authors_function_is_deberta_v2s_with_half_the_buckets_and_a_clamp(buckets, max_distance):
    half = buckets // 2
    signed = make_log_bucket_position(OFFSETS, half, max_distance).long()
    expected = signed.clamp(1 - half, half - 1) + half - 1
    assert_close(bucket_distances(OFFSETS, buckets, max_distance, AUTHORS), expected, rtol=0, atol=0)


def test_a_ratio_that_rounding_would_put_below_a_whole_number_opens_its_bucket():
    at = torch.tensor([-47, -48])  # log(48 / 36) / log(64 / 36) is 1/2: bucket 36 + 18
    assert bucket_distances(at, 144, 64, T5).tolist() == [52, 54]


@pytest.mark.parametrize(
    'buckets, max_distance, authors_last, t5_last, differing, share_of_pairs',
    [(32, 128, 86, 91, 35, 12.6), (64, 128, 111, 113, 39, 13.7), (128, 256, 239, 240, 82, 25.8)],
)
def test_how_far_the_two_functions_differ(buckets, max_distance, authors_last, t5_last, differing, share_of_pairs):
    """The figures of docs/deviations.md, at the paper's length of 512."""
    distance, half = torch.arange(512), buckets // 2
    authors = bucket_distances(distance, buckets, max_distance, AUTHORS) - (half - 1)
    t5 = bucket_distances(-distance, buckets, max_distance, T5)
    assert int((authors == half - 1).nonzero()[0]) == authors_last
    assert int((t5 == half - 1).nonzero()[0]) == t5_last
    is_different = authors != t5
    assert int(is_different.sum()) == differing
    pairs = 2 * (512 - distance) * is_different
    assert round(100 * int(pairs.sum()) / 512**2, 1) == share_of_pairs


@given(
    quarter=st.integers(1, 40),
    extra=st.integers(2, 300),
    function=st.sampled_from(RelativePositionFunction),
)
def test_buckets_are_in_range_ordered_and_one_is_unused(quarter, extra, function):
    """Any quarter of the buckets, and any farthest distance at least two beyond it."""
    buckets, max_distance = 4 * quarter, quarter + extra
    bucket = bucket_distances(OFFSETS, buckets, max_distance, function)
    unused = {T5: buckets // 2, AUTHORS: buckets - 1}[function]
    assert set(bucket.tolist()) <= set(range(buckets)) - {unused}
    distance = torch.arange(601)
    for sign in (-1, 1):
        steps = bucket_distances(sign * distance[1:], buckets, max_distance, function).diff()
        # T5 numbers both sides outwards, the authors number from the left to the right.
        assert bool((steps * (sign if function is AUTHORS else 1) >= 0).all())
    near = bucket_distances(torch.arange(1 - quarter, quarter), buckets, max_distance, function)
    assert len(near.unique()) == 2 * quarter - 1  # each short distance has its own


def build_bias(function=T5, num_heads=3, max_seq_len=40, buckets=16, max_distance=24):
    stack = DecoderConfig(num_attention_heads=num_heads, relative_position_buckets=buckets)
    model = ModelConfig(
        max_seq_len=max_seq_len, relative_position_max_distance=max_distance, relative_position_function=function
    )
    bias = RelativePositionBias(stack, model)
    torch.nn.init.normal_(bias.weight, generator=torch.Generator().manual_seed(0))
    return bias


@pytest.mark.parametrize('function', RelativePositionFunction)
def test_bias_and_its_gradient_are_those_of_a_loop_over_pairs(function):
    bias = build_bias(function)
    generator = torch.Generator().manual_seed(1)
    queries, keys = (torch.randint(0, 40, (2, n), generator=generator) for n in (5, 7))
    queries[:, -2:] = keys[:, -2:] = torch.tensor([0, 39])  # the greatest distances to the left and to the right
    weight = bias.weight.detach().clone().requires_grad_()
    expected = torch.zeros(2, 3, 5, 7)
    for b, h, i, j in itertools.product(range(2), range(3), range(5), range(7)):
        bucket = bucket_distances(keys[b, j] - queries[b, i], 16, 24, function)
        expected[b, h, i, j] = weight[bucket, h]
    actual = bias(queries, keys)
    assert_close(actual, expected, rtol=0, atol=0)
    cotangent = torch.randn(actual.shape, generator=generator)
    actual.backward(cotangent)
    expected.backward(cotangent)
    assert_close(bias.weight.grad, weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('length', [1, 7, 40])
def test_slots_have_the_bias_of_their_distances(length):
    bias = build_bias()
    distances = [[key - query for key in range(length)] for query in range(length)]
    expected = bias.weight[bucket_distances(torch.tensor(distances), 16, 24, T5)].permute(2, 0, 1)
    assert_close(bias.between_slots(length), expected, rtol=0, atol=0)


@pytest.mark.parametrize('function', RelativePositionFunction)
def test_local_prior_looks_left_and_right_and_falls_off(function):
    bias = build_bias(function, num_heads=4)
    bias.reset_parameters(RelativePositionInit.local, std=0.02)
    prior = bias(torch.tensor([[20]]), torch.arange(40)[None])[0, :, 0]  # (H, 40), seen from position 20
    floor = -math.log(bias.max_seq_len)  # still seen, and so it can be learnt
    steep, flat = [-3.0, -2.0, -1.0, -2.0, -3.0, floor, floor], [-1.5, -1.0, -0.5, -1.0, -1.5, -2.0, -2.5]
    assert_close(prior[:, 17:24], torch.tensor([steep, steep[::-1], flat, flat[::-1]]))
    left, right = prior[:, :20].flip(1), prior[:, 21:]
    for head in range(4):
        towards, away = (left, right) if head % 2 == 0 else (right, left)
        assert bool((towards[head].diff() <= 0).all())
        assert bool((towards[head][:19] >= away[head][:19]).all())
        assert_close(away[head][-1], torch.tensor(floor))


def test_normal_init_has_the_given_deviation():
    bias = build_bias(num_heads=64, buckets=128, max_distance=128)
    torch.manual_seed(0)
    bias.reset_parameters(RelativePositionInit.normal, std=0.05)
    assert abs(float(bias.weight.detach().std()) / 0.05 - 1) < 0.05


def test_a_whole_number_of_steps_is_not_rounded_up():
    """129 is 8 · 16 + 1: twice the exact distances is a third of the 15 far steps, to the last bit of a double."""
    distances = torch.tensor([31, 32, 33, 63, 64, 65, 128, 129])
    buckets = bucket_distances(distances, 64, 129, AUTHORS) - 31
    assert buckets.tolist() == [21, 21, 22, 26, 26, 27, 31, 31]
