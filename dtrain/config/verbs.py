"""The verbs of the command, each a file in dtrain/verb/, with the sentence that help has of it."""

VERBS = {
    "train": "run it (the default, so it may be left out); -m for a sweep",
    "plan": "show what would happen, without running it; best: the fastest layouts, -m: the jobs of a sweep",
    "evaluate": "compute the held-out loss of a run's newest checkpoint",
    "predict": "write the answers of a run's newest checkpoint to rows, in their order",
    "generate": "generate text with a run's newest checkpoint",
    "verify": "compare a few steps, stopped and resumed, with one process; check `expect`",
    "recipes": "list recipes: complete runs that come with dtrain, in a folder or at a URL; or check one",
    "checkpoint": "ls, verify or export the checkpoints of a run",
    "tokenize": "text to token shards at any URL, on all cores; for data=tokens",
    "import": "convert a config of another tool into a recipe",
    "doctor": "check this machine, the storage and the ranks of a run",
    "runs": "list runs in a folder or at a URL: date, changed words, progress, figures; best, rm, send",
    "report": "write a page of a run, or of the runs of a sweep: curves, leaderboard, what mattered, failures",
    "run": "what a job executes on its first node: run the plan that was submitted under <out>",
    "stop": "ask the job of a run, submitted to a scheduler, to save and stop",
    "sweep": "work: take jobs of a sweep on this host too; ls, best, why: its jobs, the best, what failed; retry, stop",
    "diff": "show the differences between runs, recipes or lists of words",
    "why": "say why a run is slower than planned: predicted beside measured",
    "new": "create a small project in a new folder: a model, a dataset, a recipe and a test",
    "completion": "print a completion script for bash, zsh or fish",
}
