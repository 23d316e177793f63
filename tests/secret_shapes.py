"""Fifty shapes of secrets, made anew from a seed so that none of them stands in a file; and fifty texts that are none.

Each shape is (key, text, core): what a user types, and the part of it that may be found nowhere.
"""

import base64
import json
import random
import string
from collections.abc import Callable
from typing import NamedTuple

WORD = string.ascii_letters + string.digits


class Shape(NamedTuple):
    """`key` where its name tells that it is a secret, `note` where its looks must."""

    name: str
    key: str
    text: str
    core: str


def shapes(seed: int = 0) -> list[Shape]:
    rng = random.Random(seed)

    def some(count: int, letters: str = WORD) -> str:
        """So many letters, a digit, a small one and a capital among them where there are such."""
        first = [
            next(letter for letter in letters if kind(letter))
            for kind in (str.isdigit, str.islower, str.isupper)
            if any(map(kind, letters))
        ]
        return "".join(rng.sample(first, len(first)) + rng.choices(letters, k=count - len(first)))

    capital, small = string.ascii_uppercase + "234567", "0123456789abcdef"
    by_looks: dict[str, Callable[[], tuple[str, str]]] = {
        "aws id": lambda: twice("AKIA" + some(16, capital)),
        "aws temporary id": lambda: twice("ASIA" + some(16, capital)),
        "aws secret beside its id": lambda: inside(f"AKIA{some(16, capital)}:{{}}", some(39, WORD + "/+") + "x"),
        "github classic": lambda: twice("ghp_" + some(36)),
        "github oauth": lambda: twice("gho_" + some(36)),
        "github server": lambda: twice("ghs_" + some(36)),
        "github fine-grained": lambda: twice("github_pat_" + some(22) + "_" + some(59)),
        "gitlab": lambda: twice("glpat-" + some(20)),
        "hugging face": lambda: twice("hf_" + some(34)),
        "openai": lambda: twice("sk-" + some(48)),
        "openai project": lambda: twice("sk-proj-" + some(40) + "_" + some(20)),
        "anthropic": lambda: twice("sk-ant-api03-" + some(90)),
        "stripe": lambda: twice("sk_" + "live_" + some(24)),
        "slack bot": lambda: twice("xoxb-" + some(11, string.digits) + "-" + some(24)),
        "slack app": lambda: twice("xoxp-" + some(11, string.digits) + "-" + some(30)),
        "slack webhook": lambda: inside("https://hooks.slack.com/services/{}", f"T{some(8, capital)}/B{some(8, capital)}/{some(24)}"),
        "google key": lambda: twice("AIza" + some(35)),
        "google access": lambda: twice("ya29." + some(60)),
        "npm": lambda: twice("npm_" + some(36)),
        "pypi": lambda: twice("pypi-AgEIcHlwaS5vcmc" + some(60)),
        "docker": lambda: twice("dckr_pat_" + some(27)),
        "json web token": lambda: twice(".".join([encoded({"alg": "HS256"}), encoded({"sub": some(12)}), some(43)])),
        "neptune": lambda: twice(base64.b64encode(json.dumps({"api_address": "https://app", "api_key": some(40)}).encode()).decode()),
        "private key": lambda: block(some(64), some(64)),
        "private key, rsa": lambda: block(some(64), some(64), kind="RSA "),
        "azure client secret": lambda: twice("abc8Q~" + some(34)),
        "azure connection string": lambda: inside("DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};EndpointSuffix=core", some(86) + "=="),
        "azure service bus": lambda: inside("Endpoint=sb://a.net/;SharedAccessKeyName=root;SharedAccessKey={}", some(43) + "="),
        "azure sas": lambda: inside("https://a.blob.core.windows.net/c/f?sv=2022-11-02&se=2030&sr=b&sp=r&sig={}", some(43) + "%3D"),
        "databricks": lambda: twice("dapi" + some(32, small)),
        "digital ocean": lambda: twice("dop_v1_" + some(64, small)),
        "sendgrid": lambda: twice("SG." + some(22) + "." + some(43)),
        "telegram": lambda: twice(some(10, string.digits) + ":AA" + some(33)),
        "nvidia": lambda: twice("nvapi-" + some(64)),
        "groq": lambda: twice("gsk_" + some(52)),
        "vault": lambda: twice("hvs." + some(90)),
        "password of a url": lambda: inside("postgresql://me:{}@host:5432/db", some(14)),
        "password of a proxy": lambda: inside("http://:{}@proxy:3128/", some(14)),
        "signed url of s3": lambda: inside("https://b.s3.amazonaws.com/k?X-Amz-Algorithm=A&X-Amz-Expires=9&X-Amz-Signature={}", some(64, small)),
        "session of a signed url": lambda: inside("https://b.s3.amazonaws.com/k?X-Amz-Security-Token={}&X-Amz-Date=2026", some(90)),
        "signed url of gcs": lambda: inside("https://storage.googleapis.com/b/k?X-Goog-Expires=9&X-Goog-Signature={}", some(64, small)),
        "signed url, old": lambda: inside("https://b.s3.amazonaws.com/k?Expires=1790000000&Signature={}", some(27) + "%3D"),
        "bearer": lambda: inside("Authorization: Bearer {}", some(40)),
        "basic, without its header": lambda: inside("model.header=Basic {}", base64.b64encode(f"me:{some(12)}".encode()).decode()),
        "basic": lambda: inside("Authorization: Basic {}", base64.b64encode(f"me:{some(12)}".encode()).decode()),
    }  # fmt: skip
    by_name = {
        "wandb": ("api_key", some(40, small)),
        "password": ("password", "correct-horse-battery-" + some(6)),
        "token": ("auth.access_token", some(24)),
        "aws secret": ("awsSecretAccessKey", some(40, WORD + "/+")),
        "below a holder": ("storage_options.key", some(20)),
        "number": ("client_secret", str(rng.randrange(10**11, 10**12))),
    }
    made = [Shape(name, "note", *make()) for name, make in by_looks.items()]
    return made + [Shape(name, key, value, value) for name, (key, value) in by_name.items()]


def twice(text: str) -> tuple[str, str]:
    return text, text


def inside(frame: str, core: str) -> tuple[str, str]:
    return frame.format(core), core


def block(first: str, second: str, kind: str = "") -> tuple[str, str]:
    return f"-----BEGIN {kind}PRIVATE " + f"KEY-----\n{first}\n{second}\n-----END {kind}PRIVATE KEY-----\n", second


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


INNOCENT = (
    "data=tokens", "generate.tokens=400", "data.tokenizer=bytes", "token_type=bpe", "keyword=monkey", "monkey=banana", "model.kv_heads=2", "hook.sample.tokens=200",
    "objective=next_token", "pad_token='<pad>'", "eos_token: </s>", "mask_token=[MASK]", "tokens_per_second 81,234", "max_new_tokens=512", "vocab: 50257",
    "author: Ada Lovelace", "authority=local", "secretary=Bob", "passes=3", "single_pass=true", "bypass=none", "primary_key=id", "sort_key: name", "key=value",
    "KeyError: 'blocks.0.attention.q.weight'", "commit 3f786850e387550fdab836ed7e6dc881de23001b", "digest 2c26b46b68ff", "sha256:" + "0123456789abcdef" * 4,
    "s3://bucket/runs/gpt-stdlib-1a2b3c4d/checkpoints/step-00000100/5f0c", "https://host:8080/a/b?page=2&size=10", "ssh://git@github.com/org/repo.git",
    "memory://run", "file:///data/tokens/train-00001-of-00010.npy", "tcp://127.0.0.1:29500", "task-oriented-dialogue-with-long-names-2024", "sk-learn", "risk-averse-policy-of-1000-steps",
    "rank 1 failed in step 3 (positions 24 to 31 of the order): ValueError: planned", "    token = tokens[index]", "    password = getpass.getpass()", "    self.token = token",
    "def login(token: str, password: str | None = None) -> None:", "optim.betas=[0.9,0.95]", "model._target_=torch.nn.TransformerEncoderLayer",
    "Basic understanding of bearer bonds", "the signature of forward is (self, x)", "unexpected token: }", "of secrets: those are kept in memory", "session 3 of 5", "dp_shard=2 tp=4", "auth=anon",
    "hydra.searchpath=[conf]", "lr=0.001 at step 100: loss 2.3456, norm 0.9876",
)  # fmt: skip
"""What must stay readable to the letter."""
