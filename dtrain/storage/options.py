"""`out_options`: options for the storage of `out`, which may include credentials. They are passed to the storage and to
the ranks, and never written to disk.

    dtrain out=s3://bucket/run out_options.endpoint_url=http://127.0.0.1:9000 out_options.secret='${oc.env:MY_SECRET}'
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dtrain import secrets
from dtrain.config.word import Word
from dtrain.errors import first_line, nearest
from dtrain.storage import clients, patience, store

NAME = "out_options"
PASSED_ON = {"s3": ("profile",), "gs": (), "az": (), "memory": ()}
"""Clients whose options are known from their signatures, and further options that these clients accept. Other clients
judge their options themselves.
"""
_chosen: dict[str, Any] = {}


def is_one(key: str) -> bool:
    return key.split(".")[0] == NAME


def judge(word: Word) -> Iterable[str]:
    """One sentence per mistake in a word of out_options; values are never shown."""
    option = f"{word.key}={secrets.MASK} ({word.source})"
    if word.sweep:
        yield f"{option}: several values are a sweep, and an option takes one. Quote it: \"{word.key}='<value>'\"."
    elif word.key == NAME and not isinstance(word.value, Mapping):
        yield f"{option}: options have names. Type {NAME}.<name>=<value>."


def tell(words: Sequence[Word], url: str | None) -> list[str]:
    """Set the out_options among the words for the storage of `url`. Returns one sentence per mistake, without
    values.
    """
    mine = [word for word in words if is_one(word.key)]
    problems = [problem for word in mine for problem in judge(word)]
    if not mine or problems:
        return problems
    if url is None or store.is_local(url):
        return [
            f"{mine[0].key} ({mine[0].source}): a folder of this machine takes no options. Type out=<a URL>, such as "
            "s3://bucket/run."
        ]
    options, problems = _values(mine)
    problems += _unknown(options, url)
    if not problems:
        _chosen[url] = options
        store.use(url, options)
    return problems


def hand_over() -> str:
    """All storage options, the patience with storage, and the secrets that the plan leaves out, as text for the
    standard input of a child: neither its arguments nor its environment are private.
    """
    return json.dumps({
        "storage": _chosen, "patience": patience.hand_over(), "secrets": secrets.hand_over(),
        "web": clients.hand_over(),
    })  # fmt: skip


def take_over(text: str) -> None:
    """Restore the state of the parent's `hand_over`."""
    state = json.loads(text)
    secrets.take_over(state["secrets"])
    clients.take_over(state["web"])
    patience.take_over(state["patience"])
    for url, options in state["storage"].items():
        _chosen[url] = options
        store.use(url, options)


def _values(words: Sequence[Word]) -> tuple[dict[str, Any], list[str]]:
    """The options as one tree with `${oc.env:...}` resolved, and the problems found."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    options = OmegaConf.create()
    try:
        for word in words:
            named = word.value if word.key == NAME else {word.key.removeprefix(f"{NAME}."): word.value}
            for key, value in named.items():
                OmegaConf.update(options, key, value)
        tree: Any = OmegaConf.to_container(options, resolve=True)
    except OmegaConfBaseException as error:
        return {}, [f"{NAME}: {first_line(error)}"]
    return dict(tree), []


def _unknown(options: Mapping[str, Any], url: str) -> Iterable[str]:
    """One sentence per option that the client of `url` does not know: most clients silently accept any name."""
    scheme = url.split("://")[0]
    same = clients.SAME.get(scheme, scheme)
    if same not in PASSED_ON:
        return
    import inspect

    import fsspec

    try:
        client = fsspec.get_filesystem_class(scheme)
    except ImportError:  # the first use of the storage says what to install
        return
    names = {"use_listings_cache", "listings_expiry_time", "max_paths", *PASSED_ON[same]}
    for base in client.__mro__:
        names |= set(inspect.signature(base.__init__).parameters)
    names -= {"self", "args", "kwargs", "storage_options", "storage_args"}
    for name in options.keys() - names:
        yield f"{NAME}.{name}: the client of {scheme}:// has no such option.{nearest(name, names)}"
