"""What a result needs to be believed: where it came from, and files that are whole or not there. Imports no torch."""

import base64
import importlib.metadata
import json
import os
import platform
import subprocess
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maelm_composer import __version__
from maelm_composer.recipe import hash_config

PACKAGES = ('torch', 'mosaicml', 'mosaicml-streaming', 'transformers', 'tokenizers', 'numpy')


def collect_provenance(config: Any) -> dict[str, Any]:
    """Versions, source revision, hardware and the recipe's hash, JSON-ready."""
    return {
        'maelm_composer': __version__,
        'git_revision': _git_revision(),
        'python': platform.python_version(),
        'packages': {name: importlib.metadata.version(name) for name in PACKAGES},
        'platform': platform.platform(),
        'cpu': _cpu_name(),
        'cpu_count': os.cpu_count(),
        'recipe_hash': hash_config(config),
    }


def pack_numbers(values: Sequence[float] | np.ndarray) -> str:
    """Three significant digits of each, as text: little-endian half precision, zlib, base64."""
    return base64.b64encode(zlib.compress(np.asarray(values, '<f2').tobytes(), 9)).decode()


def unpack_numbers(text: str) -> np.ndarray:
    """What :func:`pack_numbers` packed, in double precision."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), '<f2').astype(float)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write ``record`` so that a reader sees the old file or the new one, never half of one."""
    write_text(path, json.dumps(record, indent=2) + '\n')


def write_text(path: Path, text: str) -> None:
    """As :func:`write_json`, for text."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As :func:`write_json`, for bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: runs on several machines may write the same file of one shared folder.
    temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex}')
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def give_usual_mode(path: Path) -> None:
    """Readable as any file that this process writes; safetensors lets nobody but the owner read its files."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _git_revision() -> str | None:
    """The source's commit, with ``-dirty`` where files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / '.git').exists():
        return None
    command = ['git', '-C', str(root), 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
    except OSError:
        lines = []
    names = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.processor()
