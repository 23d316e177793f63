"""Models of many kinds that are right on every mesh, and that `dtrain verify` must pass without a false alarm. The table is RIGHT."""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from wrong_models import Net, net

from dtrain.data import Batch
from dtrain.objective import Loss, logits_of
from dtrain.objective.classification import Classification


class Convolutions(nn.Module):
    """Images [B, 1, 8, 8] -> [B, 10]; `norm` of the group, instance or layer kind, or batch norm that is frozen."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        kinds: dict[str, Any] = {
            "group": lambda: nn.GroupNorm(4, 16),
            "instance": lambda: nn.InstanceNorm2d(16, affine=True),
            "frozen": lambda: nn.BatchNorm2d(16),
        }
        self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1), kinds[norm]()
        self.second, self.out = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.Linear(16, 10)
        self.frozen = norm == "frozen"

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen:
            self.norm.eval()
        h = F.gelu(self.norm(self.first(x)))
        out: Tensor = self.out((h + self.second(h)).mean((2, 3)))
        return out


class Tied(nn.Module):
    """Tokens -> logits by one matrix, with a position table that is a buffer nobody saves."""

    places: Tensor

    def __init__(self, vocab: int = 256, frozen: bool = False) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocab, 32), nn.Linear(32, vocab, bias=False)
        self.out.weight = self.embed.weight
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.register_buffer(
            "places", torch.sin(torch.arange(8)[:, None] / 10 ** torch.linspace(0, 2, 32)), persistent=False
        )
        if frozen:
            self.layer.self_attn.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.layer(
            self.embed(tokens) + self.places, src_mask=nn.Transformer.generate_square_subsequent_mask(8), is_causal=True
        )
        return {"logits": self.out(x), "hidden": x}


class Recurrent(nn.Module):
    def __init__(self, kind: str, vocab: int = 256) -> None:
        super().__init__()
        self.embed, self.cells, self.out = (
            nn.Embedding(vocab, 24),
            getattr(nn, kind)(24, 32, num_layers=2, batch_first=True),
            nn.Linear(32, vocab),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(self.embed(tokens))[0])
        return out


class Weighted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.utils.parametrizations.weight_norm(self.up),
            nn.utils.parametrizations.orthogonal(self.down),
        )


class LayerScaled(Net):
    """Gradients of very different sizes: a branch that is scaled by 1e-6, a bias that a softmax cancels, a matrix that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.zero = nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48)), nn.Linear(48, 48)
        self.scale, self.key = nn.Parameter(torch.full((48,), 1e-6)), nn.Linear(48, 48)
        nn.init.zeros_(self.zero.weight)

    def mix(self, x: Tensor) -> Tensor:
        query, keys = x.view(-1, 6, 8), self.key(x).view(-1, 6, 8)
        x = x + ((query @ keys.mT + self.key.bias[:6, None]).softmax(-1) @ query).flatten(1)
        mixed: Tensor = x + self.scale * self.branch(x) + self.zero(x)
        return mixed


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.slope = nn.PReLU()

    def mix(self, x: Tensor) -> Tensor:
        sloped: Tensor = self.slope(x)
        return sloped


class Spectrum(Net):
    """Complex numbers inside, and none outside."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(25, 2))

    def mix(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=48)


class Huber:
    """An objective of a user's own that is right: a sum, and how many it sums."""

    unit = "samples"

    def count(self, batch: Batch) -> int:
        return int(batch["targets"].numel())

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        off = logits_of(outputs) - batch["targets"]
        return Loss(F.huber_loss(off, torch.zeros_like(off), reduction="sum"), {"error": off.detach().abs().sum()})


def hf(kind: str, **options: Any) -> nn.Module:
    """A small random model of transformers, all dropout off."""
    import transformers

    sizes = {
        "Llama": ("LlamaForCausalLM", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}),
        "Qwen3": ("Qwen3ForCausalLM", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}),
        "GPT2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
        "Mamba": ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
        "Bert": (
            "BertForSequenceClassification",
            {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 4},
        ),
        "ViT": (
            "ViTForImageClassification",
            {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10},
        ),
        "ConvNext": ("ConvNextForImageClassification", {"num_channels": 1, "hidden_sizes": [16, 24], "depths": [2, 2], "num_stages": 2, "patch_size": 2, "image_size": 8, "num_labels": 10}),
    }  # fmt: skip
    name, config = sizes[kind]
    model: type[Any] = getattr(transformers, name)
    tokens = (
        {}
        if kind in ("ViT", "ConvNext")
        else {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    )
    built: nn.Module = model(model.config_class(**tokens | config | options))
    return built


class Sentences:
    """Eight tokens and one of four classes, by name."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        row = torch.randint(2, 256, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "label": int(row.sum()) % 4}


def right(model: str, words: str) -> str:
    return net("", words).replace("wrong_models.", f"right_models.{model}")


FSDP, DDP, PP = "strategy=fsdp devices=2", "strategy=ddp devices=2", "strategy=pipeline devices=2"
TOKENS = "data=synthetic data.sequence=8 objective=next_token"
IMAGES = "data=synthetic data.inputs=[1,8,8] objective=classification"
GPT = f"model=gpt model.layers=2 model.width=32 {TOKENS}"
MOE = f"model=moe model.layers=1 model.width=32 model.experts=4 {TOKENS}"
HF = "model._target_=right_models.hf"
RIGHT: dict[str, str] = {
    "gpt, ddp": f"{GPT} {DDP} microbatch=2",
    "gpt, two axes": f"{GPT} strategy=fsdp mesh.tp=2 devices=4",
    "gpt, stages": f"{GPT} {PP}",
    "gpt, sequences": f"{GPT} mesh.cp=2 devices=2",
    "gpt, muon": f"{GPT} optim=muon {FSDP}",
    "gpt, adafactor": f"{GPT} optim=adafactor {FSDP}",
    "gpt, bf16": f"{GPT} precision=bf16 {DDP}",
    "gpt, an average of the weights": f"{GPT} ema=0.9 strategy=zero2 devices=2",
    "gpt, recomputed": f"{GPT} remat=full {FSDP} microbatch=1",
    "moe, ddp": f"{MOE} {DDP} microbatch=2",
    "moe, experts": f"{MOE} strategy=fsdp mesh.ep=2 devices=2",
    "mlp, tensor": "model=mlp data=synthetic objective=regression mesh.tp=2 devices=2",
    "mlp, sgd": "model=mlp data=synthetic objective=classification optim=sgd strategy=zero1 devices=2",
    "cnn": f"model=cnn model.width=16 model.stages=2 {IMAGES} {DDP}",
    "group norm": f"model._target_=right_models.Convolutions model.norm=group {IMAGES} {FSDP}",
    "instance norm": f"model._target_=right_models.Convolutions model.norm=instance {IMAGES} {DDP} microbatch=1",
    "frozen batch norm": f"model._target_=right_models.Convolutions model.norm=frozen {IMAGES} {DDP} microbatch=2",
    "tied": f"model._target_=right_models.Tied {TOKENS} {DDP}",
    "tied, frozen": f"model._target_=right_models.Tied model.frozen=true {TOKENS} {FSDP}",
    "lstm": f"model._target_=right_models.Recurrent model.kind=LSTM {TOKENS} {DDP}",
    "gru": f"model._target_=right_models.Recurrent model.kind=GRU {TOKENS} {DDP} microbatch=1",
    "weight norm": right("Weighted", DDP),
    "gradients of all sizes": right("LayerScaled", f"{DDP} microbatch=2"),
    "frozen": right("Frozen", FSDP),
    "complex inside": right("Spectrum", DDP),
    "a block used twice": "model._target_=invariance.zoo.Plain data=synthetic objective=classification strategy=fsdp devices=2",
    "sequential": "model._target_=invariance.zoo.sequential data=synthetic objective=classification strategy=zero3 devices=2 microbatch=1",
    "an objective of one's own": right("Frozen", f"objective._target_=right_models.Huber {DDP} microbatch=2"),
    "targets that do not count": "model=gpt model.layers=1 model.width=16 data=dataset data.dataset._target_=invariance.zoo.Uneven data.outputs=29 data.holdout=0 "
    "objective=next_token strategy=ddp devices=2",
    "hugging face labels": "model._target_=invariance.zoo.llama data=dataset data.dataset._target_=invariance.zoo.Labels data.inputs=[input_ids] data.targets=labels "
    "data.shift=true data.holdout=0 objective=next_token strategy=fsdp devices=2",
    "a router's loss": "model._target_=invariance.zoo.mixtral data=dataset data.dataset._target_=invariance.zoo.Labels data.inputs=[input_ids] data.targets=labels "
    "data.shift=true data.holdout=0 objective=next_token objective.losses.aux_loss=0.02 objective.together=2 strategy=ddp devices=2",
    "llama": f"{HF} model.kind=Llama {TOKENS} {FSDP}",
    "llama, tensor": f"{HF} model.kind=Llama {TOKENS} mesh.tp=2 devices=2",
    "qwen": f"{HF} model.kind=Qwen3 {TOKENS} {PP}",
    "gpt2": f"{HF} model.kind=GPT2 {TOKENS} {DDP}",
    "mamba": f"{HF} model.kind=Mamba {TOKENS} {DDP}",
    "vit": f"{HF} model.kind=ViT {IMAGES} {DDP}",
    "convnext": f"{HF} model.kind=ConvNext {IMAGES} {DDP} microbatch=2",
    "bert": f"{HF} model.kind=Bert data=dataset data.dataset._target_=right_models.Sentences data.inputs=[input_ids,attention_mask] data.targets=label data.holdout=0 "
    f"objective=classification {DDP}",
    "one process": f"{GPT} devices=1",
}  # fmt: skip
"""What it is -> words."""


class F1(Classification):
    """Macro F1, and the histogram of the answers, out of a confusion matrix."""

    about = {"figures": {"eval_loss": "lowest", "eval_f1": "highest"}}  # noqa: RUF012

    def loss(self, outputs: Any, batch: Any) -> Loss:
        loss, classes = super().loss(outputs, batch), outputs.shape[1]
        pairs = batch["targets"] * classes + outputs.argmax(1)
        return Loss(
            loss.sum, {**loss.metrics, "confusion": torch.bincount(pairs, minlength=classes**2).view(classes, classes)}
        )

    def figures(self, sums: Any, count: float) -> dict[str, float]:
        confusion: Tensor = sums["confusion"]
        right = confusion.diagonal()
        assert confusion.sum() == count, "every sample of the batch once"
        return {"f1": (2 * right / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)).mean().item()}


class Says:
    """A hook that gives one number, by a name."""

    every = 1

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, info: Any) -> dict[str, float]:
        return {self._name: 1.0}


class Weighed:
    """A hook that gives a figure on the first rank alone, every two steps and at the end: the larger, the longer the run."""

    about = {"figures": {"eval_weight": "highest"}}  # noqa: RUF012
    every = 2

    def __call__(self, info: Any) -> dict[str, Any] | None:
        if int(os.environ.get("RANK", 0)):
            return None
        return {"weight": torch.tensor(10.0 * info.step), "eval_loss": 0.0, "text": "heavy", "well": True}
