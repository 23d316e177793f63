"""`dtrain plan why [keys] <words>`: who set each value of the run, and what it overrode.

dtrain plan why optim mesh strategy=fsdp devices=2
"""

from collections.abc import Sequence

from dtrain.cluster import detect
from dtrain.compose import compose, provenance
from dtrain.errors import WordsError, nearest
from dtrain.launcher import apart
from dtrain.resolve import resolve
from dtrain.secrets import screen


def run(words: Sequence[str]) -> int:
    """Words without `=` are the keys, or prefixes of keys, to explain; without any, all keys are shown."""
    keys = [word for word in words if "=" not in word and not word.startswith("-")]
    config = compose([word for word in words if word not in keys])
    rows = provenance.rows(config, resolve(config, detect(), apart.shapes_of))
    known = {".".join(row.key.split(".")[:end]) for row in rows for end in range(1, row.key.count(".") + 2)}
    problems = [
        f"{key} (command line): this run has no such value.{nearest(key, known)}" for key in keys if key not in known
    ]
    if problems:
        raise WordsError(*problems)
    screen.say(
        provenance.table([row for row in rows if not keys or any(f"{row.key}.".startswith(f"{key}.") for key in keys)])
    )
    return 0
