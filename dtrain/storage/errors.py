"""Storage errors of every fsspec client: whether a retry may help, the message in one line, and the hint what to
type.
"""

import errno
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dtrain.secrets import masked
from dtrain.storage import web
from dtrain.storage.clients import SAME

BUSY = {
    errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.EPIPE, errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO, errno.ENOBUFS,
    errno.ENOTEMPTY,
}  # fmt: skip
"""Errors that may pass when tried again. EIO is one: network disks return it, and every retry writes a new file. So is
ENOTEMPTY: another process, such as the one that renews a lease, wrote into a folder while it was removed.
"""
ERRNO = {
    **dict.fromkeys(BUSY, "busy"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "full"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "denied"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "missing"),
    errno.EEXIST: "exists",
    errno.EISDIR: "odd",
}
STATUS = {
    **dict.fromkeys((408, 409, 429, 500, 502, 503, 504), "busy"),
    **dict.fromkeys((401, 403), "denied"),
    404: "missing",
    412: "exists",
    507: "full",
}
"""HTTP statuses. S3 answers 409 when two writers create the same key at once: a retry shows who won."""
READ_ONLY = {405, 501}
"""HTTP statuses of a web server that only gives files, when one is written."""
NAMES = {
    "ImportError": "package",
    "FileExistsError": "exists", "ResourceExistsError": "exists",
    "ClientConnectionError": "busy", "ClientPayloadError": "busy", "HTTPClientError": "busy",
    "ServiceRequestError": "busy",
    "ServiceResponseError": "busy", "TransportError": "busy", "ChecksumError": "busy", "IncompleteRead": "busy",
    "IncompleteReadError": "busy",
    "TimeoutError": "busy", "ConnectionError": "busy",
    "NoCredentialsError": "denied", "PartialCredentialsError": "denied", "CredentialRetrievalError": "denied",
    "ClientAuthenticationError": "denied",
    "GoogleAuthError": "denied", "PermissionError": "denied",
    "FileNotFoundError": "missing", "ResourceNotFoundError": "missing",
}  # fmt: skip
"""By the name of the class or one of its bases, because no client is imported here: aiohttp, botocore, azure-core,
google-auth, requests, Python.
"""
UNREACHED = {
    "ConnectionRefusedError", "gaierror", "EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError",
    "ServiceRequestError", "NewConnectionError", "ConnectTimeout",
}  # fmt: skip
"""Classes of errors with which no connection was made, as NAMES."""
EXTRA = {"s3": "s3", "gs": "gcs", "az": "azure", "http": "http", "https": "http", "hf": "hf"}
"""Scheme -> what to install for it: pip install 'dtrain[...]'."""
VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
    "azure": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "HF_TOKEN",
}
SIGNS = {
    web.NO_PARTS: "Download it, and type its path",
    "CERTIFICATE_VERIFY_FAILED": "Set SSL_CERT_FILE=<the certificate of the authority that signed it>",
    "WRONG_VERSION_NUMBER": "No TLS is spoken there: type http://",
}
"""Text in an error -> the remedy."""
CONTAINER = re.compile(
    r"(specified|the) (bucket|container) (does not|doesn't) exist|NoSuchBucket|ContainerNotFound", re.IGNORECASE
)
LONGEST = 300
"""Length at which a server's own message is cut, in characters."""


class Cause(NamedTuple):
    kind: str
    """As in `StoreError.kind`."""
    sentence: str
    hint: str
    reached: bool = True
    """Whether there was a connection, or none is needed."""


def explain(error: BaseException, url: str) -> Cause:
    """Why an operation on `url` failed, with known secrets masked."""
    scheme = url.split("://")[0] if "://" in url else "disk"
    extra, text = EXTRA.get(SAME.get(scheme, scheme), ""), _words(error)
    chain = [*_chain(error)]
    kind = next((kind for one in chain if (kind := _kind(one))), "other")
    # on the web, FileNotFoundError may also hide a failed connection
    is_answer = extra != "http" or any(404 in _statuses(one) for one in _chain(error))
    if kind == "missing" and is_answer and not isinstance(error, NotADirectoryError):
        if CONTAINER.search(text):
            return Cause(kind, "there is no such bucket", "Create it, or check the URL")
        return Cause(kind, "it does not exist" + " (404)" * (extra == "http"), "")
    if extra == "http" and any(READ_ONLY & {*_statuses(one)} for one in chain):
        return Cause("denied", "this web server takes no files: it can only be read", "")
    hints = {"full": "Free space there, or type out=<elsewhere>"}
    if extra:
        hints["package"] = f"Type: pip install 'dtrain[{extra}]'"
    if scheme != "disk":
        hints["busy"] = "Is the network there, and the endpoint right?"
    if scheme != "disk" and not any(isinstance(one, web.NotPublicError) for one in _chain(error)):
        hints["denied"] = f"Check {VARIABLES.get(extra, 'the credentials')} or out_options"
    hint = next((hint for sign, hint in SIGNS.items() if sign in text), hints.get(kind, ""))
    return Cause(kind, text, hint, not any(UNREACHED & {base.__name__ for base in type(one).__mro__} for one in chain))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, outermost first."""
    seen = list[BaseException]()
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _kind(error: BaseException) -> str | None:
    status = next((STATUS[code] for code in _statuses(error) if code in STATUS), None)
    name = next((NAMES[base.__name__] for base in type(error).__mro__ if base.__name__ in NAMES), None)
    if str(error).startswith("Forbidden:"):  # the only sign of a 403 from gcsfs
        return "denied"
    number = ERRNO.get(error.errno or 0) if isinstance(error, OSError) else None
    return number if number in ("full", "denied") else name or status or number


def _statuses(error: BaseException) -> Iterator[int]:
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        yield int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    own = {*dir(type(error)), *vars(error)}
    name = next((name for name in ("status_code", "status", "code") if name in own), "")  # azure, aiohttp, gcsfs
    code = getattr(error, name, None) if name else None
    if isinstance(code, int | str) and str(code).isdigit():
        yield int(code)


def _words(error: BaseException) -> str:
    """The first non-empty line of the message of the error or one of its causes."""
    messages = (
        one.strerror or one if type(one).__module__ == "builtins" and isinstance(one, OSError) else one
        for one in _chain(error)
    )
    lines = (line.strip() for one in messages for line in str(one).splitlines())
    text = masked(next((line for line in lines if line), type(error).__name__))
    if "support range requests" in text:  # of fsspec's file of a web server
        return web.NO_PARTS
    return (text if len(text) <= LONGEST else f"{text[:LONGEST]}...").rstrip(" .:")
