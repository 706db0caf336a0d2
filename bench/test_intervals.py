"""Simulated coverage of the intervals of MAE-LM − RoBERTa.

    pytest -s bench/test_intervals.py [--record]        a few minutes; with --record: intervals.csv in the results

Two models are pretrained with a few paired seeds and scored on one development set. The probability of a correct answer
is the logistic function of a sum of normal variables: one for the example, one for model and example, one for the seed,
one for seed and example. Over other seeds and examples, the true difference of the models is zero.

Figure 3 compares two equal models' times to an accuracy: fine-tuned checkpoints on one rising curve, each with an error
of its own. An experiment counts as covered if no verdict tells the models from each other, also where none is possible.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.special import stdtrit

from bench.conftest import format_csv
from maelm_composer.files import write_text
from maelm_composer.reporting.figure3 import Axis, ScoredCheckpoint, explain_undecided, find_arrival, race
from maelm_composer.statistics import estimate_contrast, estimate_mean, measure_example_variance

EXAMPLES, EXPERIMENTS, RESAMPLES, TAILS = 872, 2000, 500, (2.5, 97.5)
# Standard deviations in logits of the variables of the seed, of model and example, and of seed and example.
WORLDS = {
    'seeds differ most': (0.25, 0.3, 1.0),
    'seeds differ, examples too': (0.25, 1.5, 0.0),
    'both': (0.1, 0.8, 1.0),
    'examples differ most': (0.02, 1.2, 0.5),
}
CHECKPOINTS, SLOPES = 8, (0.0, 0.3, 1.0, 3.0)  # points of accuracy a checkpoint
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


def estimate_by_satterthwaite(found: np.ndarray) -> Interval:
    """The same variance, but one Student's t with Satterthwaite's degrees of freedom."""
    seeds, examples = found.shape
    found_in = measure_example_variance([found - found.mean(1, keepdims=True)])
    of_seeds = float(found.mean(1).var(ddof=1)) / seeds
    variance = max(of_seeds + found_in.own - found_in.shared, of_seeds, found_in.own)
    freedom = variance**2 / (of_seeds**2 / (seeds - 1) + found_in.own**2 / (examples - 1))
    half = float(stdtrit(freedom, 0.975)) * variance**0.5
    return float(found.mean()) - half, float(found.mean()) + half


def estimate_by_seeds(found: np.ndarray) -> Interval:
    interval = estimate_mean(found.mean(1))
    return interval.low, interval.high


def measure_coverage(seeds: int, world: str) -> dict[str, tuple[float, float]]:
    """Method -> the shares of simulated experiments without an interval beside zero, and with an interval."""
    generator = np.random.default_rng([seeds, EXAMPLES, list(WORLDS).index(world)])
    of_seeds, of_examples = (generator.multinomial(n, [1 / n] * n, RESAMPLES) / n for n in (seeds, EXAMPLES))
    methods: dict[str, Callable[[np.ndarray], Interval]] = {
        'bootstrap over seeds': lambda found: resample(found, of_seeds, None),
        't over seeds': estimate_by_seeds,
        'Multi-Bootstrap over seeds and examples': lambda found: resample(found, of_seeds, of_examples),
        't by Satterthwaite over seeds and examples': estimate_by_satterthwaite,
        't over seeds, with the variance of examples (used)': estimate_crossed,
    }
    covered, found_one = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0)
    for _ in range(EXPERIMENTS):
        found = draw_differences(generator, seeds, world)
        for name, method in methods.items():
            low, high = method(found)
            has_interval = low is not None and high is not None  # equal seeds have none
            found_one[name] += has_interval
            covered[name] += not has_interval or low <= 0 <= high
    return {name: (covered[name] / EXPERIMENTS, found_one[name] / EXPERIMENTS) for name in methods}


def draw_curve(generator: np.random.Generator, slope: float) -> list[ScoredCheckpoint]:
    """The checkpoints after each CHECKPOINTS-th of the pretraining, with a standard error of one point."""
    return [
        ScoredCheckpoint(at, float(at), None, {0: 60 + slope * at + float(generator.normal(0, 1))})
        for at in range(1, CHECKPOINTS + 1)
    ]


def measure_time_to_accuracy(seeds: int, slope: float) -> dict[str, tuple[float, float]]:
    """Method -> the shares of experiments in which no verdict tells one of two equal models from the other, and in
    which a verdict is possible.
    """
    generator = np.random.default_rng([seeds, round(10 * slope)])
    methods = "time to RoBERTa's accuracy, against RoBERTa's whole time", 'time to the lower accuracy (used)'
    covered, possible = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0)
    for _ in range(EXPERIMENTS):
        pairs = [(draw_curve(generator, slope), draw_curve(generator, slope)) for _ in range(seeds)]
        arrivals = [find_arrival(ours, theirs[-1].median, Axis.hours).interpolated for theirs, ours in pairs]
        races = [race(pair) for pair in pairs]
        by_method = [arrival - CHECKPOINTS for arrival in arrivals], [each.lead for each in races]
        decides = all(map(math.isfinite, arrivals)), not explain_undecided(races, constant=0.0)
        for method, leads, is_possible in zip(methods, by_method, decides, strict=True):
            p = estimate_mean(leads).p if is_possible else None
            possible[method] += is_possible
            covered[method] += p is None or p >= 0.05
    return {method: (covered[method] / EXPERIMENTS, possible[method] / EXPERIMENTS) for method in methods}


def test_coverage(request: pytest.FixtureRequest) -> None:
    rows = []
    for seeds in (2, 3, 5):
        shares = {(EXAMPLES, world): measure_coverage(seeds, world) for world in WORLDS}
        for slope in SLOPES:
            shares[0, f'equal curves, {slope} points a checkpoint'] = measure_time_to_accuracy(seeds, slope)
        for (examples, world), found in shares.items():
            for name, (share, possible) in found.items():
                row = {'seeds': seeds, 'examples': examples, 'world': world, 'interval': name}
                rows.append({**row, 'coverage': round(share, 3), 'verdict_possible': round(possible, 3)})
    text = format_csv(rows)
    print('', text, sep='\n')
    if request.config.getoption('--record'):
        write_text(Path(request.config.getoption('--results'), 'intervals.csv'), text)
    assert all(row['coverage'] >= 0.94 for row in rows if row['interval'].endswith('(used)'))
