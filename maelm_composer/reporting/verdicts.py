"""Verdicts: what a number with its interval says about the paper's claim."""

from maelm_composer.reporting.artefacts import DEMO, PAPER_SETTINGS
from maelm_composer.reporting.cells import Estimate
from maelm_composer.reporting.rows import Row
from maelm_composer.statistics import LEVEL

NOT_COMPARABLE = "not comparable with the paper's absolute numbers"
HOLDS, FAILS, NO_DIFFERENCE, UNDECIDED = WORDS = ('holds', 'fails', 'no difference', 'undecided')
# Stated before anything was measured: a difference within the margin counts as none.
MARGIN_POINTS = 1.0
MARGIN_RANK_SHARE = 0.05  # of the baseline's rank


def is_claim(row: Row) -> bool:
    """Whether ``row`` has a verdict about a claim of the paper: a difference, a slope or a share."""
    return row.value is not None and row.verdict.startswith(WORDS)


def is_comparable(scale: str) -> bool:
    """Whether ``scale`` is one of the paper's settings."""
    return scale in PAPER_SETTINGS


def judge_value(scale: str, found: Estimate, paper: float | None) -> str:
    """Where the paper's number lies relative to ``found``; below base, that the two are not comparable."""
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
    """The verdict on a difference or a slope.

    Args:
        expects_more: whether the paper claims that it is above zero, or below.
        margin: a difference within it is too small to matter.
        among: the size of the family of claims for which ``found.p`` was corrected by Holm's method.
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
    """``text`` with the reservation that ``scale`` needs; the demo decides nothing."""
    if scale == DEMO:
        text = f'{UNDECIDED}: the demo is evidence of nothing'
    return text if is_comparable(scale) else f'{text}; {NOT_COMPARABLE}'
