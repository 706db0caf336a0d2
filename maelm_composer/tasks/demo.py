"""Small tasks made from the documentation on this machine, at least one for each head. They are not GLUE.

The rows, and so the data hash, depend on the documentation of the installed packages, and on nothing else.
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
MAX_DOCUMENTS = 10_000  # reading stops earlier once there are enough texts
PASSAGE_WORDS = 10, 30
SENTENCE = re.compile(r'(?<![^\n.]) ?([A-Z][a-z]+(?: [A-Za-z,]+){5,15})\.(?=\s|$)')
QUOTED = re.compile(r'(?<!`)(`{1,2})([A-Za-z_][\w.]*)\1(?!`)')


def make_demo_tables(task: Task) -> dict[str, pyarrow.Table]:
    """Tables ``train`` and ``dev`` with the columns of the task, made from disjoint texts.

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
    """Distinct sentences of 6 to 16 plain words, and passages of which every third has no name in back-quotes."""
    num_rows = TRAIN_ROWS + DEV_ROWS
    sentences: dict[str, str] = {}  # by their first three words, since generated documentation repeats itself
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
        # Passages come in threes: two with a name, one without.
        if min(len(sentences), len(without) * 3, len(with_name) * 3 // 2) > num_rows:
            break
    named = list(with_name)
    passages = [text for three in zip(named[::2], without, named[1::2], strict=False) for text in three]
    return tuple(sentences.values())[:num_rows], tuple(passages)[:num_rows]


def _make_sentence(text: str, number: int, generator: random.Random) -> dict[str, object]:
    """Label 1 if the words are in their original order, 0 if they are shuffled."""
    words = text.split()
    if is_shuffled := number % 2 == 0:
        generator.shuffle(words)
    return {'sentence': ' '.join(words).lower(), 'label': int(not is_shuffled), 'idx': number}


def _make_pair(text: str, number: int) -> dict[str, object]:
    """Label 1 if the two halves of a sentence are in their original order, 0 if they are swapped."""
    words = text.lower().split()
    halves = [' '.join(words[: len(words) // 2]), ' '.join(words[len(words) // 2 :])]
    label = number % 2
    return {'sentence1': halves[1 - label], 'sentence2': halves[label], 'label': label, 'idx': number}


def _make_similarity(text: str, number: int, generator: random.Random) -> dict[str, object]:
    """The second text is the first with some words blanked out; the label, 0 to 5, is the share of words kept."""
    words = text.lower().split()
    blanked = set(generator.sample(range(len(words)), k=generator.randint(0, len(words))))
    second = ['_' if i in blanked else word for i, word in enumerate(words)]
    similarity = MAX_SIMILARITY * (1 - len(blanked) / len(words))
    return {'sentence1': ' '.join(words), 'sentence2': ' '.join(second), 'label': similarity, 'idx': number}


def _make_question(passage: str, number: int) -> dict[str, object]:
    """Ask for the name in back-quotes; a passage without one is a question without an answer."""
    match = QUOTED.search(passage)
    answers = {'text': [match[2]] if match else [], 'answer_start': [match.start(2)] if match else []}
    question = 'Which name stands in back-quotes?'
    return {'id': f'demo-{number}', 'context': passage, 'question': question, 'answers': answers}
