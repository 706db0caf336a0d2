"""Packs the tokenised lines of documents into blocks and blocks into rows, drawing from a given generator alone."""

from collections.abc import Iterable, Sequence

import numpy as np

from maelm_composer.data.special_tokens import CLS_ID, PAD_ID, SEP_ID

TARGET_FILL_RATE = 0.985
OPENED_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0)

Line = Sequence[int]
Block = list[Line]  # consecutive lines of one document; as ids: [CLS] line [SEP] line [SEP] ...


def build_blocks(lines: Iterable[Line], max_seq_len: int) -> list[Block]:
    """Join the tokenised ``lines`` of one document, in order, into blocks of at most ``max_seq_len`` ids.

    Only a line longer than ``max_seq_len - 2`` is divided, into consecutive pieces, so that no text is lost. Empty
    lines are dropped.
    """
    # PAPER-SILENT: the authors' code crops such a line at random and loses the rest.
    longest = max_seq_len - 2
    blocks: list[Block] = []
    space = 0
    for line in lines:
        for start in range(0, len(line), longest):
            piece = line[start : start + longest]
            if len(piece) + 1 > space:
                blocks.append([])
                space = max_seq_len - 1
            blocks[-1].append(piece)
            space -= len(piece) + 1
    return blocks


def count_ids(block: Block) -> int:
    """Number of ids of ``block``, including its [CLS] and [SEP]s."""
    return 1 + sum(map(len, block)) + len(block)


def assign_rows(lengths: Sequence[int], max_seq_len: int) -> list[list[int]]:
    """Assign blocks to rows of at most ``max_seq_len`` ids by best-fit decreasing bin packing.

    Block i has ``lengths[i]`` ids, 1 to ``max_seq_len``. Returns for each row the indices of its blocks.
    """
    rows: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(max_seq_len)]  # rows by their free space, the one filled last on top
    spaces = 0  # bit s is set if a row has s ids of free space
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if fitting := spaces >> length:
            space = length + (fitting & -fitting).bit_length() - 1  # the lowest bit: the tightest fit
            row = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, row = max_seq_len, len(rows)
            rows.append([])
        rows[row].append(index)
        if space > length:
            by_space[space - length].append(row)
            spaces |= 1 << (space - length)
    return rows


def fit_rows(blocks: list[Block], max_seq_len: int, generator: np.random.Generator) -> list[list[Block]]:
    """Pack blocks into rows that, apart from the last, are ``TARGET_FILL_RATE`` full if the text allows it.

    Most blocks are nearly as long as a row and leave gaps that no other block fits. Therefore a random share of the
    blocks, the smallest share that suffices, is divided: each of their lines becomes a block of its own.
    """
    draws = generator.random(len(blocks))
    best: list[list[Block]] | None = None
    for share in OPENED_SHARES:
        pieces: list[Block] = []
        for block, draw in zip(blocks, draws, strict=True):
            pieces.extend([line] for line in block) if draw < share else pieces.append(block)
        lengths = [count_ids(block) for block in pieces]
        rows = assign_rows(lengths, max_seq_len)
        if best is None or len(rows) < len(best):
            best = [[pieces[i] for i in row] for row in rows]
        if sum(lengths) >= TARGET_FILL_RATE * max_seq_len * (len(rows) - 1):
            break
    return best or []


def pack_blocks(
    blocks: list[Block], max_seq_len: int, generator: np.random.Generator, dtype: type
) -> tuple[np.ndarray, int]:
    """Pack ``blocks`` into rows, shuffled by ``generator``.

    The blocks within a row are shuffled too; in the order of packing, short blocks would always come last. A row less
    than half full is dropped, since it has too few tokens to mask.

    Returns:
        (R, N) ids of R rows, with [PAD] only at the end of a row; the number of ids in the dropped rows.
    """
    fitted = fit_rows(blocks, max_seq_len, generator)
    filled = [sum(map(count_ids, row)) for row in fitted]
    kept = [i for i, ids in enumerate(filled) if 2 * ids >= max_seq_len]
    rows: np.ndarray = np.full((len(kept), max_seq_len), PAD_ID, dtype)
    for target, source in zip(rows, generator.permutation(kept), strict=True):
        row = fitted[source]
        ids: list[int] = []
        for i in generator.permutation(len(row)):
            ids.append(CLS_ID)
            for line in row[i]:
                ids.extend(line)
                ids.append(SEP_ID)
        target[: len(ids)] = ids
    return rows, sum(filled) - sum(filled[i] for i in kept)
