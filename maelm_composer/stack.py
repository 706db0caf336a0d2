"""Which torch was tested, and what a machine with its own torch lacks. Needs the standard library alone.

``python -m maelm_composer.stack constraints-latest.txt`` prints what ``make STACK=own`` has to install: what is there
already stays as it is.
"""

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from maelm_composer.errors import InputError, one_line_errors

TESTED_TORCH = ('2.7', '2.11', '2.15')  # docs/versions.md
ENGINES = ('mosaicml', 'mosaicml-streaming')  # of these we need one version, whatever is there
MADE_FOR = {  # what comes with a package or goes with one version of it: taken from where the package is
    'torch': re.compile(r'nvidia-|cuda-|triton$'),
    'transformers': re.compile(r'tokenizers$|huggingface-hub$|hf-xet$|safetensors$'),
}


def warn_of_untested_torch() -> None:
    """One line on standard error, of rank 0 alone, where the installed torch is none that was tested."""
    warning = describe_untested(importlib.metadata.version('torch'))
    if warning and os.environ.get('RANK', '0') == '0':
        print(f'warning: {warning}', file=sys.stderr, flush=True)


def describe_untested(torch: str) -> str | None:
    """What to know of this version of torch, None where it was tested."""
    if '.'.join(torch.split('.')[:2]) in TESTED_TORCH:
        return None
    return f'torch {torch} was not tested, {", ".join(TESTED_TORCH)} were: `make test STACK=own` tests it'


def find_missing(lock: Sequence[str], installed: Mapping[str, str]) -> list[str]:
    """The requirements that a machine lacks, and Composer and Streaming, which pip passes over where they are right.

    Args:
        lock: lines ``name==version``, or comments.
        installed: version by normalised name. Where torch is there without torchvision, which Composer imports, the one
            that was made for it is asked for.

    Raises:
        InputError: a line is neither.
    """
    missing = []
    for line in lock:
        if not line.strip() or line.startswith('#'):
            continue
        name, has_version, version = line.strip().partition('==')
        if not has_version:
            raise InputError(f'{line.strip()!r} is not a line of the form name==version')
        key = normalize_name(name)
        owner = next((owner for owner, pattern in MADE_FOR.items() if pattern.match(key)), None)
        if (owner or key) in installed and key not in ENGINES:
            continue
        if key == 'torchvision' and 'torch' in installed:
            version = choose_torchvision(installed['torch'], version)
        missing.append(f'{name}=={version}')
    return missing


def choose_torchvision(torch: str, latest: str) -> str:
    """Version of torchvision for this torch: 0.15 for 2.0, then step by step; from 2.14 on one is good for all."""
    minor = int(torch.split('.')[1])
    return latest if minor >= 14 else f'0.{minor + 15}.*'


def normalize_name(name: str) -> str:
    """As packages are compared: PEP 503."""
    return re.sub(r'[-_.]+', '-', name).lower()


def main(arguments: list[str]) -> None:
    with one_line_errors():
        if len(arguments) != 1:
            raise InputError('usage: python -m maelm_composer.stack constraints-latest.txt')
        found = [(each.metadata['Name'], each.version) for each in importlib.metadata.distributions()]
        there = {normalize_name(name): version for name, version in found if name}  # half a removed one has no name
        print('\n'.join(find_missing(Path(arguments[0]).read_text(encoding='utf-8').splitlines(), there)))


if __name__ == '__main__':
    main(sys.argv[1:])
