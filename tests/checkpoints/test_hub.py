"""Pushing an export, by the real huggingface_hub, to a server that speaks the part of the Hub's protocol it uses."""

import base64
import hashlib
import json
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from maelm_composer import cli
from tests.tiny import CHECKPOINT, find_free_port

REPO, TOKEN, EARLIER = 'someone/tiny', 'hf_secret', 'samples-000000000032'


class Hub(ThreadingHTTPServer):
    """One repository. Files of model weights are uploaded as large ones, by their hash, before they are committed."""

    def __init__(self) -> None:
        super().__init__(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self.server_port}'
        self.created: list[dict] = []
        self.objects: dict[str, bytes] = {}
        self.branches: dict[str, dict[str, bytes]] = {}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_PUT(self) -> None:
        content = self.read()
        oid = self.path.rpartition('/')[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.objects[oid] = content
        self.answer({})

    def do_POST(self) -> None:
        hub, content = self.server, self.read()
        if self.headers['Authorization'] != f'Bearer {TOKEN}':
            self.answer({'error': 'Invalid username or password.'}, 401)
            return
        where, _, revision = unquote(self.path).rpartition('/')
        if self.path == '/api/repos/create':
            hub.created.append(json.loads(content))
            hub.branches.setdefault('main', {})
            self.answer({'url': f'{hub.url}/{REPO}'}, 409 if len(hub.created) > 1 else 200)
        elif self.path == '/api/validate-yaml':
            self.answer({'errors': [], 'warnings': []})
        elif where == f'/api/models/{REPO}/branch':
            hub.branches.setdefault(revision, dict(hub.branches['main']))
            self.answer({})
        elif where == f'/api/models/{REPO}/preupload':
            names = [file['path'] for file in json.loads(content)['files']]
            modes = {name: 'lfs' if name.endswith('.safetensors') else 'regular' for name in names}
            files = [{'path': name, 'uploadMode': mode, 'shouldIgnore': False} for name, mode in modes.items()]
            self.answer({'files': files})
        elif self.path == f'/{REPO}.git/info/lfs/objects/batch':
            objects = [
                wanted | {'actions': {'upload': {'href': f'{hub.url}/objects/{wanted["oid"]}'}}}
                for wanted in json.loads(content)['objects']
            ]
            self.answer({'transfer': 'basic', 'objects': objects})
        elif where == f'/api/models/{REPO}/commit':
            branch = hub.branches[revision]
            for line in map(json.loads, content.splitlines()):
                value = line['value']
                if line['key'] == 'file':
                    branch[value['path']] = base64.b64decode(value['content'])
                elif line['key'] == 'lfsFile':
                    branch[value['path']] = hub.objects[value['oid']]
            self.answer({'commitUrl': f'{hub.url}/{REPO}/commit/{"0" * 40}', 'commitOid': '0' * 40})
        else:
            self.answer({'error': f'no endpoint {self.path}'}, 404)

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers['Content-Length'] or 0))

    def answer(self, plain: dict, status: int = 200) -> None:
        content = json.dumps(plain).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub():
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run(checkpoint, tmp_path) -> str:
    """A run with two checkpoints."""
    folder = tmp_path / 'run'
    shutil.copytree(checkpoint, folder, symlinks=True)
    shutil.copytree(folder / CHECKPOINT, folder / EARLIER)
    (folder / EARLIER / 'progress.json').write_text(json.dumps({'samples': 32}))
    return str(folder)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def push(hub, run, tmp_path, monkeypatch, capsys):
    """``push('exported')``: the exit code, the lines printed and the errors of a push from this process."""
    monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', hub.url)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_DISABLE_XET', True)  # whose protocol the server lacks
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    monkeypatch.setenv('HF_TOKEN', TOKEN)
    monkeypatch.chdir(tmp_path)

    def call(folder: str, *options: str, repo: str = REPO) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, 'argv', ['maelm', 'export', run, folder, *options, '--push', repo])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        printed = capsys.readouterr()
        errors = [line for line in printed.err.splitlines() if line.startswith('error')]
        return caught.value.code or 0, printed.out.splitlines(), errors

    return call


def test_every_checkpoint_becomes_a_branch_and_the_newest_main(hub, push, tmp_path):
    lines = ['exported: exported', f'pushed: {hub.url}/{REPO}']
    assert push('exported', '--all-checkpoints') == (0, lines, [])
    (created,) = hub.created
    assert (created['name'], created['organization']) == ('tiny', 'someone')
    assert created.get('private') or created['visibility'] == 'private'  # by the version of huggingface_hub
    folders = {name: read_files(tmp_path / 'exported' / name) for name in (EARLIER, CHECKPOINT)}
    assert hub.branches == folders | {'main': folders[CHECKPOINT]}
    assert hub.branches[EARLIER]['README.md'] != hub.branches['main']['README.md']


def test_a_second_push_replaces_the_files_of_main_alone(hub, push, run, tmp_path):
    assert push('first')[0] == 0
    Path(run, 'latest').unlink()
    Path(run, 'latest').symlink_to(EARLIER)
    assert push('second')[0] == 0
    first, second = (read_files(tmp_path / name) for name in ('first', 'second'))
    assert first != second
    assert hub.branches == {'main': second}


def test_a_refused_or_unreachable_server_leaves_the_export(hub, push, tmp_path, monkeypatch):
    monkeypatch.setenv('HF_TOKEN', 'hf_wrong')
    code, _, (line,) = push('refused')
    assert code == 2
    for part in (
        '401',
        f'`hf upload {REPO} {tmp_path}/refused . --revision main --private`',
        f'not pushed to {REPO} at {hub.url}',
    ):
        assert part in line
    assert (tmp_path / 'refused/model.safetensors').exists()
    closed = f'http://127.0.0.1:{find_free_port()}'
    monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', closed)
    code, _, (line,) = push('unreachable')
    assert (code, f'at {closed}' in line) == (2, True)
    assert (tmp_path / 'unreachable/README.md').exists()
    assert hub.branches == {}


def test_a_repository_without_its_owner_is_refused_before_the_export(push, tmp_path):
    error = 'error: --push tiny: write it as user/name or organisation/name'
    assert push('never', repo='tiny') == (2, [], [error])
    assert not (tmp_path / 'never').exists()
