"""An S3 server on loopback that can be taken away and made to fail as object stores do."""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import requests
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

from tests.tiny import find_free_port

Respond = Callable[..., Any]
ERROR = '<Error><Code>{}</Code><Message>{}</Message></Error>'


class FaultyS3:
    """moto's S3 behind a switch.

    ``fault`` applies to every request while it is set: ``'500'``, ``'503'``, ``'403'``, ``'cut'`` (half an answer),
    ``'short'`` (half an answer that is said to be the whole), ``'damaged'`` (another byte in it), ``'late'`` (after
    three seconds), ``'unlisted'`` (a listing names nothing), ``'lost'`` (an upload is acknowledged, but not kept). With
    ``times`` the fault ends after so many requests.
    :meth:`stop` refuses connections until :meth:`start`.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self.times: int | None = None
        self.fails_from = ''  # the PUT of a path that holds this text begins the fault 503
        self.failed = 0  # requests while there was a fault
        self.met = 0  # those of them that the fault changes
        self.uploads: list[str] = []  # paths of objects, in the order of their PUTs
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._port = find_free_port()  # kept while the server is stopped, too
        self.start()
        requests.post(f'{self.url}/moto-api/reset', timeout=60)  # what it holds belongs to the process

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self._port}'

    def start(self) -> None:
        """Accept connections, on the same port as before :meth:`stop`."""
        self._server: BaseWSGIServer = make_server('127.0.0.1', self._port, self._answer, threaded=True)
        # It looks so often whether it is to stop.
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        if environ['REQUEST_METHOD'] == 'PUT':
            self.uploads.append(environ['PATH_INFO'])
            if self.fails_from and self.fails_from in environ['PATH_INFO']:
                self.fault, self.fails_from = '503', ''
        if self.fault is None:
            return self._moto(environ, respond)
        fault, self.failed = self.fault, self.failed + 1
        method, is_listing = environ['REQUEST_METHOD'], 'list-type' in environ['QUERY_STRING']
        self.met += {'lost': method == 'PUT', 'short': method == 'GET', 'unlisted': is_listing}.get(fault, True)
        if self.times is not None and self.failed >= self.times:  # several requests at once
            self.fault = None
        if fault in ('500', '503', '403'):
            code = {'500': 'InternalError', '503': 'SlowDown', '403': 'AccessDenied'}[fault]
            respond(f'{fault} {code}', [('Content-Type', 'application/xml')])
            return [ERROR.format(code, 'as told').encode()]
        if fault == 'lost' and method == 'PUT':
            environ['wsgi.input'].read(int(environ.get('CONTENT_LENGTH') or 0))
            respond('200 OK', [('ETag', '"0"'), ('Content-Length', '0')])
            return [b'']
        if fault == 'late':
            time.sleep(3)
        if fault == 'short' and method == 'GET':
            return self._answer_half(environ, respond)
        answer = b''.join(self._moto(environ, respond))
        if fault == 'cut':
            return _cut(answer)
        if fault == 'unlisted':
            answer = re.sub(rb'<Contents>.*</Contents>', lambda found: b' ' * len(found[0]), answer, flags=re.DOTALL)
        if fault == 'damaged' and answer:
            middle = len(answer) // 2
            answer = answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]
        return [answer]

    def _answer_half(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        said: list[Any] = []
        answer = b''.join(self._moto(environ, lambda *arguments: said.extend(arguments)))
        answer = answer[: len(answer) // 2]
        headers = [(name, value) for name, value in said[1] if name.lower() != 'content-length']
        respond(said[0], [*headers, ('Content-Length', str(len(answer)))])
        return [answer]


def _cut(answer: bytes) -> Iterator[bytes]:
    yield answer[: len(answer) // 2]
    raise ConnectionResetError
