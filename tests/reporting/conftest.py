"""Records as the stages before reporting write them, with numbers that are easy to check by hand."""

import json
from pathlib import Path

import pytest

from maelm_composer.records import CONTENT_HASH
from maelm_composer.reporting.artefacts import ABLATIONS, DELTAS, ROBERTA, Role, tasks_of
from maelm_composer.reporting.load import load_evidence
from maelm_composer.reporting.report import build_tables
from tests.records import make_finetuning, make_identity, make_layer, make_pretraining, make_rank

SAMPLES = (100, 200, 400)  # of the checkpoints
SEEDS = (1, 2, 3, 4, 5)
PRETRAINING_SEEDS = (17, 18, 19)
SHIFTS = (-0.004, 0.0, 0.004)  # of every score, by pretraining seed: the same for all models
LAYERS = 3
MODELS = (*ABLATIONS, *(model for _, model in DELTAS))


class Archive:
    """results/<scale>/records, written one record at a time."""

    def __init__(self, results: Path, scale: str) -> None:
        self.results, self.scale = results, scale
        self.records = results / scale / 'records'

    def write(self, kind: str, name: str, record: dict) -> Path:
        path = self.records / kind / f'{name}.json'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
        return path

    def add_run(self, name: str, hours: float = 2.0, **changes: object) -> None:
        """A name that ends in -sN is of the pretraining seed N."""
        seed = int(name.rpartition('-s')[2]) if '-s' in name and name.rpartition('-s')[2].isdigit() else 17
        identity = {'seed': seed, CONTENT_HASH: 'pretraining-data', 'optimizer.learning_rate': 0.004}
        changes = {'identity': identity, 'training_seconds': hours * 3600, 'device_hours': hours, **changes}
        record = make_pretraining(name, **changes)
        self.write('pretraining', name, record)
        lines = ['samples,batch,train_loss,learning_rate,gradient_norm,training_seconds,eval_loss']
        for batch in range(1, 301):
            eval_loss = '' if batch % 100 else record['eval_loss'] if batch == 300 else 6 - batch / 100
            lines.append(f'{batch * 2},{batch},{7 - batch / 100},0.001,1.0,{batch},{eval_loss}')
        (self.records / 'pretraining' / f'{name}.csv').write_text('\n'.join(lines) + '\n')

    def add_score(self, run: str, task: str, seed: int, score: float, samples: int = SAMPLES[-1], **changes) -> None:
        metrics = {'matched_accuracy': score, 'mismatched_accuracy': score - 0.01}
        metrics |= {'best_exact': score, 'best_f1': score + 0.02, 'exact': score - 0.03, 'f1': score - 0.01}
        record = make_finetuning(
            task,
            run,
            samples,
            seed,
            metrics=metrics,
            score=score,
            checkpoint=make_identity(run, samples, training_seconds=7200 * samples / SAMPLES[-1]),
            effective_rank=46 + seed,  # the end of its curve
            rank_curve=[{'epoch': epoch, 'effective_rank': 50 - 2 * epoch + seed} for epoch in range(3)],
        )
        record['point'] |= changes.pop('point', {})
        key = f'{record["key"]}-{record["point"]["learning_rate"]}'
        if 'error' in changes:
            record = make_finetuning(task, run, samples, seed, point=record['point'], **changes)
        record |= {**changes, 'key': key}
        self.write('finetuning', key, record)

    def add_rank(self, run: str, lead: int = 0) -> None:
        layers = [make_layer(layer, lead) for layer in range(LAYERS)]
        record = make_rank(run, SAMPLES[-1], layers=layers)
        self.write('rank', f'rank-{run}', record)

    def add_everything(self, seeds=SEEDS, pretraining_seeds=PRETRAINING_SEEDS, models=MODELS) -> None:
        """MAE-LM 60 + seed, RoBERTa 56 + seed, ablations and δ between.

        Checkpoints of MAE-LM are at 52, 58 and 60, of RoBERTa at 46, 52 and 56.

        Every run of the n-th pretraining seed is shifted by the n-th of SHIFTS, and the m-th model's by 0.0001·m·n
        more, so that differences have a spread.
        """
        names = dict.fromkeys(model.run_name(self.scale) for model in models)
        mnli, roberta = tasks_of(self.scale, (Role.mnli,))[0], ROBERTA.run_name(self.scale)
        for nth, (pretraining_seed, shift) in enumerate(zip(pretraining_seeds, SHIFTS, strict=False)):
            for number, name in enumerate(names):
                run = f'{name}-s{pretraining_seed}'
                self.add_run(run)
                base = 0.60 if name == self.scale else 0.56 if name == roberta else 0.59
                base += shift - 0.001 * number + 0.0001 * number * (nth - 1)
                for task in tasks_of(self.scale, (Role.glue, Role.squad)):
                    for seed in seeds:
                        self.add_score(run, task, seed, base + seed / 100)
            for name, scores in ((self.scale, (0.52, 0.58)), (roberta, (0.46, 0.52))):
                for samples, score in zip(SAMPLES[:-1], scores, strict=True):
                    for seed in seeds:
                        self.add_score(f'{name}-s{pretraining_seed}', mnli, seed, score + shift + seed / 100, samples)
            leads = {self.scale: 6 + nth, roberta: 0}
            leads |= {m.run_name(self.scale): 5 - round(4 * d) for d, m in DELTAS if d and m in models}
            for name, lead in leads.items():
                self.add_rank(f'{name}-s{pretraining_seed}', lead)


def build(archive: Archive) -> dict:
    """Rows by artefact, row, column and x."""
    tables = build_tables(load_evidence(archive.results / archive.scale, archive.scale))
    return {(r.artefact, r.row, r.column, r.x): r for rows in tables.values() for r in rows}


@pytest.fixture
def archive(tmp_path: Path):
    return lambda scale='medium': Archive(tmp_path / 'results', scale)


@pytest.fixture
def full(archive) -> Archive:
    made = archive('medium')
    made.add_everything()
    return made
