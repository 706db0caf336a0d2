"""Measurements of several contenders as rows to record and as a Markdown table."""

import statistics
from dataclasses import dataclass
from typing import Any

from bench.contenders import Figures, Shape
from maelm_composer.config import Precision

HF_EAGER, HF_COMPILED = 'Hugging Face RoBERTa, eager', 'Hugging Face RoBERTa, compiled'
HF_MEMORY_KEPT = 'Hugging Face RoBERTa, memory kept, eager'
PRODUCTS = 'matrix products of our RoBERTa alone'
# The contenders to which all are compared: suffix of the recorded column -> contender, heading of the printed column.
PEERS = {
    'hugging_face_eager': (HF_EAGER, '× HF eager'),
    'hugging_face_memory_kept': (HF_MEMORY_KEPT, '× memory kept'),
    'hugging_face_compiled': (HF_COMPILED, '× HF compiled'),
}


@dataclass(frozen=True)
class Measured:
    shape: Shape
    precision: Precision
    figures: dict[str, Figures]  # by contender; PRODUCTS counts as one

    def describe(self, name: str) -> dict[str, Any]:
        """The row of one contender. Hugging Face's models have no FLOP/s: our cost model does not describe them."""
        shape, figures = self.shape, self.figures[name]
        steps, seconds = figures.list_quiet_steps(), figures.step
        row = {
            'contender': name,
            'precision': self.precision.name,
            'layers': shape.layers,
            'hidden_size': shape.size,
            'length': shape.length,
            'batch': shape.batch,
            'milliseconds_per_step': round(seconds * 1e3, 2),
            'tokens_per_second': round(shape.tokens / seconds, 1),
        }
        for column, (peer, _) in PEERS.items():
            if peer in self.figures:
                row[f'times_{column}'] = round(self.figures[peer].step / seconds, 3)
        if PRODUCTS in self.figures:
            products, flops = self.figures[PRODUCTS], figures.flops
            row['gflops_per_second'] = round(flops / seconds / 1e9, 1) or None
            row['share_of_matrix_product_peak'] = round(flops / seconds * products.step / products.flops, 3) or None
        row['peak_step_mebibytes'] = round(figures.peak_bytes / 2**20) or None
        row['steps'] = len(steps)
        row['share_of_others'] = round(statistics.median(share for share, _ in steps), 3)
        return row

    def compare_models(self) -> list[str]:
        """Lines that compare MAE-LM with RoBERTa in time and FLOPs of a step."""
        lines = []
        for kind in ('eager', 'compiled'):
            ours, baseline = (self.figures.get(f'our {name}, {kind}') for name in ('MAE-LM', 'RoBERTa'))
            if ours and baseline:
                step, flops = ours.step / baseline.step, ours.flops / baseline.flops
                lines.append(f'MAE-LM / RoBERTa, {kind}: {step:.3f} of a step, {flops:.3f} of its FLOPs')
        return lines


def format_table(measured: Measured) -> str:
    """Markdown: one line a contender."""
    rows = [measured.describe(name) for name in measured.figures]
    peers = [(f'times_{column}', title) for column, (_, title) in PEERS.items() if f'times_{column}' in rows[0]]
    products = ['GFLOP/s', 'of products'] if PRODUCTS in measured.figures else []
    titles = ['ms/step', 'tokens/s', *(title for _, title in peers), *products, 'MiB']
    lines = [[f'{measured.precision.name}, {measured.shape}', *titles], ['---', *('---:' for _ in titles)]]
    for row in rows:
        cells = [f'{row["milliseconds_per_step"]:,.0f}', f'{row["tokens_per_second"]:,.0f}']
        cells += [f'{row[column]:.2f}' for column, _ in peers]
        if products:
            speed, share = row['gflops_per_second'], row['share_of_matrix_product_peak']
            cells += [f'{speed:,.0f}', f'{share:.0%}'] if speed else ['', '']
        memory = row['peak_step_mebibytes']
        lines.append([row['contender'], *cells, f'{memory:,}' if memory else ''])
    text = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
    busiest = max(row['share_of_others'] for row in rows)
    return text + f'\n\nOther processes used up to {busiest:.0%} of the cores during these steps.\n'
