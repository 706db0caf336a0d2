"""Software, hardware and recipe of a run. Imports no torch."""

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from maelm_composer import __version__
from maelm_composer.recipe import hash_config

PACKAGES = ('torch', 'mosaicml', 'mosaicml-streaming', 'transformers', 'tokenizers', 'numpy')


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra='forbid', strict=True))
class Provenance:
    maelm_composer: str  # version
    git_revision: str | None  # of the source, with ``-dirty`` if files differ from it; None outside a checkout
    python: str
    packages: dict[str, str]  # name -> version
    platform: str
    cpu: str
    cpu_count: int | None
    recipe_hash: str


def collect_provenance(config: Any) -> Provenance:
    """The provenance of a run of ``config`` on this machine."""
    return Provenance(
        maelm_composer=__version__,
        git_revision=_git_revision(),
        python=platform.python_version(),
        packages={name: importlib.metadata.version(name) for name in PACKAGES},
        platform=platform.platform(),
        cpu=_cpu_name(),
        cpu_count=os.cpu_count(),
        recipe_hash=hash_config(config),
    )


def _git_revision() -> str | None:
    root = Path(__file__).resolve().parent.parent
    if not (root / '.git').exists():
        return None
    command = ['git', '-C', str(root), 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):  # not Linux
        if name := re.search(r'^model name\s*:(.*)', Path('/proc/cpuinfo').read_text(encoding='utf-8'), re.MULTILINE):
            return name[1].strip()
    return platform.processor()
