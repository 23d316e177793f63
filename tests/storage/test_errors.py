"""What storage errors mean, whichever client raised them; and that nobody reads a secret in them."""

import errno
import os
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientResponseError, ServerDisconnectedError
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from dtrain.errors import StoreError
from dtrain.storage import store
from dtrain.storage.errors import explain


def boto(code: str, status: int) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": f"it is {code}"}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "PutObject",
    )


def of(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


class HttpResponseError(Exception):
    """As azure-core has it."""

    def __init__(self, status_code: int | None) -> None:
        super().__init__("Operation returned an invalid status\nErrorCode:Some")
        self.status_code = status_code


class GcsError(Exception):
    """As gcsfs has it."""

    def __init__(self, code: Any) -> None:
        super().__init__(f"backend, {code}")
        self.code = code


CASES = [
    ("busy", OSError(errno.EIO, "Input/output error")),
    ("busy", TimeoutError()),
    ("busy", ConnectionResetError(errno.ECONNRESET, "reset")),
    ("busy", of(OSError(errno.EBUSY, "Please reduce your request rate."), boto("SlowDown", 503))),
    ("busy", of(OSError(errno.EIO, "conflict"), boto("ConditionalRequestConflict", 409))),
    ("busy", of(OSError(errno.EREMOTEIO, "We encountered an internal error."), boto("InternalError", 500))),
    ("busy", EndpointConnectionError(endpoint_url="http://nowhere")),
    ("busy", ServerDisconnectedError()),
    ("busy", of(RuntimeError("Failed to upload block"), HttpResponseError(503))),
    ("busy", GcsError(429)),
    ("busy", GcsError("502")),
    ("full", OSError(errno.ENOSPC, "No space left on device")),
    ("full", OSError(errno.EDQUOT, "Disk quota exceeded")),
    ("denied", PermissionError(errno.EACCES, "Permission denied")),
    ("denied", OSError(errno.EROFS, "Read-only file system")),
    ("denied", of(PermissionError("Access Denied"), boto("AccessDenied", 403))),
    ("denied", NoCredentialsError()),
    ("denied", HttpResponseError(401)),
    ("denied", OSError("Forbidden: https://storage/b/o\nno access")),
    ("missing", FileNotFoundError(errno.ENOENT, "No such file or directory")),
    ("missing", of(FileNotFoundError("The specified key does not exist."), boto("NoSuchKey", 404))),
    ("exists", FileExistsError(errno.EEXIST, "File exists")),
    ("exists", of(OSError(errno.EINVAL, "precondition"), boto("PreconditionFailed", 412))),
    ("package", ImportError("Install s3fs to access S3")),
    ("other", ValueError("what is this?")),
    ("other", of(OSError(errno.EINVAL, "bad name"), boto("InvalidBucketName", 400))),
]


@pytest.mark.parametrize(
    ("kind", "error"), CASES, ids=lambda case: case if isinstance(case, str) else type(case).__name__
)
def test_a_kind_for_every_error(kind: str, error: BaseException) -> None:
    assert explain(error, "s3://b/a").kind == kind


def test_a_status_of_the_web_is_read_where_it_stands() -> None:
    info: Any = SimpleNamespace(real_url="https://x/a")
    assert explain(ClientResponseError(info, (), status=503), "https://x/a").kind == "busy"
    assert (
        explain(ClientResponseError(info, (), status=404, message="gone"), "https://x/a").sentence
        == "it does not exist (404)"
    )


@pytest.mark.parametrize(
    ("url", "error", "advice"),
    [
        (
            "s3://b/a",
            PermissionError("Access Denied"),
            "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL or out_options",
        ),
        (
            "abfs://b/a",
            HttpResponseError(403),
            "Check AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY or out_options",
        ),
        ("gs://b/a", PermissionError("no"), "Check GOOGLE_APPLICATION_CREDENTIALS or out_options"),
        ("sftp://b/a", PermissionError("no"), "Check the credentials or out_options"),
        ("/a", PermissionError(errno.EACCES, "Permission denied"), ""),
        ("/a", OSError(errno.ENOSPC, "No space left on device"), "Free space there, or type out=<elsewhere>"),
        ("gcs://b/a", ImportError("Install gcsfs"), "Type: pip install 'dtrain[gcs]'"),
        ("s3://b/a", FileNotFoundError("The specified bucket does not exist"), "Create it, or check the URL"),
        ("s3://b/a", TimeoutError(), "Is the network there, and the endpoint right?"),
    ],
)
def test_what_to_type(url: str, error: BaseException, advice: str) -> None:
    assert explain(error, url).hint == advice


def test_one_line_and_not_too_long() -> None:
    assert explain(OSError("\n  first \nsecond"), "s3://b/a").sentence == "first"
    assert len(explain(OSError("x" * 5000), "s3://b/a").sentence) < 400
    assert explain(TimeoutError(), "s3://b/a").sentence == "TimeoutError"


def test_no_secret_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment")
    root = f"flaky://memory/{os.getpid()}"
    secrets = ["of-the-options", "deep-inside", "from-the-environment", "in-the-url", "of-the-signature"]
    store.use(
        root,
        {
            "kinds": [f"503 {' '.join(secrets[:3])}"],
            "key": secrets[0],
            "client_kwargs": {"aws_session_token": secrets[1]},
        },
    )
    with pytest.raises(StoreError, match=r"there is no 503 \*\*\* \*\*\* \*\*\*") as caught:
        store.read(f"{root}/a?sig={secrets[4]}&se=2026")
    output = "".join(traceback.format_exception(caught.value))
    assert not [secret for secret in (*secrets[:3], secrets[4]) if secret in output]
    assert (
        str(StoreError.during("read", f"https://me:{secrets[3]}@host/a", "AccountKey=abc;x"))
        == "cannot read https://***@host/a: AccountKey=***;x"
    )
    store.use(root, {})
