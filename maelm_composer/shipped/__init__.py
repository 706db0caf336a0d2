"""The recipes and the paper's numbers: links to the checkout's folders, of which a wheel has copies."""

from pathlib import Path

FOLDER = Path(__file__).parent


def find_shipped(path: str | Path) -> Path:
    """``path`` if it exists in the working folder or nowhere, else the shipped file or folder of that name."""
    shipped = FOLDER / path
    return shipped if shipped.exists() and not Path(path).exists() else Path(path)


def list_recipes() -> list[str]:
    """The paths of the shipped YAML files, as ``yamls/demo.yaml``."""
    return sorted(str(path.relative_to(FOLDER)) for path in (FOLDER / 'yamls').rglob('*.yaml'))
