"""What a number says about the paper's claim, in words: never more than its interval allows."""

from maelm_composer.reporting.artefacts import DEMO, SETTINGS
from maelm_composer.reporting.estimate import Estimate
from maelm_composer.reporting.rows import Row
from maelm_composer.statistics import LEVEL

NOT_COMPARABLE = "not comparable with the paper's absolute numbers"
HOLDS, FAILS, NO_DIFFERENCE, UNDECIDED = WORDS = ('holds', 'fails', 'no difference', 'undecided')
# Stated before anything was measured: a smaller difference is none.
MARGIN_POINTS = 1.0
MARGIN_RANK_SHARE = 0.05  # of the baseline's rank


def is_claim(row: Row) -> bool:
    """Whether ``row`` is judged: a difference, a slope or a share that the paper says something of."""
    return row.value is not None and row.verdict.startswith(WORDS)


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


def judge_claim(scale: str, found: Estimate, expects_more: bool, margin: float | None = None, among: int = 1) -> str:
    """A difference or a slope that the paper says is above zero (``expects_more``) or below.

    Args:
        margin: what is too small to matter; stated beforehand.
        among: how many claims Holm's correction has counted in ``found.p``.
    """
    sign = 1 if expects_more else -1
    if found.p is None or found.low is None or found.high is None:
        agrees = 'with' if sign * found.value > 0 else 'without'
        return qualify(scale, f'{UNDECIDED}: {agrees} the sign of the claim, but from one pretraining seed')
    if found.p < 1 - LEVEL:
        word = HOLDS if sign * found.value > 0 else FAILS
    elif margin is not None and -margin < found.low and found.high < margin:
        word = NO_DIFFERENCE
    else:
        word = UNDECIDED
    corrected = f', one of {among} by Holm' if among > 1 else ''
    return qualify(scale, f'{word}: {found.pretraining_seeds} pretraining seeds{corrected}')


def qualify(scale: str, text: str) -> str:
    """``text``, and below the paper's scales what may not be read into it; of demo tasks nothing may."""
    if scale == DEMO:
        text = f'{UNDECIDED}: demo tasks are evidence of nothing'
    return text if is_comparable(scale) else f'{text}; {NOT_COMPARABLE}'
