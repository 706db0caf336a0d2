"""Data, training, fine-tuning, analysis and reports of MAE-LM."""

# Each command imports its own modules, so that `maelm --help` is immediate.

import glob
import platform
import re
import sys
import time
from dataclasses import replace
from importlib import metadata
from os.path import expanduser
from pathlib import Path
from typing import Annotated

import typer

from maelm_composer import __version__
from maelm_composer.config import CorpusConfig, FinetuningConfig, Implementation, Precision
from maelm_composer.errors import InputError, one_line_errors
from maelm_composer.recipe import load_config, split_arguments
from maelm_composer.versions import warn_of_untested_torch

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


def _complete_recipe(context: typer.Context, incomplete: str) -> list[str]:
    """The recipes and the keys that begin with ``incomplete``; the shell adds the other files."""
    from maelm_composer.keys import list_keys
    from maelm_composer.shipped import list_recipes

    kinds = {
        'sweep': ['finetuning'],
        'compare': ['finetuning'],
        'train': ['pretraining', 'finetuning'],
    }.get(str(context.info_name), ['corpus'])
    keys = [f'{key.name}=' for kind in kinds for key in list_keys(kind) if key.name.replace('.', '_').isidentifier()]
    files = [*list_recipes(), *glob.glob(f'{glob.escape(incomplete)}*.yaml')]
    return [word for word in dict.fromkeys([*files, *keys]) if word.startswith(incomplete)]


Recipe = Annotated[
    list[str],
    typer.Argument(
        metavar='RECIPE.yaml... [key=value...]',
        help='Recipe files, merged in order, and values that replace theirs. A file that does not exist here, as '
        'yamls/demo.yaml, is that of the package.',
        autocompletion=_complete_recipe,
    ),
]
Scale = Annotated[str, typer.Option(help='A file of yamls/suite without its suffix, as demo, ladder, small or base.')]


def main() -> None:
    """Entry point; an InputError becomes one line on standard error and exit code 2."""
    home = expanduser('~/')  # for the ~ of --folder=~/runs and of a quoted glob, which bash leaves as it is
    arguments = [re.sub('^(--[a-z-]+=)?~/', lambda found: (found[1] or '') + home, text) for text in sys.argv[1:]]
    with one_line_errors():
        app(arguments, prog_name='maelm')


def _tell_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f'maelm-composer {__version__}')
        raise typer.Exit


@app.callback()
def _begin(
    version: Annotated[bool, typer.Option('--version', callback=_tell_version, is_eager=True, help='Version.')] = False,
) -> None:
    pass


@app.command()
def keys(
    kind: Annotated[str, typer.Argument(help='corpus, pretraining, finetuning or suite.')] = 'pretraining',
    section: Annotated[str, typer.Argument(help='Only this key and those below it, as model.decoder.')] = '',
    markdown: Annotated[bool, typer.Option('--markdown', help='Every kind, as docs/keys.md.')] = False,
) -> None:
    """List the keys of a recipe with their values, defaults and meanings."""
    from maelm_composer.keys import format_markdown, print_keys

    if markdown:
        print(format_markdown(), end='')
    else:
        print_keys(kind, section)


@app.command()
def tokenizer(recipe: Recipe) -> None:
    """Train the vocabulary of a data recipe (yamls/data/)."""
    config = load_config(CorpusConfig, *split_arguments(recipe))
    from maelm_composer.data.tokenizer import build_tokenizer

    start = time.monotonic()
    if build_tokenizer(config):
        print(f'tokenizer: {config.tokenizer.vocab_size:,} pieces in {time.monotonic() - start:.0f} s')
    else:
        print('tokenizer: already there; nothing to do')
    print(f'tokenizer: {config.remote}/tokenizer')


@app.command()
def shards(
    recipe: Recipe,
    workers: Annotated[int | None, typer.Option(min=1, help='Parallel processes; default: one for each core.')] = None,
) -> None:
    """Convert the documents of a data recipe into packed MDS shards. After an interruption the same command resumes."""
    config = load_config(CorpusConfig, *split_arguments(recipe))
    from maelm_composer.data.shards import build_shards

    start = time.monotonic()
    manifest, was_made = build_shards(config, num_workers=workers)
    seconds = time.monotonic() - start
    for name, split in manifest.splits.items():
        print(
            f'{name}: {split.documents:,} documents, {split.tokens:,} tokens in {split.rows:,} rows of '
            f'{manifest.max_seq_len}, {split.fill_rate:.2%} full'
        )
    if was_made:
        total = sum(split.tokens for split in manifest.splits.values())
        print(f'shards: {config.remote} in {seconds:.0f} s, {total / seconds:,.0f} tokens/s')
    else:
        print(f'shards: {config.remote} is already complete, from the same recipe; nothing to do')


@app.command()
def train(recipe: Recipe) -> None:
    """Pretrain, or fine-tune on one task (yamls/finetune/), in one process; `maelm keys` lists the keys of a recipe.

    On several GPUs: composer -n 8 -m maelm_composer.train RECIPE.yaml... [key=value...]
    """
    from maelm_composer.train import main as run

    run(recipe)


@app.command()
def runs(
    folders: Annotated[list[str], typer.Argument(metavar='FOLDER...', help='Save folders, local or s3://.')],
) -> None:
    """Compare pretraining runs: status, validation loss, steps, speed. Folders without a run are listed at the end."""
    from maelm_composer.training.run_table import print_runs

    print_runs(folders)


@app.command()
def sweep(recipe: Recipe) -> None:
    """Fine-tune a checkpoint on the tasks of a recipe (yamls/finetune/): a grid, then its best point on more seeds."""
    config = load_config(FinetuningConfig, *split_arguments(recipe))
    warn_of_untested_torch()
    from maelm_composer.sweep.run import sweep_and_print
    from maelm_composer.sweep.search import refuse_searched

    refuse_searched(config, recipe)
    raise typer.Exit(sweep_and_print(config))


Checkpoint = Annotated[
    str,
    typer.Argument(help='A run folder or a checkpoint, local or s3://, a fine-tuned model, or a Hugging Face encoder.'),
]


@app.command()
def compare(first: Checkpoint, second: Checkpoint, recipe: Recipe) -> None:
    """Fine-tune two encoders by one recipe (yamls/finetune/) and print the differences of their scores."""
    files, values = split_arguments(recipe)
    if given := [value for value in values if value.startswith('checkpoint=')]:
        raise InputError(f'{given[0]}: the two encoders are compared; leave this out')
    # A name is no YAML: a folder may be called 'run #2'.
    config = load_config(FinetuningConfig, files, [*values, 'checkpoint=unknown'])
    warn_of_untested_torch()
    from maelm_composer.suite.compare import compare_and_print
    from maelm_composer.sweep.search import refuse_searched

    refuse_searched(config, recipe)
    raise typer.Exit(compare_and_print(*(replace(config, checkpoint=name) for name in (first, second))))


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help='A run folder, local or s3://, or a fine-tuned model.')],
    folder: Annotated[str, typer.Argument(help='Target folder: empty, or not existing yet.')],
    all_checkpoints: Annotated[bool, typer.Option(help='Every checkpoint of the run, each in a subfolder.')] = False,
    push: Annotated[str | None, typer.Option(metavar='REPO', help='Upload it to this repository of the Hub.')] = None,
) -> None:
    """Write an encoder, the baseline with its head, or a fine-tuned model as a Hugging Face folder."""
    from maelm_composer.checkpoints.export import export as write
    from maelm_composer.checkpoints.export import push as upload

    if push is not None and push.count('/') != 1:
        raise InputError(f'--push {push}: write it as user/name or organisation/name')
    revisions = write(checkpoint, folder, all_checkpoints)
    print(f'exported: {folder}')
    if push is not None:
        print(f'pushed: {upload(revisions, push)}')


@app.command()
def fill(
    checkpoint: Annotated[str, typer.Argument(help='A run folder of pretraining or a checkpoint, local or s3://.')],
    texts: Annotated[list[str], typer.Argument(metavar='TEXT...', help='Each with one [MASK] or more.')],
    top_k: Annotated[int, typer.Option(help='How many tokens are shown for a [MASK].')] = 5,
) -> None:
    """Predict the [MASK]s of texts with encoder, decoder and head of a pretraining checkpoint."""
    from maelm_composer.checkpoints.mask_predictor import MaskPredictor
    from maelm_composer.console import begin_table, open_console

    predictor = MaskPredictor.from_checkpoint(checkpoint)
    found = predictor.predict(texts, top_k)
    decode = predictor.tokenizer.batch_decode
    table = begin_table('text', right=('[MASK] at token',), last=('most probable',))
    for number, position, ids, shares in zip(*(tensor.tolist() for tensor in found), strict=True):
        tokens = decode([[token] for token in ids])
        shown = '  '.join(f'{token!r} {share:.3f}' for token, share in zip(tokens, shares, strict=True))
        table.add_row(texts[number], str(position), shown)
    open_console().print(table)


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help='Folder of a fine-tuned model (saves_model=true), local or s3://.')],
    rows: Annotated[Path, typer.Argument(help="A .parquet, .csv or .jsonl file with the task's text columns.")],
    predictions: Annotated[Path, typer.Argument(help='Target: .jsonl, .tsv (GLUE submission), .json (SQuAD 2.0).')],
    precision: Annotated[Precision, typer.Option(help='Precision of the forward passes.')] = Precision.fp32,
    threshold: Annotated[float, typer.Option(help='SQuAD 2.0: no answer above this null score difference.')] = 0.0,
    batch_size: Annotated[int, typer.Option(min=1, help='Rows in one forward pass.')] = 64,
) -> None:
    """Predict the rows of a file with a fine-tuned model."""
    from maelm_composer.finetuning.predict import predict_file

    count = predict_file(model, rows, predictions, precision, threshold, batch_size)
    print(f'{count:,} predictions: {predictions}')


@app.command()
def rank(
    checkpoint: Checkpoint,
    data: Annotated[str | None, typer.Option(help='Folder of shards; default: those of the pretraining.')] = None,
    text: Annotated[list[str] | None, typer.Option(help='Text files in place of shards: a glob; repeatable.')] = None,
    text_column: Annotated[str, typer.Option(help='Column of the text in .jsonl and .parquet files.')] = 'text',
    max_tokens: Annotated[int, typer.Option(help='Number of real tokens to read.')] = 5_000_000,
    centered: Annotated[bool, typer.Option(help='Subtract the mean row first, unlike the paper.')] = False,
    precision: Annotated[Precision, typer.Option(help='Precision of the forward passes.')] = Precision.fp32,
    implementation: Annotated[Implementation, typer.Option(help='Code of the encoder.')] = Implementation.auto,
    folder: Annotated[str | None, typer.Option(help="Folder of the records; default: the run's own ranks/.")] = None,
) -> None:
    """Measure the effective rank of every layer, for inputs with and without [MASK]."""
    from maelm_composer.analysis.ranks import RankOptions, analyze_ranks, find_rank_folder, print_ranks

    options = RankOptions(max_tokens=max_tokens, centered=centered, precision=precision)
    record = analyze_ranks(
        checkpoint,
        options,
        data=data,
        text=text or (),
        text_column=text_column,
        implementation=implementation,
        folder=folder,
    )
    print_ranks(record)
    print(f'record: {Path(folder or find_rank_folder(checkpoint), record.key)}.json')


@app.command()
def report(
    scale: Scale, results: Annotated[Path, typer.Option(help='Folder of the recorded results.')] = Path('results')
) -> None:
    """Rebuild the tables, figures and page of a scale from its records. Needs no torch."""
    from maelm_composer.reporting import report as reporting

    page, tables = reporting.report(scale, results)
    reporting.print_tables(scale, tables)
    print(f'report: {page}')


@app.command()
def suite(
    scale: Scale,
    artefacts: Annotated[str, typer.Option(help='As table1,figure3; default: all of the scale.')] = '',
    plan: Annotated[bool, typer.Option('--plan', help='Print the missing steps and their costs; run nothing.')] = False,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="With --plan: how many; default: this machine's, or 1 with --gpu.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help='With --plan: their model, such as h100.')] = None,
    settings: Annotated[Path | None, typer.Option(help="File of keys of yamls/suite/, over the scale's.")] = None,
    work: Annotated[Path | None, typer.Option(help='Folder of runs; default: runs/suite/SCALE.')] = None,
    results: Annotated[Path, typer.Option(help='Folder of records, tables and figures.')] = Path('results'),
) -> None:
    """Make the tables and figures of a scale, and the runs that they need; the same command resumes."""
    from maelm_composer.suite.cost import describe_device
    from maelm_composer.suite.plan import plan_suite, print_plan
    from maelm_composer.suite.steps import choose_artefacts, load_suite

    loaded = load_suite(scale, work, results, settings)
    chosen = choose_artefacts(loaded, artefacts)
    if plan:
        device = describe_device(gpu, gpus)
        print_plan(loaded, plan_suite(loaded, chosen, device), device)
        return
    if gpus or gpu:
        raise InputError('--gpus and --gpu are for --plan: a suite runs on the devices of this machine')
    warn_of_untested_torch()
    from maelm_composer.suite.run import make_and_print

    raise typer.Exit(make_and_print(loaded, chosen))


@app.command()
def plan(
    gpus: Annotated[int, typer.Option(min=1, help='Number of GPUs.')],
    gpu: Annotated[str, typer.Option(help='Model, such as h100.')],
    hours: Annotated[float, typer.Option(min=0, help='Hours on all GPUs.')],
) -> None:
    """Print the GPU-hours of every table and figure at five scales, and whether they fit a budget. Runs nothing."""
    from maelm_composer.suite.plan import print_budget

    print_budget(gpus, gpu, hours)


@app.command()
def doctor(clean: Annotated[bool, typer.Option(help='Remove the shared memory of ended runs.')] = False) -> None:
    """Show versions, devices, and shared memory left behind by ended runs."""
    import torch

    from maelm_composer.device import find_dead_segments
    from maelm_composer.processor import count_cores

    print(f'python {platform.python_version()}, {platform.platform()}\nmaelm-composer {__version__}')
    for package in ('torch', 'mosaicml', 'mosaicml-streaming', 'transformers', 'tokenizers', 'ray'):
        print(f'{package} {metadata.version(package)}')
    print(f'{count_cores()} cores; CUDA: {torch.cuda.is_available()}')
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        print(f'cuda:{index} {device.name}, {device.total_memory / 2**30:.0f} GiB')
    dead = find_dead_segments()
    if clean:
        for path in dead:
            path.unlink(missing_ok=True)
    print(f'left behind by ended runs: {len(dead)} shared-memory segments and lock files{", removed" if clean else ""}')
    if dead and not clean:
        print('dead segments take memory, nothing else; `maelm doctor --clean` removes them')


if __name__ == '__main__':
    main()
