"""Reads and writes whole files in a local folder or under ``s3://bucket/prefix``; waits while S3 does not answer.

Every write is atomic: a local file is written under a temporary name and renamed, an object is one ``put``. The S3
endpoint is ``S3_ENDPOINT_URL`` if that is set; boto3 finds the credentials.
"""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from maelm_composer.errors import InputError
from maelm_composer.files import assert_writable, format_json, write_bytes

ENDPOINT = 'S3_ENDPOINT_URL'  # the environment variable
BUSY = ('RequestTimeout', 'RequestTimeoutException', 'Throttling', 'ThrottlingException', 'SlowDown')  # also with 400
RIGHTS = 's3:ListBucket, GetObject, PutObject, DeleteObject'
LONGEST_PAUSE = 60.0  # seconds between two tries during an outage

Result = TypeVar('Result')


class OutageError(InputError):
    """The object store does not answer, or says that it is overloaded: the same call may succeed later."""


def join(url: str, *names: str) -> str:
    """Join a folder or s3:// address and names with slashes."""
    return '/'.join([url.rstrip('/') or '/', *names])


def is_s3(url: str) -> bool:
    """Whether ``url`` is an s3:// address.

    Raises:
        InputError: ``url`` has another scheme, names no bucket or has one slash after the scheme.
    """
    scheme, separator, rest = url.partition('://')
    if re.match('s3:(?!//)', url):
        raise InputError(f'{url}: an address begins with s3://, with two slashes')
    if separator and scheme != 's3':
        raise InputError(f'{url}: only a local folder or s3://bucket/prefix can be used')
    if separator and not rest.partition('/')[0]:
        raise InputError(f'{url}: names no bucket; write s3://bucket/prefix')
    return bool(separator)


def read_file(url: str) -> bytes | None:
    """The bytes of the file at ``url``, or None if there is no such file.

    Raises:
        InputError: the bucket does not exist, or the credentials are refused.
        OutageError: the endpoint does not answer.
    """
    if not is_s3(url):
        try:
            return Path(url).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
    from botocore.exceptions import FlexibleChecksumError, HTTPClientError, IncompleteReadError

    with _s3(url) as (client, bucket, key):
        left = 3
        while True:
            try:
                body = client.get_object(Bucket=bucket, Key=key)['Body']
            except client.exceptions.NoSuchKey:
                return None
            try:
                return body.read()
            except (HTTPClientError, IncompleteReadError, FlexibleChecksumError):  # botocore retries until the body
                left -= 1
                if not left:
                    raise


class Outage:
    """How long an object store has not answered, and when to try again: after 1, 2, 4, ... 60 seconds."""

    def __init__(self, limit_minutes: float) -> None:
        self.limit = limit_minutes * 60
        self.since: float | None = None  # seconds of the monotonic clock; None: the last try succeeded
        self.next_try = 0.0

    def note(self) -> bool:
        """Note a failed try; returns whether this is the first one of an outage."""
        now, is_first = time.monotonic(), self.since is None
        self.since = now if self.since is None else self.since
        pause = min(1 + now - self.since, LONGEST_PAUSE)
        self.next_try = min(now + pause, self.since + self.limit)  # a last try when the limit is over
        return is_first

    @property
    def is_due(self) -> bool:
        """Whether it is time to try again."""
        return time.monotonic() >= self.next_try

    @property
    def is_over_limit(self) -> bool:
        return self.seconds >= self.limit

    @property
    def seconds(self) -> float:
        """How long the store has not answered."""
        return 0.0 if self.since is None else time.monotonic() - self.since


def wait_out(call: Callable[[], Result], url: str, limit_minutes: float, lock: Path) -> Result:
    """The result of ``call``, tried again for ``limit_minutes`` while the object store of ``url`` does not answer.

    Of several processes that wait, the one that locks the file ``lock`` prints a line at the begin and at the end.

    Raises:
        OutageError: the limit is over.
    """
    outage, speaker = Outage(limit_minutes), FileLock(lock, blocking=False)
    try:
        while True:
            try:
                result = call()
            except OutageError as error:
                is_first = outage.note()
                if outage.is_over_limit:
                    raise
                if is_first:
                    with contextlib.suppress(OSError):  # another speaks (Timeout), or the file system has no locks
                        speaker.acquire()
                    if speaker.is_locked:
                        print(f'{error}: trying again for {limit_minutes:g} minutes', flush=True)
            else:
                if speaker.is_locked:
                    print(f'{url} answers after {outage.seconds:.0f} s', flush=True)
                return result
            while not outage.is_due:
                time.sleep(0.5)
    finally:
        speaker.release()


def write_file(url: str, content: bytes) -> None:
    """Write or overwrite the file at ``url`` in one atomic step. Raises as :func:`read_file`."""
    if is_s3(url):
        with _s3(url) as (client, bucket, key):
            client.put_object(Bucket=bucket, Key=key, Body=content)
        return
    write_bytes(Path(url), content)


def assert_can_write(folder: str) -> None:
    """Write a file in ``folder`` and remove it, so that missing rights are known before the work, not after.

    Raises:
        InputError: as :func:`read_file`.
        OSError: a local folder is not writable.
    """
    if not is_s3(folder):
        assert_writable(Path(folder))
        return
    probe = join(folder, '.probe')
    write_file(probe, b'probe\n')
    with contextlib.suppress(InputError):  # the right to write does not include that to delete
        delete(probe)


def write_json_file(url: str, plain: dict[str, Any], indent: int | None = None) -> None:
    """Write ``plain`` with its checksum, as :func:`write_file` does."""
    write_file(url, format_json(plain, indent).encode())


def list_names(url: str, recursive: bool = False) -> list[str]:
    """Sorted names of the files in the folder ``url``, or of all below it; empty if the folder does not exist.

    Raises as :func:`read_file`, and an OSError if a local folder cannot be read.
    """
    if not is_s3(url):
        # Path.glob would list an unreadable folder as an empty one.
        found = os.walk(Path(url), onerror=_raise_unless_missing)
        paths = [Path(folder, name) for folder, _, names in islice(found, None if recursive else 1) for name in names]
        return sorted(str(path.relative_to(url)) for path in paths if path.is_file())
    delimiter = {} if recursive else {'Delimiter': '/'}
    with _s3(join(url, '')) as (client, bucket, prefix):
        pages = client.get_paginator('list_objects_v2').paginate(Bucket=bucket, Prefix=prefix, **delimiter)
        keys = [item['Key'][len(prefix) :] for page in pages for item in page.get('Contents', [])]
    return sorted(key for key in keys if key and key[-1] != '/')  # other programs make an empty object for a folder


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def write_folder(url: str, folder: Path) -> None:
    """Copy the files of the local ``folder`` to ``url``, without subfolders."""
    for path in sorted(folder.iterdir()):
        write_file(join(url, path.name), path.read_bytes())


def upload(path: Path, url: str) -> None:
    """Copy a local file to an s3:// address, in parts if it is large. Raises as :func:`read_file`."""
    with _s3(url) as (client, bucket, key):
        client.upload_file(str(path), bucket, key)


def download(url: str, path: Path) -> None:
    """Copy an object to a local file, in one atomic step. Raises as :func:`read_file`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _s3(url) as (client, bucket, key):
        client.download_file(bucket, key, str(path))


def delete(url: str) -> None:
    """Delete an object, if it exists. Raises as :func:`read_file`."""
    with _s3(url) as (client, bucket, key):
        client.delete_object(Bucket=bucket, Key=key)


@functools.cache
def _s3_client() -> Any:
    import boto3
    import botocore.session
    from botocore.config import Config

    session = botocore.session.get_session()
    # botocore's own 3 attempts may be over in 0.15 s. An environment variable or ~/.aws/config may set another number.
    attempts = session.get_config_variable('max_attempts') or 5
    config = Config(connect_timeout=5, read_timeout=60, retries={'mode': 'standard', 'total_max_attempts': attempts})
    return boto3.session.Session(botocore_session=session).client(
        's3', endpoint_url=os.environ.get(ENDPOINT), config=config
    )


os.register_at_fork(after_in_child=_s3_client.cache_clear)  # a client must not be used across a fork


@contextlib.contextmanager
def _s3(url: str) -> Iterator[tuple[Any, str, str]]:
    """Give the client, the bucket and the key of ``url``; errors of the body become InputError."""
    from boto3.exceptions import Boto3Error, RetriesExceededError
    from botocore import exceptions as botocore

    bucket, _, key = url.removeprefix('s3://').partition('/')
    try:
        yield _s3_client(), bucket, key
    except (botocore.BotoCoreError, botocore.ClientError, Boto3Error, ValueError) as error:
        # A ValueError says that S3_ENDPOINT_URL is no address. The context of a failed upload is the server's answer.
        cause = error.__context__ if isinstance(error.__context__, botocore.ClientError) else error
        if isinstance(cause, botocore.ClientError):
            code = cause.response.get('Error', {}).get('Code', '')
            reason = {
                'NoSuchBucket': 'there is no such bucket',
                'AccessDenied': f'access denied; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, the rights {RIGHTS}',
                'InvalidAccessKeyId': 'the access key is not known there; check AWS_ACCESS_KEY_ID',
                'SignatureDoesNotMatch': 'the secret key is wrong; check AWS_SECRET_ACCESS_KEY',
            }.get(code, str(cause))
            status = cause.response.get('ResponseMetadata', {}).get('HTTPStatusCode', 0)
            is_outage = status >= 500 or status in (408, 429) or code in BUSY
        else:
            reason = str(cause)
            lost = (botocore.HTTPClientError, botocore.ConnectionError, RetriesExceededError)
            is_outage = isinstance(cause, (*lost, botocore.IncompleteReadError, botocore.FlexibleChecksumError))
        raise (OutageError if is_outage else InputError)(f'{url}: {" ".join(reason.split())}') from None
