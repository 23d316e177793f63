"""The ranks are already running, this process is one of them: torchrun, or anything that sets RANK and WORLD_SIZE."""

import os

from dtrain.launcher import run_here
from dtrain.plan import Plan
from dtrain.result import Result


class External:
    def command(self, plan: Plan) -> str:
        return f"torchrun --nnodes {plan.nodes} --nproc-per-node {plan.devices} -m dtrain <the same words>"

    def launch(self, plan: Plan) -> Result:
        os.environ.setdefault("LOCAL_RANK", str(int(os.environ["RANK"]) % plan.devices))
        return run_here(plan)
