"""Metrics against torchmetrics, with ties and constants."""

import numpy as np
import pytest
import torch
from torchmetrics.functional import matthews_corrcoef, pearson_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import binary_f1_score

from maelm_composer.tasks.catalogue import TASKS
from maelm_composer.tasks.metrics import compute_metrics, score_constant


def compute(name, predictions, labels):
    return compute_metrics(TASKS[name], {'dev': np.array(predictions)}, {'dev': np.array(labels)})[0]


@pytest.mark.parametrize('seed', range(3))
def test_classification(seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, 500)
    predictions = np.where(generator.random(500) < 0.7, labels, generator.integers(0, 2, 500))
    ours, theirs = (predictions, labels), (torch.tensor(predictions), torch.tensor(labels))
    assert compute('cola', *ours)['matthews'] == pytest.approx(
        matthews_corrcoef(*theirs, task='binary').item(), abs=1e-6
    )
    assert compute('mrpc', *ours)['f1'] == pytest.approx(binary_f1_score(*theirs).item(), abs=1e-6)
    assert compute('mrpc', *ours)['accuracy'] == (predictions == labels).mean()


@pytest.mark.parametrize('decimals', [0, 1, 8])
def test_correlations_with_ties(decimals):
    generator = np.random.default_rng(decimals)
    labels = generator.uniform(0, 5, 300).round(min(decimals, 1))
    predictions = (labels + generator.normal(0, 2, 300)).round(decimals)
    ours, theirs = compute('stsb', predictions, labels), (torch.tensor(predictions), torch.tensor(labels))
    assert ours['pearson'] == pytest.approx(pearson_corrcoef(*theirs).item(), abs=1e-6)
    assert ours['spearman'] == pytest.approx(spearman_corrcoef(*theirs).item(), abs=1e-6)


def test_a_constant_answer_correlates_with_nothing():
    assert compute('stsb', [0.1, 0.1, 0.1], [1, 2, 3]) == {'spearman': 0.0, 'pearson': 0.0}
    assert compute('cola', [1, 1, 1], [1, 0, 1]) == {'matthews': 0.0, 'accuracy': 2 / 3}
    assert compute('mrpc', [0, 0], [0, 0]) == {'accuracy': 1.0, 'f1': 0.0}


def test_both_parts_of_mnli():
    predictions = {'matched': np.array([0, 1, 2, 2]), 'mismatched': np.array([0, 0])}
    labels = {'matched': np.array([0, 1, 2, 0]), 'mismatched': np.array([0, 1])}
    computed, _ = compute_metrics(TASKS['mnli'], predictions, labels)
    assert computed == {'matched_accuracy': 0.75, 'mismatched_accuracy': 0.5}


@pytest.mark.parametrize('predictions', [np.zeros((3, 1)), np.zeros(2), 0.0])
def test_predictions_of_another_shape_than_the_labels_are_refused(predictions):
    with pytest.raises(ValueError, match=r'split dev: predictions and labels have shapes \(.*\) and \(3,\)'):
        compute('rte', predictions, [0, 1, 1])


def test_baselines():
    assert score_constant(TASKS['mnli'], np.array([0, 1, 2, 2])) == 0.5
    assert score_constant(TASKS['mrpc'], np.array([1, 1, 1, 0])) == 0.75
    assert score_constant(TASKS['cola'], np.array([1, 1, 1, 0])) == 0
    assert score_constant(TASKS['stsb'], np.array([1.0, 5.0])) == 0
    assert score_constant(TASKS['squad2'], np.array([True, False, False])) == pytest.approx(2 / 3)


def draw_examples(kind, count, generator):
    """Predictions that are mostly right."""
    if kind == 'classification':
        labels = (generator.random(count) < 0.3).astype(int)
        return np.where(generator.random(count) < 0.25, 1 - labels, labels), labels
    labels = generator.integers(0, 11, count) / 2  # similarities come in halves
    if kind == 'skewed':
        labels = generator.choice(5, count, p=[0.7, 0.15, 0.08, 0.04, 0.03]) * 1.0
    return labels + generator.normal(0, 2, count), labels


@pytest.mark.parametrize('name, kind', [('mrpc', None), ('cola', None), ('stsb', None), ('stsb', 'skewed')])
def test_influences_give_the_variance_that_resampled_examples_give(name, kind):
    task, generator = TASKS[name], np.random.default_rng(1)
    predictions, labels = draw_examples(kind or task.kind, 400, generator)
    _, found = compute_metrics(task, {'dev': predictions}, {'dev': labels})
    drawn = generator.integers(400, size=(2000, 400))
    resampled = [compute_metrics(task, {'dev': predictions[rows]}, {'dev': labels[rows]})[0] for rows in drawn]
    for metric, *_ in task.list_metrics():
        assert found[metric].mean() == pytest.approx(0, abs=1e-12)
        deviation = np.std([metrics[metric] for metrics in resampled])
        assert found[metric].std() / 20 == pytest.approx(deviation, rel=0.08)


@pytest.mark.parametrize('name, kind', [('mrpc', None), ('cola', None), ('stsb', None), ('stsb', 'skewed')])
def test_influences_are_what_a_metric_loses_without_each_example(name, kind):
    task = TASKS[name]
    predictions, labels = draw_examples(kind or task.kind, 400, np.random.default_rng(2))
    whole, found = compute_metrics(task, {'dev': predictions}, {'dev': labels})
    others = [np.arange(400) != i for i in range(400)]
    without = [compute_metrics(task, {'dev': predictions[rest]}, {'dev': labels[rest]})[0] for rest in others]
    for metric, *_ in task.list_metrics():
        losses = 399 * (whole[metric] - np.array([metrics[metric] for metrics in without]))
        assert np.corrcoef(found[metric], losses)[0, 1] > 0.999
        assert found[metric].std() == pytest.approx(losses.std(), rel=0.02)


def test_influences_of_both_parts_of_mnli_and_of_constant_answers():
    labels = {'matched': np.array([0, 1, 2, 0]), 'mismatched': np.array([1, 1])}
    predictions = {'matched': np.array([0, 1, 1, 1]), 'mismatched': np.array([1, 0])}
    _, found = compute_metrics(TASKS['mnli'], predictions, labels)
    assert found['matched_accuracy'].tolist() == [0.5, 0.5, -0.5, -0.5]
    assert found['mismatched_accuracy'].tolist() == [0.5, -0.5]
    for name in ('cola', 'stsb', 'mrpc'):
        _, constant = compute_metrics(TASKS[name], {'dev': np.zeros(3)}, {'dev': np.array([0, 1, 1])})
        assert constant[TASKS[name].list_metrics()[-1].name].shape == (3,)
        assert np.isfinite([*constant.values()]).all()


def test_a_metric_without_a_branch_is_no_correlation(monkeypatch):
    monkeypatch.setattr(TASKS['rte'], 'metrics', ['macro_f1'])
    with pytest.raises(ValueError, match='macro_f1'):
        compute('rte', [0, 1], [0, 1])
    with pytest.raises(ValueError, match='macro_f1'):
        score_constant(TASKS['rte'], np.array([0, 1]))
