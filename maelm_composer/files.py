"""Files that a reader finds whole or not at all. Imports no torch."""

import json
import os
import uuid
from pathlib import Path
from typing import Any


def write_json(path: Path, plain: dict[str, Any]) -> None:
    """Write ``plain`` as indented JSON; a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(plain, indent=2) + '\n')


def write_text(path: Path, text: str) -> None:
    """As :func:`write_json`, for text."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As :func:`write_json`, for bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The temporary name is unique: several machines may write the same file of a shared folder.
    temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex}')
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def apply_umask(path: Path) -> None:
    """Give ``path`` the mode of a newly created file; safetensors makes files that only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
