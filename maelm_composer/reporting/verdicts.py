"""What a number says about the paper's claim, in words: never more than its interval allows."""

from maelm_composer.reporting.artefacts import DEMO, SETTINGS
from maelm_composer.reporting.estimate import Estimate

NOT_COMPARABLE = "not comparable with the paper's absolute numbers"
HOLDS, FAILS, UNDECIDED = 'holds', 'fails', 'undecided'
SEED, CHECKPOINT = 'fine-tuning seed', 'checkpoint'  # what is repeated


def is_comparable(scale: str) -> bool:
    """Whether ``scale`` is one of the paper's settings."""
    return scale in SETTINGS


def judge_value(scale: str, found: Estimate, paper: float | None) -> str:
    """A number beside the paper's."""
    if not is_comparable(scale):
        return NOT_COMPARABLE
    if paper is None:
        return ''
    if found.low is None or found.high is None:
        return f"one value, no interval: {found.value - paper:+.3g} from the paper's"
    if round(found.low, 1) <= paper <= round(found.high, 1):  # the paper prints one digit after the point, or none
        return "the interval holds the paper's number"
    return f"{'above' if found.value > paper else 'below'} the paper's number, which lies outside the interval"


def judge_claim(scale: str, found: Estimate, expects_more: bool, repeats: str = SEED) -> str:
    """A difference or a slope that the paper says is above zero (``expects_more``) or below.

    Args:
        repeats: what ``found.count`` counts. The pretraining seed is always one: the interval does not cover it.
    """
    sign = 1 if expects_more else -1
    if found.low is None or found.high is None:
        agrees = 'with' if sign * found.value > 0 else 'without'
        text = f'{UNDECIDED}: {agrees} the sign of the claim, but one {repeats} gives no interval'
    else:
        least, most = sorted((sign * found.low, sign * found.high))
        word = HOLDS if least > 0 else FAILS if most < 0 else UNDECIDED
        text = f'{word}: {found.count} {repeats}s, one pretraining seed'
    return qualify(scale, text)


def qualify(scale: str, text: str) -> str:
    """``text``, and below the paper's scales what may not be read into it; of demo tasks nothing may."""
    if scale == DEMO:
        text = f'{UNDECIDED}: demo tasks are evidence of nothing'
    return text if is_comparable(scale) else f'{text}; {NOT_COMPARABLE}'
