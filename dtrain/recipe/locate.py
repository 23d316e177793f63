"""Location of a recipe, its trust level, and its bytes: `dtrain plan recipe=https://host/a.yaml@sha256:<hex>`.

Three levels: `own`, shipped with dtrain; `local`, a path of this machine; `remote`, every other URL. A recipe that
another one builds on is trusted no more than that one.
"""

import hashlib
import math
import posixpath
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urljoin

from dtrain.config.files import recipes
from dtrain.config.word import cut
from dtrain.errors import StoreError, WordsError, nearest
from dtrain.recipe import project
from dtrain.recipe.fetch import named_hosts, refusal, resolves_inside
from dtrain.recipe.project import LARGEST
from dtrain.secrets import masked
from dtrain.storage import clients, store, web

SECONDS = 5.0
"""Time limit of retries: a person waits."""
SHORTEST_PIN = 32
"""Hex digits. A pin must resist an attacker who forges a file: 128 bits are out of reach, 32 bits take minutes."""
Trust = Literal["own", "local", "remote"]
BEST_SECONDS = 60.0
_best: dict[str, tuple[float, str]] = {}
"""`<sweep>/best` -> when it was looked for, and the recipe that it means."""


@dataclass(frozen=True)
class Place:
    """`url` is a path or URL; `digest` the beginning of the SHA-256 that its bytes must have; empty: any; `member`: the
    recipe in the zip file that lies there.
    """

    url: str
    trust: Trust
    digest: str = ""
    member: str = ""

    def __str__(self) -> str:
        """For messages: without secrets, a built-in recipe by its short path."""
        inside = f"/{self.member}" if self.member else ""
        return f"recipes/{Path(self.url).name}" if self.trust == "own" else f"{masked(self.url)}{inside}"


def find(name: str, beside: Place | None = None) -> Place:
    """The place that `name` means to a person, or to the recipe at `beside`. Raises WordsError."""
    plain, pinned, digest = name.partition("@sha256:")
    known = {**project.beside(), **recipes()}
    if pinned and not re.fullmatch(rf"[0-9a-fA-F]{{{SHORTEST_PIN},64}}", digest):
        raise WordsError(f"recipe={cut(masked(name))}: a pin is @sha256: and {SHORTEST_PIN} to 64 hex digits.")
    if plain in known and not (beside and known[plain].parent == project.LISTED):
        place = Place(str(known[plain]), "local" if known[plain].parent == project.LISTED else "own")
    elif not re.search(r"[/.]", plain) and (beside or len(plain) > 255 or not Path(plain).is_dir()):
        raise WordsError(
            f"recipe={cut(masked(plain))}: there is no such recipe.{nearest(plain, known)} Or give a path or URL."
        )
    elif beside is None:
        place = _typed(plain)
    else:
        place = _from(beside, plain)
    return replace(place, digest=digest.lower() or place.digest)


def _typed(name: str) -> Place:
    """The place that a person means by a path or URL: of a run, a folder, a zip file or a package the recipe in it."""
    if name.startswith(project.PACKAGE):
        name = str(project.in_package(name))
    name = of_best(name) if name.endswith("/best") else name
    if not store.is_local(name):
        with store.patience(SECONDS), clients.from_a_person(name):
            inside = project.in_zip(name)
            url = (None if inside else project.in_site(name)) or name
        return Place(inside[0], "remote", member=inside[1]) if inside else Place(url, "remote")
    if store.local_path(name).is_dir():
        return Place(str(project.in_folder(store.local_path(name))), "local")
    inside = project.in_zip(name)
    return Place(inside[0], "local", member=inside[1]) if inside else Place(name, "local")


def of_best(name: str) -> str:
    """The config.yaml of the best job, if `name` is `<sweep>/best`. The answer stays for a minute, as each job of a
    sweep over it asks. Raises WordsError and StoreError.
    """
    if name.startswith(("http://", "https://")):  # where nothing can be listed
        return name
    from dtrain.report import best

    since, url = _best.get(name, (-math.inf, name))
    if time.monotonic() - since > BEST_SECONDS:
        with store.patience(SECONDS), nullcontext() if store.is_local(name) else clients.from_a_person(name):
            job = best.job(name.removesuffix("/best"))
        url = store.join(job, "config.yaml") if job else name
        _best[name] = time.monotonic(), url
    return url


def fetch(place: Place, *, seconds: float | None = None) -> bytes:
    """The bytes of a recipe. `seconds` limits the wait for a remote one, instead of the limit of `store.small`. Raises
    WordsError and StoreError.
    """
    if store.is_local(place.url) and store.local_path(place.url).is_dir():
        raise WordsError(f"recipe={place}: a folder, not a recipe.")
    with store.patience(SECONDS), clients.from_a_person(place.url) if place.trust == "remote" else nullcontext():
        if place.member:
            actual, contents = project.unpacked(place.url)
            if place.member not in contents:
                raise WordsError(f"recipe={place}: is not in the zip file.")
            data = contents[place.member]
        else:
            data = store.small(place.url, LARGEST + 1, seconds=seconds)
            actual = hashlib.sha256(data).hexdigest()
    if len(data) > LARGEST:
        raise WordsError(f"{place}: larger than {LARGEST >> 20} MiB, the limit for a recipe.")
    if not actual.startswith(place.digest):
        raise WordsError(f"{place}: does not match its pin: it has @sha256:{actual}.")
    return data


def check(place: Place, chain: Sequence[Place]) -> None:
    """Raises WordsError if the last recipe of `chain` may not build on `place`."""
    if (place.url, place.member) in [(other.url, other.member) for other in chain]:
        raise WordsError(
            f"{chain[-1]}: recipes build on each other in a circle: {' -> '.join(map(str, [*chain, place]))}."
        )
    if place.trust == "remote" and not place.digest and any(other.digest for other in chain):
        try:
            written = f" Write {place}@sha256:{hashlib.sha256(fetch(place)).hexdigest()}."
        except StoreError:
            written = ""
        raise WordsError(f"{chain[-1]}: is pinned, and builds on {place}, which is not.{written}")


def story(text: str) -> str:
    """The description of a recipe: its first comment with text."""
    comments = (line.lstrip("# ").strip() for line in text.splitlines() if line.startswith("#"))
    return next((line for line in comments if line and not line.startswith("@package")), "")


def _from(beside: Place, name: str) -> Place:
    """The place that the recipe at `beside` calls `name`. Raises WordsError if a remote one refers to this machine."""
    whole = "://" in name or name.startswith(("/", "~"))
    if beside.member and not whole:
        return replace(beside, member=posixpath.normpath(posixpath.join(posixpath.dirname(beside.member), name)))
    if beside.trust != "remote":
        url = name if whole else posixpath.normpath(store.local_path(beside.url).parent / name)
        return Place(url, "local" if store.is_local(url) else "remote")
    url = name if whole else _joined(beside.url, name)
    closed = "::" in url or "://" not in url or (whole and refusal("url", url, beside.url))
    if closed or resolves_inside(named_hosts(url, beside.url)):
        allowed = ", ".join(f"{scheme}://" for scheme in sorted(web.REACHABLE))
        shown = repr(masked(name)[:100])
        raise WordsError(
            f"{beside}: a recipe from elsewhere cannot build on {shown}. It can on what lies beside it, and on public "
            f"addresses of {allowed}."
        )
    clients.wary(url)
    return Place(url, "remote")


def _joined(url: str, name: str) -> str:
    """The URL of `name` relative to the file at `url`. `..` never leaves the bucket or host."""
    if url.startswith(("http://", "https://")):
        return urljoin(url, name)
    scheme, path = url.split("://", 1)
    root, slash, rest = path.partition("/")
    inside = posixpath.normpath(posixpath.join("/", posixpath.dirname(rest), name))
    return f"{scheme}://{root}{inside}" if slash else f"{scheme}:/{inside}"
