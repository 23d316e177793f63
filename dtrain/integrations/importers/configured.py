"""Translates the optimizer and the scheduler that a LightningModule's configure_optimizers makes: dtrain steps no
scheduler, so both become words, with their own values.
"""

from collections.abc import Mapping

from dtrain.integrations.importers.fitted import CONFIGURES
from dtrain.integrations.importers.ledger import Code, Ledger, show
from dtrain.integrations.importers.rules import refused, unneeded
from dtrain.integrations.importers.terms import BEHIND, decaying, optimizer

WORD = "adamw, sgd, muon or adafactor; lightning takes no configure_optimizers with a scheduler"
LATER = "an argument of the schedule"
SHAPES: Mapping[str, str] = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
}  # fmt: skip
"""Curves of transformers -> words of `schedule`."""


def configured(ledger: Ledger, ends: tuple[object, ...]) -> None:
    """`ends`: the lengths of the run in the script, at which a schedule may end."""
    if not ledger.under(CONFIGURES):
        return
    section, arguments = f"{CONFIGURES}.optimizer", f"{CONFIGURES}.optimizer.init_args"
    is_all = str(ledger.get(f"{arguments}.params")).endswith("parameters()")
    groups = refused("groups of parameters. Type optim.lr_of={<pattern of names>: <lr>}, or optim._target_=<yours>.")
    ledger.settle(unneeded("all parameters of the model") if is_all else groups, *ledger.under(f"{arguments}.params"))
    if ledger.under(section):
        optimizer(ledger, f"{section}.class_path", arguments, str(ledger.get(f"{section}.class_path")))
    else:
        ledger.ask("optim", WORD)
    _schedule(ledger, ends)
    ledger.settle(refused("type the equivalent word, or leave it out."), f"{CONFIGURES}.**")


def _schedule(ledger: Ledger, ends: tuple[object, ...]) -> None:
    section = f"{CONFIGURES}.scheduler"
    name = ledger.get(f"{section}.name")
    lowest, warmup = (ledger.get(f"{section}.{each}", 0) for each in ("eta_min", "num_warmup_steps"))
    length, lr = ledger.get(f"{section}.T_max"), ledger.words.get("optim.lr")
    floor = 0.0 if lowest == 0 else None
    if isinstance(lowest, int | float) and isinstance(lr, int | float) and lr:
        floor = lowest / lr
    if name == "CosineAnnealingLR" and floor is not None and (isinstance(length, Code) or length in ends):
        ledger.carry(f"{section}.name", decaying("cosine", 0, floor), f"to the end of the run, {show(length)} there")
    elif name in SHAPES and isinstance(warmup, int | float):
        words = decaying(SHAPES[name], 0 if name == "constant" else warmup)
        ledger.carry(f"{section}.name", words, BEHIND if warmup else "")
    else:
        hint = f"linear, cosine, constant or wsd, in place of {name}"
        ledger.ask("schedule", hint)
        ledger.settle(refused(f"dtrain does not step it. Type schedule=<{hint}>."), f"{section}.name")
    ledger.settle(unneeded(LATER), f"{section}.**")
