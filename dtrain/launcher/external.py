"""The ranks are already running, this process is one of them: torchrun, or anything that sets RANK and WORLD_SIZE."""

import os
import traceback

from dtrain.errors import DtrainError, RankError
from dtrain.launcher import run_rank
from dtrain.plan import Plan
from dtrain.result import Result


class External:
    def command(self, plan: Plan) -> str:
        return f"torchrun --nnodes {plan.nodes} --nproc-per-node {plan.devices} -m dtrain <the same words>"

    def launch(self, plan: Plan) -> Result:
        rank = os.environ["RANK"]
        os.environ.setdefault("LOCAL_RANK", str(int(rank) % plan.devices))
        try:
            return run_rank(plan)
        except (DtrainError, KeyboardInterrupt):
            raise
        except BaseException as error:  # torch has exceptions that are no Exception
            raise RankError(f"rank {rank} failed\n{traceback.format_exc()}") from error
