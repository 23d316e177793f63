"""What people type by the habits of other tools: each is answered with what to type here, and `plan` takes that."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.compose.check import sayable
from dtrain.config import files
from dtrain.config.answers import FLAGS, SAID
from dtrain.config.elsewhere import ELSEWHERE, MEANT, VERBS
from dtrain.config.schema import GROUPS, LISTS
from dtrain.config.verbs import VERBS as OUR_VERBS
from dtrain.errors import WordsError, nearest
from dtrain.resolve import resolve

EARLY, LOGGERS = "stop.metric=eval_loss stop.patience=3", "logger=[console] and those you want"
HUB, IMAGES = (
    "model=hf model.name=<its name at Hugging Face, or its folder>",
    "data=images data.path=<folder of class folders>",
)
AGAIN = "type the words of the run again, with the same out=<its folder>"
HABITS = f"""
strategy=deepspeed -> strategy=zero2
strategy=deepspeed_stage_2 -> strategy=zero2
strategy=horovod -> strategy=ddp
strategy=ddp_find_unused_parameters_true -> strategy=ddp
strategy=fsdp_native -> strategy=fsdp
strategy=dp -> strategy=ddp
strategy=ddp_sharded -> strategy=zero2
strategy=MirroredStrategy -> strategy=ddp
precision=16-mixed -> precision=fp16
precision=bf16-mixed -> precision=bf16
precision=16 -> precision=fp16
precision=mixed_bfloat16 -> precision=bf16
precision=amp_bf16 -> precision=bf16
fp16=true -> precision=fp16
bf16=True -> precision=bf16
bf16=False -> precision=fp32
--mixed_precision bf16 -> precision=bf16
amp=true -> precision=bf16
optim=lion -> optim=adamw
optim=lamb -> optim=muon
optim=adam -> optim=adamw
optim=adamw_torch -> optim=adamw
optimizer=muon -> optim=muon
optimizer=adamw -> optim=adamw
optimizer=rmsprop -> optim=sgd
optimizer.lr=1e-3 -> optim.lr=1e-3
lr=1e-3 -> optim.lr=1e-3
learning_rate=1e-3 -> optim.lr=1e-3
weight_decay=0.1 -> optim.weight_decay=0.1
adam_beta2=0.95 -> optim.betas=[<beta1>,0.95]
batch_size=32 -> batch=32
data.batch_size=32 -> batch=32
per_device_train_batch_size=8 -> microbatch=8
gradient_accumulation_steps=4 -> accumulate=4
accumulate_grad_batches=4 -> accumulate=4
--update-freq 4 -> accumulate=4
max_epochs=3 -> epochs=3
num_train_epochs=3 -> epochs=3
trainer.max_epochs=3 -> epochs=3
--epochs 3 -> epochs=3
max_steps=100 -> steps=100
--train-iters 100 -> steps=100
steps_per_epoch=10 -> steps=<epochs x 10>
--config cfg.yaml -> recipe=cfg.yaml
--config-name=train -> recipe=train
-c cfg.yaml -> recipe=cfg.yaml
gpus=2 -> devices=2
accelerator=gpu -> Leave it out
num_nodes=2 -> nodes=2
num_processes=4 -> devices=4
--nproc-per-node=2 -> devices=2
--nproc_per_node 2 -> devices=2
-np 4 -> devices=4
--rdzv_endpoint=a:1 -> launcher=local launcher.here=1 launcher.address=<host>:<port>
--standalone -> Leave it out
--hostfile hosts -> launcher=ssh launcher.hosts=[<host>,<host>] nodes=2
logger=neptune -> {LOGGERS}
logger=wandblogger -> logger=[wandb]
logger=csvlogger -> logger=[csv]
report_to=wandb -> logger=[console,wandb]
report_to=neptune -> {LOGGERS}
report_to=none -> logger=[console]
wandb_log=True -> logger=[console,wandb]
wandb_project=mine -> logger=[console,wandb] logger.wandb.project=mine
resume_from_checkpoint=runs/a -> {AGAIN}
ckpt_path=last.ckpt -> {AGAIN}
resume=true -> resume=auto
resume=runs/a -> {AGAIN}
num_workers=4 -> data.workers=4 with data=images
data.num_workers=4 -> data.workers=4 with data=images
scheduler=linear -> schedule=linear
lr_scheduler_type=linear -> schedule=linear
lr_scheduler_type=cosine -> schedule=cosine schedule.floor=0
schedule=CosineAnnealingLR -> schedule=cosine schedule.floor=0
schedule=WarmupDecayLR -> schedule=linear
schedule=OneCycleLR -> schedule=cosine
warmup_steps=100 -> schedule.warmup=100
warmup_ratio=0.1 -> schedule.warmup=0.1
min_lr=1e-5 -> schedule.floor=<1e-5 / optim.lr>
gradient_checkpointing=true -> remat=full
gradient_checkpointing=False -> remat=none
gradient_clip_val=1.0 -> clip=1.0
max_grad_norm=1.0 -> clip=1.0
max_grad_norm=0.5 -> clip=0.5
gradient_clipping=0.0 -> clip=null
clipnorm=1.0 -> clip=1.0
seed_everything=42 -> seed=42
val_check_interval=100 -> evaluate.every=100
val_check_interval=0.25 -> evaluate.every=<0.25 x samples / batch>
check_val_every_n_epoch=1 -> evaluate.every=epoch
val_check_interval=1.0 -> evaluate.every=epoch
eval_strategy=epoch -> evaluate.every=epoch
save_strategy=epoch -> checkpoint.every=epoch
saves_per_epoch=1 -> checkpoint.every=epoch
eval_steps=100 -> evaluate.every=100
eval_strategy=no -> evaluate.every=0
evaluate.every=null -> evaluate.every=0
checkpoint.every=null -> checkpoint.every=0
save_steps=null -> checkpoint.every=0
validation_split=0.1 -> data.holdout=0.1
trainer.check_val_every_n_epoch=2 -> evaluate.every=<2 x samples / batch>
every_n_epochs=5 -> checkpoint.every=<5 x samples / batch>
saves_per_epoch=4 -> checkpoint.every=<samples / batch / 4>
eval_steps=0.1 -> evaluate.every=<0.1 x steps>
warmup_epochs=5 -> schedule.warmup=<5 x samples / batch>
limit_train_batches=10 -> steps=<epochs x 10>
trainer.limit_train_batches=0.5 -> steps=<epochs x 0.5 x samples / batch>
limit_val_batches=0.5 -> evaluate.samples=<0.5 x held-out samples>
fast_dev_run=true -> steps=2
overfit_batches=1 -> data.holdout=0
callbacks=early_stopping -> {EARLY}
early_stopping.patience=3 -> {EARLY}
trainer=ddp -> strategy=ddp
save_top_k=3 -> checkpoint.keep=3
load_best_model_at_end=True -> checkpoint.best=eval_loss
load_best_model_at_end=False -> Leave it out
early_stopping=false -> Leave it out
metric_for_best_model=accuracy -> checkpoint.best=eval_accuracy
metric_for_best_model=f1 -> evaluate.metrics=[f1] checkpoint.best=eval_f1
monitor=val_loss -> checkpoint.best=eval_loss
greater_is_better=false -> checkpoint.best_is=lowest
greater_is_better=true -> checkpoint.best_is=highest
mode=max -> checkpoint.best_is=highest
output_dir=runs/a -> out=runs/a
save_folder=runs/a -> out=runs/a
deepspeed=ds.json -> dtrain import ds.json to=mine.yaml
zero_stage=3 -> strategy=zero3
--offload_optimizer_device cpu -> strategy=fsdp strategy.offload=cpu
zero_optimization.offload_optimizer.device=cpu -> strategy=fsdp strategy.offload=cpu
zero_optimization.offload_param.device=cpu -> strategy=fsdp strategy.offload=cpu
offload_optimizer.device=cpu -> strategy=fsdp strategy.offload=cpu
bf16.enabled=true -> precision=bf16
data=jsonl data.path=a.jsonl "data.targets=[y,z]" -> A row has one column of the target. Type data.targets=<column>
reshard_after_forward=false -> strategy=fsdp strategy.reshard=never
tensor_parallel_size=2 -> mesh.tp=2
tp=2 -> mesh.tp=2
torch_compile=true -> compile=blocks
compile=true -> compile=blocks
jit_compile=True -> compile=blocks
profiler=simple -> Leave it out
enable_progress_bar=false -> logger=[tensorboard]
sync_batchnorm=true -> Leave it out
auto_lr_find=true -> dtrain -m optim.lr=1e-4,3e-4,1e-3 steps=100
swa=true -> ema=0.999
loss=mse -> objective=regression
model=bert -> {HUB}
model=resnet18 -> model=cnn
model=gpt2 -> {HUB}
data=mnist -> {IMAGES}
data=cifar10 -> {IMAGES}
data=imagefolder -> {IMAGES}
dataset=imdb -> data=hf data.path=<its folder after save_to_disk> data.targets=<column>
model.pretrained=true -> init=<weights>
+model.foo=1 -> model.width
~optim.lr -> optim.lr=<another word>
--help -> dtrain --help
--version -> dtrain --version
--multirun -> only train takes it
hydra.sweep.dir=out -> sweep.out=out
hydra.run.dir=x -> out=x
--cfg job -> dtrain plan
--info -> dtrain plan
--resolve -> dtrain plan
experiment=example -> recipe=<its file or name>
debug=default -> steps=2
hparams_search=mnist_optuna -> dtrain -m optim.lr=1e-4,1e-3
train -> dtrain train
fit -> dtrain train
test -> dtrain evaluate
--lr 1e-3 -> optim.lr=1e-3
--strategy ddp -> strategy=ddp
--strategy deepspeed_stage_3 -> strategy=zero3
verbose=true -> log.every=1
trainer.precision=16-mixed -> precision=fp16
trainer.strategy=ddp -> strategy=ddp
optim.name=adam -> optim=adamw
scheduler.name=cosine -> schedule=cosine
scheduler.warmup=10 -> schedule.warmup=10
metrics=[accuracy] -> evaluate.metrics=[accuracy]
cuda=true -> Leave it out
momentum=0.9 -> has optim.momentum
mode=min -> checkpoint.best_is=lowest
checkpoint=last -> {AGAIN}
ema=true -> ema=0.999
peft.r=8 -> adapter=lora adapter.rank=8
--resume -> resume=<auto, never, must>
--module train -> dtrain <words>
""".strip().splitlines()
"""What is typed -> what the answer has."""
FILLED = {
    "<steps without the warm-up>": "900", "<epochs x 10>": "30", "<samples / batch>": "30", "<1e-5 / optim.lr>": "0.1", "<another word>": "1e-3",
    "<0.25 x samples / batch>": "8", "<2 x samples / batch>": "60", "<5 x samples / batch>": "150", "<samples / batch / 4>": "8",
    "<0.1 x steps>": "10", "<epochs x 0.5 x samples / batch>": "30", "<0.5 x held-out samples>": "50", "<host>,<host>": "a,b", "<host>:<port>": "host:29500", "<folder of class folders>": "{folder}/images",
    "<its name at Hugging Face, or its folder>": "{folder}/bert", "<its folder after save_to_disk>": "{folder}/rows", "<column>": "label", "<weights>": "{folder}/w.safetensors",
    "<its file or name>": "digits", "<its folder>": "{folder}/run", "<beta1>": "0.9", "<auto, never, must>": "auto",
}  # fmt: skip
BESIDE = {
    "checkpoint.best_is=lowest": "checkpoint.best=eval_loss", "checkpoint.best_is=highest": "checkpoint.best=eval_accuracy model=mlp data=synthetic objective=classification", "checkpoint.best=eval_accuracy": "model=mlp data=synthetic objective=classification", "data.targets": "data=jsonl data.path={folder}/rows.jsonl",
    "epochs": "data=synthetic", "recipe": "recipe=digits", "data.workers": "data.path={folder}/images", "launcher": "nodes=2", "objective": "model=mlp data=synthetic",
    "mesh.tp": "devices=2", "accumulate": "batch=32", "adapter": "init={folder}/run", "evaluate.metrics": "model=mlp data=synthetic objective=classification", "microbatch": "batch=32", "model": "data=synthetic", "sweep.out": "-m",
}  # fmt: skip
"""What else such a run has, or has in place of a file that is not there."""


@cache
def told(words: str) -> str:
    """What is wrong with words, under ddp if they name no layout: to search for one takes long."""
    asked = shlex.split(words)
    is_open = not {word.split("=")[0] for word in asked} & {"strategy", "mesh.tp", "recipe"}
    try:
        resolve(compose([*asked, *["strategy=ddp"] * is_open]), Cluster(gpus=4, cpus=8))
    except WordsError as error:
        return str(error)
    return ""


def typed(words: str, folder: Path) -> list[str]:
    """The words of an answer with its placeholders filled, and what such a run has beside them."""
    for placeholder, value in FILLED.items():
        words = words.replace(placeholder, value)
    given = [word for word in words.replace("with", " ").split() if re.match(r"[a-z_.]+=", word)]
    keys = {word.split("=")[0] for word in given}
    beside = [
        more
        for key, mores in BESIDE.items()
        if key in {*keys, *given}
        for more in mores.split()
        if more.split("=")[0] not in keys
    ]
    return [
        word.replace("{folder}", str(folder))
        for word in given + beside
        if word not in ("recipe=cfg.yaml", "recipe=train")
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("habits")
    (root / "bert").mkdir()
    return root


@pytest.mark.campaign("commands")
def test_what_is_typed_by_habit_is_answered_and_the_answer_is_taken(folder: Path) -> None:
    wrong = {}
    for line in HABITS:
        typed_words, _, answer = line.partition(" -> ")
        said = told(typed_words)
        if answer not in said or len(said) > 600:
            wrong[line] = said
        elif "=" in answer and not answer.startswith("dtrain "):
            words = typed(answer, folder)
            if "-m" not in words and (refused := told(shlex.join(words))):
                wrong[line] = f"{words}: {refused}"
    assert wrong == {}


TYPED = re.compile(r"(?<![\w.<-])([a-z_]+(?:\.[a-z_]+)*)=([\w.]*)")
NOT_OF_A_RUN = {"to", "python", "trust", "hydra.searchpath", "model.config", "CUDA_VISIBLE_DEVICES"}


def test_every_word_of_the_table_is_one_of_ours() -> None:
    texts = [text for said in SAID.values() for text in (said.values() if isinstance(said, dict) else [said])]
    texts += [
        f"{key}={text}" if re.fullmatch(r"[\w.]*\w", text) else text
        for key, each in MEANT.items()
        for text in each.values()
    ]
    known = {
        *sayable(),
        *NOT_OF_A_RUN,
        *(f"{group}._target_" for group in GROUPS),
        *(f"{group}.mine._target_" for group in LISTS),
    }
    wrong = set()
    for text in [*texts, *FLAGS.values()]:
        assert "=" in text or text.endswith("."), text
        for key, ended in TYPED.findall(text):
            value = ended.rstrip(".")
            if (key not in known and key != "data.dataset._target_") or (
                key in GROUPS and value and value not in files.groups()[key]
            ):
                wrong.add(f"{key}={value}")
    assert wrong == set()
    assert {*ELSEWHERE, *MEANT} - {*sayable()} == set()
    assert not {*VERBS} & {*OUR_VERBS} and {*VERBS.values()} <= {*OUR_VERBS}


@pytest.mark.parametrize(
    ("word", "names", "meant"),
    [
        ("deepspeed", ["seed", "steps"], ""), ("experiment", ["expect"], ""), ("model.pretrained", ["model.tied", "model.heads"], ""), ("resolve", ["resume"], ""),
        ("accuracy", ["eval_loss", "eval_accuracy"], "eval_accuracy"), ("optim.lrr", ["optim.lr", "optim.eps"], "optim.lr"), ("fdsp", ["ddp", "fsdp"], "fsdp"),
    ],
)  # fmt: skip
def test_a_name_is_near_by_a_slip_or_a_part_in_common(word: str, names: list[str], meant: str) -> None:
    hint = nearest(word, names)
    assert hint == (f" Did you mean {meant}?" if meant else f" Allowed: {', '.join(sorted(names))}.")
