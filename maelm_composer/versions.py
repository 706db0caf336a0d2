"""The tested versions of torch, and the packages that a machine with its own torch lacks.

``python -m maelm_composer.versions constraints-latest.txt`` prints the requirements that ``make STACK=own`` installs;
packages that are installed already stay as they are. This module needs only the standard library.
"""

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from maelm_composer.errors import InputError, one_line_errors

TESTED_TORCH = ('2.7', '2.11', '2.15')  # docs/versions.md
ENGINES = ('mosaicml', 'mosaicml-streaming')  # only one version of these works, whatever is installed
MADE_FOR = {  # packages made for one version of another package; they are kept where the other package is installed
    'torch': re.compile(r'nvidia-|cuda-|triton$'),
    'transformers': re.compile(r'tokenizers$|huggingface-hub$|hf-xet$|safetensors$'),
}


def warn_of_untested_torch() -> None:
    """Print a warning on standard error (rank 0 only) if the installed version of torch was not tested."""
    warning = describe_untested(importlib.metadata.version('torch'))
    if warning and os.environ.get('RANK', '0') == '0':
        print(f'warning: {warning}', file=sys.stderr, flush=True)


def describe_untested(torch: str) -> str | None:
    """A warning about this version of torch; None if it was tested."""
    if '.'.join(torch.split('.')[:2]) in TESTED_TORCH:
        return None
    return f'torch {torch} was not tested, {", ".join(TESTED_TORCH)} were: `make test STACK=own PYTHON=...` tests it'


def find_missing(lock: Sequence[str], installed: Mapping[str, str]) -> list[str]:
    """The requirements of ``lock`` that a machine lacks.

    Composer and Streaming are always included (pip skips them if their versions are right). If torch is installed but
    torchvision, which Composer imports, is not, the torchvision for that torch is included.

    Args:
        lock: lines of the form ``name==version``, or comments.
        installed: versions by normalised name.

    Raises:
        InputError: a line has another form.
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
    """The torchvision for a version of torch: 0.15 for 2.0, 0.16 for 2.1, and so on; ``latest`` from 2.14 on."""
    minor = int(torch.split('.')[1])
    return latest if minor >= 14 else f'0.{minor + 15}.*'


def normalize_name(name: str) -> str:
    """The normalised name of a package (PEP 503)."""
    return re.sub(r'[-_.]+', '-', name).lower()


def main(arguments: list[str]) -> None:
    with one_line_errors():
        if len(arguments) != 1:
            raise InputError('usage: python -m maelm_composer.versions constraints-latest.txt')
        found = [(each.metadata['Name'], each.version) for each in importlib.metadata.distributions()]
        there = {normalize_name(name): version for name, version in found if name}  # a partly removed one has no name
        print('\n'.join(find_missing(Path(arguments[0]).read_text(encoding='utf-8').splitlines(), there)))


if __name__ == '__main__':
    main(sys.argv[1:])
