"""The shapes of a plan's model: of this package's own by arithmetic, of any other by running it once without memory. Torch is imported for those alone."""

import os
import traceback

from dtrain.build import trusting
from dtrain.errors import DtrainError, WordsError, first_line
from dtrain.frames import own
from dtrain.plan import Plan
from dtrain.predict import known
from dtrain.predict.shapes import Shapes
from dtrain.words import cut


def shapes_of(plan: Plan) -> Shapes:
    """Raises WordsError as building the model would."""
    return known.shapes(plan) or _traced(plan)


def _traced(plan: Plan) -> Shapes:
    """What the user's own code raises while it is built is one sentence; DTRAIN_DEBUG=1 shows all of it."""
    from dtrain.tracer import trace

    try:
        with trusting(plan.trust):
            return trace(plan)
    except DtrainError:
        raise
    except Exception as error:
        if os.environ.get("DTRAIN_DEBUG"):
            raise
        place = own(list(traceback.walk_tb(error.__traceback__))) or "?"
        raise WordsError(
            f"model and data cannot be built: {type(error).__name__}: {cut(first_line(error), 300)} ({place}). DTRAIN_DEBUG=1 shows the whole stack."
        ) from error
