"""Simulated coverage of the intervals of MAE-LM − RoBERTa.

    pytest -s bench/test_intervals.py [--record]        a minute or two; with --record: intervals.csv in the results

Two models are pretrained with a few paired seeds and scored on one development set. The probability of a correct answer
is the logistic function of a sum of normal variables: one for the example, one for model and example, one for the seed,
one for seed and example. Over other seeds and examples, the true difference of the models is zero.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.conftest import format_csv
from maelm_composer.files import write_text
from maelm_composer.statistics import estimate_contrast, estimate_mean, measure_example_variance

EXAMPLES, EXPERIMENTS, RESAMPLES, TAILS = 872, 2000, 500, (2.5, 97.5)
# Standard deviations in logits of the variables of the seed, of model and example, and of seed and example.
WORLDS = {'seeds differ most': (0.25, 0.3, 1.0), 'both': (0.1, 0.8, 1.0), 'examples differ most': (0.02, 1.2, 0.5)}
Interval = tuple[float | None, float | None]


def draw_differences(generator: np.random.Generator, seeds: int, world: str) -> np.ndarray:
    """(seeds, EXAMPLES) difference of correctness: 1 if only the first model is right, -1 if only the second is."""
    of_seed, of_model, of_both = WORLDS[world]
    difficulty = generator.normal(1.5, 2.0, EXAMPLES)
    answers = []
    for _ in range(2):
        logits = difficulty + generator.normal(0, of_model, EXAMPLES) + generator.normal(0, of_seed, (seeds, 1))
        logits += generator.normal(0, of_both, (seeds, EXAMPLES))
        answers.append(generator.random((seeds, EXAMPLES)) < 1 / (1 + np.exp(-logits)))
    return answers[0].astype(float) - answers[1]


def resample(found: np.ndarray, of_seeds: np.ndarray, of_examples: np.ndarray | None) -> Interval:
    """Percentile interval of the mean over R resamples.

    Args:
        of_seeds: (R, seeds) weights that sum to one.
        of_examples: (R, examples) weights that sum to one; None: the examples are not resampled.
    """
    by_seed = found.mean(1)[:, None] if of_examples is None else found @ of_examples.T
    means = (of_seeds.T * by_seed).sum(0)
    low, high = np.percentile(means, TAILS)
    return float(low), float(high)


def estimate_crossed(found: np.ndarray) -> Interval:
    influences = found - found.mean(1, keepdims=True)
    variance = measure_example_variance([influences])
    interval = estimate_contrast([found.mean(1)], [variance])
    return interval.low, interval.high


def estimate_by_seeds(found: np.ndarray) -> Interval:
    interval = estimate_mean(found.mean(1))
    return interval.low, interval.high


def measure_coverage(seeds: int, world: str) -> dict[str, float]:
    """Method -> the share of simulated experiments whose interval contains zero."""
    generator = np.random.default_rng([seeds, EXAMPLES, list(WORLDS).index(world)])
    of_seeds, of_examples = (generator.multinomial(n, [1 / n] * n, RESAMPLES) / n for n in (seeds, EXAMPLES))
    methods: dict[str, Callable[[np.ndarray], Interval]] = {
        'bootstrap over seeds': lambda found: resample(found, of_seeds, None),
        't over seeds': estimate_by_seeds,
        'Multi-Bootstrap over seeds and examples': lambda found: resample(found, of_seeds, of_examples),
        't over seeds, with the variance of examples (used)': estimate_crossed,
    }
    covered = dict.fromkeys(methods, 0)
    for _ in range(EXPERIMENTS):
        found = draw_differences(generator, seeds, world)
        for name, method in methods.items():
            low, high = method(found)
            assert low is not None
            assert high is not None
            covered[name] += low <= 0 <= high
    return {name: count / EXPERIMENTS for name, count in covered.items()}


def test_coverage(request: pytest.FixtureRequest) -> None:
    rows = []
    for seeds in (3, 5):
        for world in WORLDS:
            rows += [
                {'seeds': seeds, 'examples': EXAMPLES, 'world': world, 'interval': name, 'coverage': round(share, 3)}
                for name, share in measure_coverage(seeds, world).items()
            ]
    text = format_csv(rows)
    print('', text, sep='\n')
    if request.config.getoption('--record'):
        write_text(Path(request.config.getoption('--results'), 'intervals.csv'), text)
    assert all(row['coverage'] >= 0.9 for row in rows if row['interval'].endswith('(used)'))
