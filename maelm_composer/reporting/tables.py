"""Tables 1 to 3 and that of own tasks as rows: the numbers of every model, then one row for each claim."""

from collections.abc import Sequence

from maelm_composer.reporting.artefacts import (
    ABLATIONS,
    MAE_LM,
    ROBERTA,
    Column,
    Role,
    average_column,
    columns_of,
    tasks_of,
)
from maelm_composer.reporting.cells import subtract
from maelm_composer.reporting.row_builder import (
    BOTH,
    CONSTANT,
    GAP,
    PERCENT,
    POINTS,
    RANK,
    Claim,
    RowBuilder,
    claim_more_dimensions,
)
from maelm_composer.reporting.rows import Row


def build_table1(builder: RowBuilder) -> list[Row]:
    scale = builder.scale
    return _compare(builder, [*columns_of(scale, Role.glue), average_column(scale), *columns_of(scale, Role.squad)])


def build_own(builder: RowBuilder) -> list[Row]:
    scores = builder.evidence.list_own_scores().items()
    return _compare(builder, [Column(f'{task} {metric}', '', task, metric) for task, metric in scores])


def _compare(builder: RowBuilder, columns: Sequence[Column]) -> list[Row]:
    """Both models' scores, those of a constant answer, and MAE-LM − RoBERTa; a task's main metric is its first."""
    cells = {(model, c): builder.evidence.score(model, c) for model in BOTH for c in columns}
    rows = [
        builder.value(model.label, c.name, PERCENT, cell, builder.paper_of(model, c.name))
        for (model, c), cell in cells.items()
    ]
    main = {column.task: column for column in reversed(columns)}  # the mean is that of no task
    rows += [
        builder.value(CONSTANT, c.name, PERCENT, builder.evidence.constant_score(ROBERTA, c))
        for c in columns
        if c is main[c.task]  # records hold the constant answer's score in the main metric only
    ]
    claims = {
        c: Claim(GAP, c.name, subtract(cells[MAE_LM, c], cells[ROBERTA, c]), builder.paper_gap(c.name)) for c in columns
    }
    rows += builder.claims(POINTS, *(claim for c, claim in claims.items() if not c.parts))
    # The mean's claim is one of its own, outside the family of the tasks.
    return rows + builder.claims(POINTS, *(claim for c, claim in claims.items() if c.parts))


def build_table2(builder: RowBuilder) -> list[Row]:
    average = average_column(builder.scale)
    cells = {model: builder.evidence.score(model, average) for model in ABLATIONS}
    rows = [
        builder.value(model.label, average.name, PERCENT, cell, builder.paper_of(model, average.name))
        for model, cell in cells.items()
    ]
    claims = [
        Claim(
            f'{model.label} − MAE-LM',
            average.name,
            subtract(cell, cells[MAE_LM]),
            builder.paper_gap(average.name, MAE_LM, model),
        )
        for model, cell in cells.items()
        if model is not MAE_LM
    ]
    return rows + builder.claims(POINTS, *claims, expects_more=False)


def build_table3(builder: RowBuilder) -> list[Row]:
    mnli, squad = tasks_of(builder.scale, (Role.mnli, Role.squad))
    evidence, rows, claims = builder.evidence, [], []
    for column, published in (('pretrained', 'pretrained'), (mnli, 'mnli'), (squad, 'squad2')):
        theirs, ours = (
            evidence.rank(model, 'rank_real') if column == 'pretrained' else evidence.finetuned_rank(model, column)
            for model in BOTH
        )
        for model, cell in zip(BOTH, (theirs, ours), strict=True):
            rows.append(builder.value(model.label, column, RANK, cell, builder.paper_of(model, published)))
        claims.append(claim_more_dimensions(column, theirs, ours, builder.paper_gap(published)))
    return rows + builder.claims(RANK, *claims)
