"""Small tasks made from the documentation that is on this machine, one for each head. They are not GLUE.

The same text gives the same rows; which text there is depends on the installed packages, and so does the data hash.
"""

import functools
import random
import re

import pyarrow

from maelm_composer.config import SourceConfig
from maelm_composer.data.corpora import iterate_documents
from maelm_composer.errors import InputError
from maelm_composer.tasks.catalogue import MAX_SIMILARITY, Task

TRAIN_ROWS, DEV_ROWS = 600, 200
MAX_DOCUMENTS = 10_000  # read until there are enough texts
PASSAGE_WORDS = 10, 30
SENTENCE = re.compile(r'(?<![^\n.]) ?([A-Z][a-z]+(?: [A-Za-z,]+){5,15})\.(?=\s|$)')
QUOTED = re.compile(r'(?<!`)(`{1,2})([A-Za-z_][\w.]*)\1(?!`)')


def make_demo_tables(task: Task) -> dict[str, pyarrow.Table]:
    """Tables ``train`` and ``dev`` with the columns of the task; no text is in both.

    Raises:
        InputError: too little documentation is installed.
    """
    generator = random.Random(0)
    sentences, passages = _read_texts()
    match task.name:
        case 'demo_sentence':
            rows = [_make_sentence(text, i, generator) for i, text in enumerate(sentences)]
        case 'demo_pair':
            rows = [_make_pair(text, i) for i, text in enumerate(sentences)]
        case 'demo_regression':
            rows = [_make_similarity(text, i, generator) for i, text in enumerate(sentences)]
        case _:
            rows = [_make_question(text, i) for i, text in enumerate(passages)]
    if len(rows) < TRAIN_ROWS + DEV_ROWS:
        raise InputError(f'the documentation on this machine is too small for task {task.name}')
    tables = {'train': rows[DEV_ROWS : DEV_ROWS + TRAIN_ROWS], 'dev': rows[:DEV_ROWS]}
    return {name: pyarrow.Table.from_pylist(part) for name, part in tables.items()}


@functools.lru_cache(maxsize=1)
def _read_texts() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Different sentences of 6 to 16 plain words, and passages: two with one quoted name, then one without any."""
    wanted = TRAIN_ROWS + DEV_ROWS
    sentences: dict[str, str] = {}  # by their first words, as machine-written ones begin alike
    with_name: dict[str, None] = {}
    without: dict[str, None] = {}
    for document in iterate_documents([SourceConfig(max_documents=MAX_DOCUMENTS)]):
        for sentence in SENTENCE.findall(document):
            sentences.setdefault(' '.join(sentence.split()[:3]), sentence)
        for line in document.split('\n'):
            if not PASSAGE_WORDS[0] <= len(line.split()) <= PASSAGE_WORDS[1]:
                continue
            if '`' not in line:
                without[line] = None
            elif len(QUOTED.findall(line)) == 1 and '`' not in QUOTED.sub('', line):
                with_name[line] = None
        if min(len(sentences), len(without) * 3, len(with_name) * 3 // 2) > wanted:
            break
    named = list(with_name)
    passages = [text for three in zip(named[::2], without, named[1::2], strict=False) for text in three]
    return tuple(sentences.values())[:wanted], tuple(passages)[:wanted]


def _make_sentence(text: str, number: int, generator: random.Random) -> dict[str, object]:
    """Whether the words stand in their order."""
    words = text.split()
    if is_shuffled := number % 2 == 0:
        generator.shuffle(words)
    return {'sentence': ' '.join(words).lower(), 'label': int(not is_shuffled), 'idx': number}


def _make_pair(text: str, number: int) -> dict[str, object]:
    """Whether the two halves of a sentence stand in their order."""
    words = text.lower().split()
    halves = [' '.join(words[: len(words) // 2]), ' '.join(words[len(words) // 2 :])]
    label = number % 2
    return {'sentence1': halves[1 - label], 'sentence2': halves[label], 'label': label, 'idx': number}


def _make_similarity(text: str, number: int, generator: random.Random) -> dict[str, object]:
    """How many words of the first text the second keeps, from 0 to 5; the others are blanked out."""
    words = text.lower().split()
    blanked = set(generator.sample(range(len(words)), k=generator.randint(0, len(words))))
    second = ['_' if i in blanked else word for i, word in enumerate(words)]
    similarity = MAX_SIMILARITY * (1 - len(blanked) / len(words))
    return {'sentence1': ' '.join(words), 'sentence2': ' '.join(second), 'label': similarity, 'idx': number}


def _make_question(passage: str, number: int) -> dict[str, object]:
    """Which name stands in back-quotes; every third passage has none."""
    match = QUOTED.search(passage)
    answers = {'text': [match[2]] if match else [], 'answer_start': [match.start(2)] if match else []}
    question = 'Which name stands in back-quotes?'
    return {'id': f'demo-{number}', 'context': passage, 'question': question, 'answers': answers}
