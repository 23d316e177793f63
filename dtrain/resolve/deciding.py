"""Reports bugs of dtrain itself while it validates words."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from dtrain.config import environment
from dtrain.errors import DtrainError, WordsError
from dtrain.secrets import masked


@contextmanager
def deciding() -> Iterator[None]:
    """Turn any exception that is not a DtrainError into one line for the user; DTRAIN_DEBUG=1 shows the traceback."""
    try:
        yield
    except DtrainError:
        raise
    except Exception as error:
        if os.environ.get(environment.DEBUG):
            raise
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}" if trace else "?"
        message = masked(" ".join(str(error).split()))[:200]
        raise WordsError(
            f"dtrain could not validate these words: {type(error).__name__} at {place}: {message}. This is a fault of "
            "dtrain, not yours: please report it with the words and the output of DTRAIN_DEBUG=1."
        ) from error
