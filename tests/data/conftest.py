"""A small corpus with the shapes that matter: short and long lines, documents of one line and of many."""

import contextlib
import functools
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from maelm_composer.cluster import connect_ray
from maelm_composer.config import CorpusConfig, SourceConfig, SourceKind, TokenizerConfig

WORDS = 'the sea wind ship of night and a captain saw great white whale rose under moon to old men sing from harbour'


def write_documents(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    words = WORDS.split() + [a + b for a in WORDS.split() for b in WORDS.split()]
    return [
        '\n'.join(
            ' '.join(generator.choices(words, k=generator.choice([1, 3, 8, 30])))
            for _ in range(generator.randint(1, 9))
        )
        for _ in range(count)
    ]


def write_recipe(folder: Path) -> CorpusConfig:
    (folder / 'text.txt').write_text('\n\n'.join(write_documents(300)))
    return CorpusConfig(
        remote=str(folder / 'remote'),
        max_seq_len=32,
        validation_fraction=0.1,
        documents_per_task=60,
        sources=[SourceConfig(kind=SourceKind.files, paths=[str(folder / '*.txt')], note='in place of a library')],
        tokenizer=TokenizerConfig(vocab_size=320),
    )


@pytest.fixture
def recipe(tmp_path: Path) -> CorpusConfig:
    """A recipe over 300 documents in tmp_path/text.txt; nothing is converted yet."""
    return write_recipe(tmp_path)


def s3_at(url: str) -> dict[str, str]:
    """The environment in which ours find the S3 server at ``url``, and have some credentials."""
    key = {'AWS_ACCESS_KEY_ID': 'someone', 'AWS_SECRET_ACCESS_KEY': 'secret'}
    return {'S3_ENDPOINT_URL': url, 'AWS_DEFAULT_REGION': 'us-east-1', **key}


@pytest.fixture(scope='session')
def s3_server() -> Iterator[str]:
    """A real HTTP S3 endpoint on loopback, where ours look for it; gives its URL."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_at(f'http://{host}:{port}').items():
            patch.setenv(name, value)
        yield f'http://{host}:{port}'
    server.stop()


@pytest.fixture
def s3(s3_server: str) -> str:
    """The endpoint with a bucket named ``corpus``, which a test of another server in this process may have removed."""
    import boto3

    boto3.client('s3', endpoint_url=s3_server).create_bucket(Bucket='corpus')
    return s3_server


@pytest.fixture(scope='module')
def ray_here(s3_server: str) -> Iterator[None]:
    """One local Ray for a file of tests, as starting it takes seconds; its workers inherit where S3 is."""
    with connect_ray(num_cpus=2):
        yield


@pytest.fixture(scope='session')
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """``build()``: a folder with the tokenizer and shards of ``recipe``, made by the first call.

    By a call, and so after the fixtures of its file: a Ray of ``ray_here`` is then used, and no other one is started.
    """

    @functools.cache
    def build_once() -> str:
        from maelm_composer.data.shards import build_shards
        from maelm_composer.data.tokenizer import build_tokenizer

        config = write_recipe(tmp_path_factory.mktemp('built'))
        build_tokenizer(config)
        with connect_ray(num_cpus=2):
            build_shards(config)
        return config.remote

    return build_once


@pytest.fixture
def shards(recipe: CorpusConfig, build: Callable[[], str]) -> CorpusConfig:
    """The same recipe, its tokenizer and shards made: a copy, which a test may change."""
    from maelm_composer.data.manifest import load_manifest, save_manifest

    shutil.copytree(build(), recipe.remote)
    manifest = load_manifest(recipe.remote)
    manifest.sources[0]['paths'] = recipe.sources[0].paths  # the one thing that depends on the folder
    save_manifest(recipe.remote, manifest)
    return recipe


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unpacked shards stay in tmp_path; no S3 client outlives the environment that it was made in."""
    from maelm_composer.data import storage

    monkeypatch.setenv('MAELM_CACHE', str(tmp_path / 'cache'))
    storage._s3_client.cache_clear()
    yield
    storage._s3_client.cache_clear()


@contextlib.contextmanager
def serve_s3(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """A server on loopback that answers a GET as told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answer(self.path)
            self.send_response(status)
            self.send_header('Content-Length', str(len(content)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # whoever asked has ended
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()
