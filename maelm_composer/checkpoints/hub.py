"""Uploading exported folders to the Hugging Face Hub, or to the server that ``HF_ENDPOINT`` names."""

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import HfApi

from maelm_composer.checkpoints.export import MAIN
from maelm_composer.errors import InputError


def push(revisions: Mapping[str, Path], repo: str) -> str:
    """Upload each folder to the branch of its name; returns the address of the repository.

    A repository that does not exist is created as a private one, since the card's licence is yet to be filled in.

    Args:
        revisions: as :func:`maelm_composer.checkpoints.export.export` returns them.
        repo: ``user/name`` or ``organisation/name``.

    Raises:
        InputError: the server cannot be reached or refuses. The exported folders and the uploaded files stay.
    """
    api, revision = HfApi(), MAIN
    try:
        address = str(api.create_repo(repo, private=True, exist_ok=True))
        for revision, folder in revisions.items():
            if revision != MAIN:
                api.create_branch(repo, branch=revision, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=folder, revision=revision)
    except Exception as error:  # the classes differ between releases of huggingface_hub
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise InputError(
            f'{revisions[revision]} is exported, but not pushed to {repo} at {api.endpoint}: {reason}. Log in with '
            f'`hf auth login` or HF_TOKEN, then upload it with `hf upload {repo} {revisions[revision]} . --revision '
            f'{revision}`{", and the other checkpoints likewise" if len(revisions) > 1 else ""}'
        ) from None
    return address
