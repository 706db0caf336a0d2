"""What all tests share: one thread, repeatable draws, packed rows and their batches."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from maelm_composer.masking.collate import Batch, MaskingCollator
from tests.tiny import checkpoint, configure, task_folder

__all__ = ['checkpoint', 'configure', 'task_folder']  # fixtures

os.environ |= {'no_proxy': '127.0.0.1,localhost', 'NO_PROXY': '127.0.0.1,localhost'}  # the tests' own servers

# A loaded machine must not turn a property red, nor another draw turn a green suite red.
settings.register_profile('repeatable', deadline=None, derandomize=True, max_examples=40)
settings.load_profile('repeatable')


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        '--authors',
        metavar='FOLDER',
        help='a clone of yumeng5/MAE-LM; write --authors=FOLDER: pytest would take a second word for a path of tests',
    )


def pytest_collection_finish() -> None:
    """The packages' own million objects need not be searched for garbage in every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models only wait for a second thread; and the order of sums depends on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def wait_for() -> Iterator[Callable[..., None]]:
    """``wait_for(condition, every)``: poll it, at most four minutes, while nothing else has to go on in this thread.

    A thread that still waits when its test is over ends, lest it act on the next test.
    """
    is_over = threading.Event()

    def wait(holds: Callable[[], object], every: float = 0.001) -> None:
        deadline = time.monotonic() + 240
        while not holds():
            assert time.monotonic() < deadline
            if is_over.wait(every):
                raise SystemExit  # of a thread: silent

    yield wait
    is_over.set()


def pack_row(block_lengths: Sequence[int], length: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """(N,) ids: blocks ``[CLS] pieces [SEP] pieces [SEP]`` one after another, then [PAD]."""
    generator = np.random.default_rng(seed)
    row, start = np.full(length, 1, np.uint16), 0
    for block_length in block_lengths:
        block = generator.integers(4, vocab_size - 1, block_length)
        block[block_length // 2] = 2
        block[[0, -1]] = 0, 2
        row[start : start + block_length] = block
        start += block_length
    assert start <= length
    return row


def collate_rows(collator: MaskingCollator, rows: Sequence[np.ndarray], first_row: int = 0, epoch: int = 0) -> Batch:
    """The batch of ``rows``, numbered from ``first_row``."""
    return collator([{'input_ids': ids, 'row': first_row + i, 'epoch': epoch} for i, ids in enumerate(rows)])


@pytest.fixture(scope='session')
def build_row() -> Callable[..., np.ndarray]:
    return pack_row


@pytest.fixture(scope='session')
def collate() -> Callable[..., Any]:
    return collate_rows
