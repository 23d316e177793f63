"""Secrets by their neighbours: the item after a flag such as --token, the password after `curl -u <user>:`. And names
that are one slip of the pen away from the name of a secret.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

FLAG = re.compile(r"--?([A-Za-z][\w-]*)")
USER = re.compile(r"-u|-U|--user|--proxy-user")
PAIR = re.compile(r"[\w.@%+-]+:(?!//|\d+(?!\S))(?!\*\*\*)([^\s$'\",\]]+)")
"""A user and a password, as curl takes them; not the numbers of a user and a group."""
LIST = re.compile(r"\[([^\[\]]*)\]")
ITEM = re.compile(r"[^\s,'\"]+")
IN_TEXT = re.compile(rf"(?<!\S)(?:{USER.pattern})(?:\s+|=)['\"]?{PAIR.pattern}")
WEB = re.compile(r"\bcurl\b|\bwget\b|https?:", re.IGNORECASE)
NAMES = (
    "password", "passphrase", "secret", "credential", "credentials", "authorization", "apikey", "accesskey",
    "secretkey", "privatekey", "signingkey", "authtoken", "accesstoken", "apitoken", "bearertoken", "refreshtoken",
    "sessiontoken", "secretaccesskey", "clientsecret",
)  # fmt: skip
"""Names of secrets, without separators, whose misspellings count too."""
SLIPS = frozenset(("toekn", "tokne", "tkoen", "otken", "tokn", "tken"))
"""The misspellings of a word that is too short for a rule."""


def after_flags(items: Sequence[Any], strength: Any) -> Iterator[int]:
    """The places in a list of arguments whose item is a secret, as the one before it says. `strength`: of a name."""
    web = any(isinstance(item, str) and WEB.search(item) for item in items)
    for at, (flag, item) in enumerate(pairwise(items), start=1):
        if not isinstance(flag, str) or not isinstance(item, str) or item.startswith("-"):
            continue
        name = FLAG.fullmatch(flag)
        pair = PAIR.fullmatch(item) if USER.fullmatch(flag) else None
        if (name and strength(name[1])) or (pair and (web or any(letter.isdigit() for letter in pair[1]))):
            yield at


def spans(text: str, strength: Any) -> Iterator[tuple[int, int]]:
    """Where in a text the secrets stand that their neighbours tell: in lists of arguments, and in calls of curl."""
    for found in LIST.finditer(text) if "-" in text else ():
        items = [*ITEM.finditer(text, *found.span(1))]
        yield from (items[at].span() for at in after_flags([item[0] for item in items], strength))
    if WEB.search(text):
        yield from (found.span(1) for found in IN_TEXT.finditer(text))


@cache
def is_near(name: str) -> bool:
    """Whether a name, or its last words, is one letter away from the name of a secret, or has two letters exchanged."""
    words = name.split("_")
    tails = {"".join(words[-count:]) for count in range(1, 4)}
    return words[-1] in SLIPS or any(_is_slip(tail, known) for tail in tails for known in NAMES)


def _is_slip(one: str, other: str) -> bool:
    """Whether a letter after the first was left out, added or changed, or two neighbours were exchanged; no plural."""
    if abs(len(one) - len(other)) > 1 or one == other or one == f"{other}s":
        return False
    begin = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    a, b = one[begin:], other[begin:]
    exchanged = a[:2] == b[1::-1] and a[2:] == b[2:]
    return exchanged or (begin > 0 and (a[1:] == b[1:] or a[1:] == b or a == b[1:]))
