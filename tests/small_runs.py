"""Small runs drawn by seed: models, data, objectives, layouts, precisions, schedules, optimizers and everything a run keeps, sensible or not."""

import random
from collections.abc import Sequence

Options = Sequence[tuple[str, Sequence[str], float]]
"""(key, its values, how often it is said)."""

STEPS = ("steps=2",)
MODELS: dict[str, tuple[str, Options]] = {
    "gpt": ("tokens", (
        ("model.layers", ("2", "2", "1", "3", "4"), 1), ("model.width", ("16", "32", "24", "8"), 1), ("model.heads", ("2", "4", "1", "3"), 0.8),
        ("model.kv_heads", ("1", "2", "4"), 0.3), ("model.hidden", ("48", "7", "1", "32"), 0.4), ("model.tied", ("true",), 0.25), ("model.vocab", ("300", "29", "7"), 0.15),
        ("model.rope_base", ("1", "0.5", "1e6"), 0.1),
    )),
    "moe": ("tokens", (
        ("model.layers", ("2", "1", "4"), 1), ("model.width", ("16", "32", "8"), 1), ("model.heads", ("2", "4"), 0.8), ("model.experts", ("4", "2", "1", "3", "8"), 0.8),
        ("model.active", ("1", "2", "3"), 0.5), ("model.shared", ("1", "2"), 0.3), ("model.hidden", ("16", "5", "1"), 0.4), ("model.balance", ("0", "0.1", "10"), 0.2),
        ("model.tied", ("true",), 0.2),
    )),
    "mlp": ("features", (
        ("model.layers", ("2", "1", "3", "4"), 1), ("model.width", ("32", "6", "1", "16"), 1), ("model.outputs", ("3", "10", "1"), 0.15), ("model.inputs", ("8", "64"), 0.1),
    )),
    "cnn": ("image", (
        ("model.width", ("8", "4", "1", "3"), 1), ("model.stages", ("2", "1", "3", "5", "8"), 1), ("model.blocks", ("1", "2"), 0.5), ("model.inputs", ("[1,8,8]", "[3,4,4]"), 0.1),
    )),
    "llama": ("own tokens", (("model.vocab", ("auto",), 0.9),)),
    "plain": ("own features", ()),
    "sequential": ("own features", ()),
    "odd": ("own features", ()),
}  # fmt: skip
"""model -> (what it takes, its options)."""
OWN = {
    "llama": "invariance.zoo.llama",
    "plain": "invariance.zoo.Plain",
    "sequential": "invariance.zoo.sequential",
    "odd": "strange.Odd",
}
SYNTHETIC: Options = (
    ("data.samples", ("50", "1", "3", "17", "200"), 0.6), ("data.holdout_part", ("0", "0.1", "1", "0.01"), 0.4), ("data.seed", ("1", "9"), 0.1),
)  # fmt: skip
TOKENS: Options = (
    ("data.sequence", ("8", "16", "4", "7", "1", "2", "12"), 1),
    ("data.holdout", ("0", "0.1", "0.5", "0.001", "0.99"), 0.3),
)
DATA: dict[str, dict[str, Options]] = {
    "tokens": {
        "synthetic": (*SYNTHETIC, ("data.sequence", ("8", "16", "4", "7", "1", "2"), 1), ("data.vocab", ("29", "2", "13", "256"), 0.7)),
        "text": TOKENS,
        "tokens": (*TOKENS, ("data.vocab", ("256", "251", "50257", "100"), 1)),
        "dataset": (("data.dataset._target_", ("strange.Rows", "strange.Bytes", "strange.Named", "invariance.zoo.Uneven"), 1), ("data.outputs", ("29", "256"), 0.9)),
    },
    "features": {
        "synthetic": (*SYNTHETIC, ("data.inputs", ("[64]", "[64]", "[8]", "[2,3]", "[1]"), 0.7), ("data.outputs", ("10", "1", "2", "5"), 0.5)),
        "dataset": (("data.dataset._target_", ("strange.Labelled", "strange.Doubles", "strange.One", "strange.Switches", "dtrain.data.digits.Digits"), 1), ("data.outputs", ("3", "10", "1"), 0.3)),
    },
    "image": {
        "synthetic": (*SYNTHETIC, ("data.inputs", ("[1,8,8]", "[3,4,4]", "[3,16,16]", "[2,1,1]", "[1,5,7]"), 0.7), ("data.outputs", ("10", "1", "2"), 0.5)),
        "dataset": (("data.dataset._target_", ("dtrain.data.digits.Digits", "strange.Pictures"), 1), ("data.outputs", ("10",), 0.3)),
    },
}  # fmt: skip
EVERY_DATASET: Options = (
    ("data.holdout", ("0", "0.1", "0.5", "0.99", "0.001"), 0.4), ("data.workers", ("1", "2"), 0.08), ("data.inputs", ("0",), 0.05), ("data.targets", ("1", "0"), 0.05),
)  # fmt: skip
OPTIMIZERS: dict[str, Options] = {
    "adamw": (("optim.lr", ("1e-3", "0", "1e-2"), 0.5), ("optim.betas", ("[0.9,0.99]", "[0,0.9]", "[0.5,0]"), 0.2), ("optim.weight_decay", ("0", "0.5"), 0.3), ("optim.eps", ("1e-6", "1e-3"), 0.2)),
    "sgd": (("optim.momentum", ("0", "0.5"), 0.3), ("optim.nesterov", ("false",), 0.3), ("optim.lr", ("1e-2", "0"), 0.5)),
    "muon": (("optim.momentum", ("0", "0.9"), 0.3), ("optim.adamw_lr", ("1e-3", "0"), 0.3)),
    "adafactor": (("optim.d", ("1", "2"), 0.2), ("optim.beta2_decay", ("-0.5", "0"), 0.2)),
}  # fmt: skip
EVERYTHING: Options = (
    ("precision", ("bf16", "bf16_true", "fp16"), 0.35), ("remat", ("full", "selective", "budget"), 0.35), ("schedule", ("constant", "wsd", "cosine"), 0.4),
    ("schedule.warmup", ("0", "1", "0.5", "2"), 0.6), ("schedule.floor", ("0", "1"), 0.1), ("clip", ("null", "0.5", "1e-3"), 0.3), ("ema", ("0.9", "0.999"), 0.15),
    ("on_spike", ("skip", "rewind", "stop"), 0.2), ("spike.sigma", ("6", "100"), 0.05), ("spike.window", ("2", "16"), 0.05), ("seed", ("1", "7"), 0.2),
    ("batch", ("8", "4", "12", "2", "6", "1", "3", "16"), 0.8), ("microbatch", ("1", "2", "3", "4"), 0.15), ("accumulate", ("1", "2", "3", "4"), 0.2),
    ("checkpoint.every", ("0", "1", "2"), 0.4), ("checkpoint.mode", ("blocking",), 0.2), ("checkpoint.keep", ("1", "null"), 0.2), ("checkpoint.keep_every", ("1", "2"), 0.1),
    ("checkpoint.best", ("eval_loss", "eval_accuracy"), 0.1), ("checkpoint.ephemeral", ("1",), 0.1), ("checkpoint.memory", ("1",), 0.1),
    ("evaluate.every", ("1", "0", "2"), 0.3), ("evaluate.samples", ("4", "1", "7", "4", "7"), 1), ("log.every", ("1", "2", "100"), 0.3),
    ("logger", ("[]", "[console]", "[tensorboard]", "[console,tensorboard]"), 0.4), ("hook", ("[]", "[sample]"), 0.2), ("hook.sample.tokens", ("3",), 0.0),
    ("generate.tokens", ("4",), 0.05), ("stop_after", ("1", "2"), 0.03), ("time_limit", ("1:00:00",), 0.05), ("trust", (), 0.0),
)  # fmt: skip
STRATEGIES: dict[str, Options] = {
    "auto": (),
    "ddp": (("strategy.bucket_mb", ("1", "0.001"), 0.2),),
    "zero1": (("strategy.offload", ("cpu",), 0.2),),
    "zero2": (("strategy.offload", ("cpu",), 0.2),),
    "zero3": (("strategy.offload", ("cpu",), 0.2),),
    "fsdp": (
        ("strategy.offload", ("cpu",), 0.2),
        ("strategy.reshard", ("never",), 0.3),
        ("strategy.reduce", ("every",), 0.3),
    ),
    "hsdp": (("strategy.reshard", ("never",), 0.3),),
    "pipeline": (),
    "single": (),
}
PIPELINE: Options = (
    ("pipeline.schedule", ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"), 0.6), ("pipeline.split", ("cost", "blocks", "[1,1]"), 0.3),
    ("pipeline.stages", ("1", "2"), 0.1),
)  # fmt: skip
TENSOR: Options = (("tensor.sequence", ("split",), 0.35), ("tensor.loss", ("split",), 0.35))
CONTEXT: Options = (("context.attention", ("ulysses",), 0.4),)


def drawn(seed: int) -> tuple[str, ...]:
    """The words of a run of two steps on four ranks at most. The same seed, the same words."""
    draw = random.Random(seed)
    model = draw.choice(
        ("gpt", "gpt", "gpt", "moe", "moe", "mlp", "mlp", "cnn", "cnn", "llama", "plain", "sequential", "odd")
    )
    takes, options = MODELS[model]
    words = [f"model._target_={OWN[model]}" if model in OWN else f"model={model}", *_some(options, draw)]
    kind = takes.removeprefix("own ")
    data = draw.choice(tuple(DATA[kind]))
    fixed = ("data.inputs", "data.outputs") if takes == "own features" else ()  # which these models have in their code
    words += [
        f"data={data}",
        *(
            word
            for word in _some(DATA[kind][data], draw)
            if not (fixed and (word.startswith(fixed) or "Digits" in word))
        ),
        *(_some(EVERY_DATASET, draw) if data == "dataset" else ()),
    ]
    if draw.random() < 0.3 or model in OWN:
        fitting = {
            "tokens": ("next_token",),
            "features": ("regression", "classification"),
            "image": ("classification", "classification", "regression"),
        }[kind]
        words.append(f"objective={draw.choice((*fitting * 4, 'classification'))}")
    optimizer = draw.choice(("adamw", "adamw", "sgd", "muon", "adafactor"))
    words += [f"optim={optimizer}", *_some(OPTIMIZERS[optimizer], draw), *_layout(model, draw)]
    said = _some(EVERYTHING, draw)
    return (
        *words,
        *(word for word in said if "wsd" not in word or "schedule.floor" not in " ".join(said)),
        *STEPS,
        "trust=[strange,invariance]",
    )


def _layout(model: str, draw: random.Random) -> list[str]:
    """A strategy and degrees whose product often is the number of ranks."""
    strategy = draw.choice(
        ("auto", "ddp", "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp", "hsdp", "pipeline", "single")
    )
    axes = [
        axis
        for axis, chance in (("tp", 0.25), ("pp", 0.2), ("cp", 0.2), ("ep", 0.5 if model == "moe" else 0.02))
        if draw.random() < chance
    ]
    degrees = {axis: draw.choice((2, 2, 2, 2, 4, 3)) for axis in axes}
    ranks = draw.choice((1, 2, 2, 2, 3, 4)) if not axes else draw.choice((2, 4, 4))
    words = [
        f"strategy={strategy}",
        *_some(STRATEGIES[strategy], draw),
        f"devices={1 if strategy == 'single' else ranks}",
    ]
    words += [f"mesh.{axis}={degree}" for axis, degree in degrees.items()]
    if "pp" in axes or strategy == "pipeline":
        words += _some(PIPELINE, draw)
    return [*words, *(_some(TENSOR, draw) if "tp" in axes else ()), *(_some(CONTEXT, draw) if "cp" in axes else ())]


def _some(options: Options, draw: random.Random) -> list[str]:
    return [f"{key}={draw.choice(values)}" for key, values, often in options if draw.random() < often]
