"""Patterns of secrets: names of secrets, prefixes of issued keys, and values that are plainly no secret."""

import os
import re
from functools import cache
from typing import Any

from dtrain.secrets.near import is_near

STRONG = re.compile(
    r"(?:^|_)(?:secrets?|credentials?|authorization|jwt|connection_string|conn_str|pwd|secret_id)$|pass(?:word|wd|"
    r"phrase|code)s?$"
    r"|(?:^|_)(?:passwor[td]|passord|kennwort|wachtwoord|mots?_?de_?passe|contrasena|contrasenya|senha|haslo|heslo|"
    r"jelszo|losenord|adgangskode|salasana)$"
    r"|(?:^|_)(?:account|admin|client|db|email|ftp|http|imap|key|keystore|login|mail|master|mongo|mysql|pg|postgres|"
    r"proxy|redis|root|server|smtp|sql|ssh|user|wifi)"
    r"_?pass$|(?:connectionstring|clientsecret|authheader|accesscode)$"
    r"|(?:^|_)(?:creds?|auth_headers?|webhooks?(?:_ur[li]s?)?|pass_(?:word|phrase|code|key)|passkey|pin_?code|psk|"
    r"mnemonic|seed_phrase|jsession_?id|php_?sess_?id)$"
    r"|(?:^|_)(?:access|activation|auth|authorization|backup|invite|login|otp|recovery|security|sms|"
    r"verification)_codes?$"
    r"|(?:^|_)(?:access|account|admin|anthropic|api|app|auth|aws|azure|client|comet|consumer|deploy|encryption|"
    r"function|gcp|github|gitlab|google|hf|hmac|host"
    r"|license|master|mlflow|neptune|openai|private|root|s3|secret|service|shared|signing|slack|ssh|storage|stripe|"
    r"subscription|team|wandb|webhook)_?keys?(?:_id)?$"
)
WEAK = re.compile(
    r"^pass$|(?:^|_)(?:auth|bearer|cookies?|csrf|dsn|mfa|otp|pat|pin|pw|sas|session|session_?id|sid|sig|signature|"
    r"totp|xsrf|hmac|salt|signing|service_account)$|^private$|tokens?$"
)
"""Names that often mean something else: in running text, their value is masked only if it looks like a secret."""
OF_DIGITS = re.compile(r"^pass$|(?:^|_)(?:pin|pw|otp|totp|mfa)$")
"""Weak names whose secrets may be whole numbers."""
FOLDERS = ("PWD", "OLDPWD")
"""Variables of a shell that hold folders, although a password may have the first name."""
SPECIAL = (
    r"tokens$|^(?!.*(?:access|api|auth|bot|hf|hub|id|personal|refresh|security|session|user)token$).*[a-z0-9]token$"
    r"|(?:^|_)(?:audio|begin|bos|class|cls|dist|end|eod|eos|eot|extra|first|frame|image|last|mask|max|min|new|newline|"
    r"next|no|num|pad|patch|per|prefix"
    r"|prompt|query|register|sep|sink|special|start|stop|suffix|think|tool|unk|video)_token$"
)
"""Names of models and tokenizers, which end in token or tokens: tokens, next_token, pad_token."""
HOLDERS = re.compile(r"(?:^|_)(?:storage_options|credentials?|secrets|auth|headers|cookies)$")
"""Names that contain other values: a text below them counts as a secret unless it is plainly none; in headers and
cookies, the inner names decide.
"""
NUMBERED = re.compile(r"(?:_?\d+|_(?:value|string|base64|b64|raw|text|list|map|dict))$")
LOT, DIGEST = re.compile(r"(?<![\w/.@:%-])[A-Za-z0-9+=]{20,}(?![\w/.@:%-])"), re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MODES = frozenset((
    "anon", "anonymous", "auto", "basic", "bearer", "browser", "bytes", "cache", "cloud", "default", "digest", "env",
    "false", "google_default",
    "iam", "kerberos", "none", "null", "oauth", "oauth2", "off", "on", "optional", "any", "str", "int", "bool", "float",
    "string", "required",
    "secretstr", "true", "unset", "yes", "no",
))  # fmt: skip
"""Values that name a mode or a type, not a secret."""
OF_FILES = re.compile(r"\.(?:cfg|crt|ini|json|key|pem|toml|txt|ya?ml)$")
OBSERVERS = ("logger.", "hook.")
"""Groups in which an argument `key` is the key of a service; elsewhere it may be the name of a column."""
MIXED = re.compile(r"(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[\w+/=-]{12,}", re.ASCII)
SHAPES = {
    "AWS access key id": r"A(?:KIA|SIA|BIA|CCA|IDA|ROA)[A-Z0-9]{16}(?![A-Za-z0-9])",
    "GitHub": r"gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}",
    "GitLab": r"gl(?:agent|cbt|dt|ft|oas|pat|ptt|rt|soat|imt)-[\w.-]{20,}",
    "Hugging Face": r"(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "OpenAI, Anthropic and those like them": r"sk-(?=[\w-]*\d)[\w-]{20,}",
    "Stripe": r"(?:[rs]k_(?:live|test)|whsec)_[A-Za-z0-9]{16,}",
    "Slack": r"xox[a-z](?:\.xox[a-z])?-[\w-]{10,}|xapp-\d-[\w-]{10,}",
    "webhook": r"hooks\.slack\.com/(?:services|workflows)/[\w/+-]{20,}"
    r"|discord(?:app)?\.com/api/webhooks/\d+/[\w-]{20,}",
    "Google": r"AIza[\w-]{30,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}|1//0[\w-]{20,}",
    "npm, PyPI, Docker": r"npm_[A-Za-z0-9]{30,}|pypi-AgE[\w-]{20,}|dckr_[a-z]+_[\w-]{20,}",
    "JSON web token": r"ey[IJ][\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|eyJ[\w+/-]{60,}={0,2}",
    "Azure": r"[\w.~]{3}\dQ~[\w.~-]{31,}",
    "Databricks, DigitalOcean": r"dapi[0-9a-f]{32}(?:-\d)?|do[opr]_v1_[0-9a-f]{64}",
    "SendGrid, Twilio, Mailgun": r"SG\.[\w-]{16,}\.[\w-]{16,}|(?:SK|AC)[0-9a-f]{32}|key-[0-9a-f]{32}",
    "Telegram": r"\d{8,10}:AA[\w-]{33}",
    "Shopify, Square": r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|sq0[a-z]{3}-[\w-]{22,}",
    "Notion, Linear, Postman": r"(?:ntn|secret)_[A-Za-z0-9]{40,}|lin_(?:api|oauth)_[A-Za-z0-9]{32,}|"
    r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}",
    "Grafana, Vault, Terraform": r"gl(?:c|sa)_[\w+/=]{32,}|hv[bsr]\.[\w-]{24,}|[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60,}",
    "Groq, Replicate, NVIDIA, W&B, xAI, Perplexity": r"gsk_\w{40,}|r8_\w{37}|nvapi-[\w-]{40,}|wandb_v1_\w{20,}|"
    r"xai-\w{40,}|pplx-\w{40,}",
    "LangSmith, Pinecone, Together, RunPod, Fireworks, Cerebras": r"lsv2_[a-z]{2}_[0-9a-f]{32}_[0-9a-f]{8,}|"
    r"pcsk_\w{40,}|tgp_v1_[\w-]{30,}|rpa_[A-Z0-9]{40,}"
    r"|fw_[A-Za-z0-9]{22,}|csk-[a-z0-9]{40,}",
    "Doppler, Figma, Atlassian, Airtable, New Relic, Supabase, Tailscale, Fly, Cloudflare": r"dp\.(?:pt|st|ct|sa|scim|"
    r"audit)\.[\w.-]{40,}|figd_[\w-]{30,}"
    r"|AT[AC]TT3[\w=-]{50,}|pat[A-Za-z0-9]{14}\.[0-9a-f]{64}|NRAK-[A-Z0-9]{27}|sbp_[0-9a-f]{40}|"
    r"tskey-[a-z]+-[\w-]{16,}|fm[12][ar]?_[\w+/=-]{40,}"
    r"|v1\.0-[0-9a-f]{24}-[0-9a-f]{100,}",
    "Alibaba, age, Planetscale": r"LTAI[A-Za-z0-9]{12,}|AGE-SECRET-KEY-1[0-9A-Z]{58}|pscale_(?:tkn|pw|"
    r"oauth)_[\w.-]{32,}",
}
"""Issuer -> prefix of its keys: https://docs.github.com/en/code-security/secret-scanning,
https://github.com/gitleaks/gitleaks, and the documentation of the issuers.
"""
KEY_BLOCK = (
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----(?:(?!-----)[\s\S])*(?:-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----)?"
)
BESIDE = re.compile(r"(?<![A-Za-z0-9/+=])(?=[A-Za-z0-9/+]*[G-Zg-z/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9+=]|/[A-Za-z0-9+])")
"""An AWS secret key has no prefix: 40 such characters count as one near an access key id."""
HINT = re.compile(
    r"pass|pwd|secret|token|cred|auth|key|jwt|conn|sig|cookie|session|sas|bearer|basic\s|pat\b|webhook|_codes?\b|"
    r"accesscode|mnemonic|phrase|sess_?id"
    r"|(?<![a-z])(?:csrf|dsn|mfa|otp|pin|psk|pw|sid|totp|xsrf|hmac|salt)(?![a-z])|pin_?code|private|service_?account"
    r"|kennwort|wachtwoord|contrasen|senha|haslo|heslo|jelszo|losenord|adgangskode|salasana",
    re.I,
)


def strength(name: str) -> int:
    """How surely the last part of a dotted key names a secret: 2, 1 or 0. `key` alone does only among the options of a
    storage.
    """
    return 2 if name.endswith("options.key") else _strength(name.rsplit(".", 1)[-1])


@cache
def _strength(name: str) -> int:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", "_", name).strip("_").lower()
    plain = NUMBERED.sub("", words) or words
    if any(each.endswith(("token", "tokens")) and re.search(SPECIAL, each) for each in (words, plain)):
        return 0
    if STRONG.search(plain) or STRONG.search(words):
        return 2
    return 1 if WEAK.search(plain) or is_near(plain) else 0


def is_secret(name: str, value: Any) -> bool:
    """Whether `value` under this name is a secret. A number is one only if the name leaves no doubt."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return False
    leaf = name.rsplit(".", 1)[-1].lower()
    if isinstance(value, int):
        return strength(name) == 2 or (value > 99 and bool(OF_DIGITS.search(leaf)))
    if strength(name) > 0 or (leaf == "key" and name.startswith(OBSERVERS)):
        return not plain(value) and not is_folder(name, value)
    return leaf == "key" and (is_high_entropy(value) or bool(MIXED.fullmatch(value)))


def is_folder(name: str, value: str) -> bool:
    """Whether a value is that of a variable of the shell which holds a folder: PWD=/home/me."""
    return re.split(r"[.\s]", name)[-1] in FOLDERS and value.startswith(("/", "~", "./", "../", "$"))


def secret_variable(text: str) -> bool:
    """Whether an interpolation reads an environment variable that has the name of a secret."""
    return any(strength(name) for name in re.findall(r"\$\{oc\.env:\s*['\"]?([\w.-]+)", text))


def plain(value: str) -> bool:
    """Whether a value is plainly no secret: a mode, a token such as <pad>, a path, or a placeholder."""
    bare = value.strip()
    is_path = bare.startswith(("/", "./", "../", "~/"))
    if is_path and (OF_FILES.search(bare) or os.path.exists(os.path.expanduser(bare))):  # noqa: PTH110, PTH111
        return True
    return (
        bare.lower() in MODES
        or not bare.strip("*.-_ ")
        or bare.startswith(("${", "***"))
        or (bare[0] + bare[-1] in ("<>", "[]") and len(bare) < 40)
    )


def is_high_entropy(value: str) -> bool:
    """Whether the value looks like random letters and digits, unlike any name that a person would choose."""
    return (
        bool(re.fullmatch(r"[A-Za-z0-9+=]{20,}", value)) and not value.isdigit() and len(re.findall(r"\d+", value)) > 2
    )


def random(value: str) -> bool:
    return (len(value) > 5 and any(letter.isdigit() for letter in value)) or len(value) > 19


def unquoted(value: str) -> str:
    bare = value.strip()
    return bare[1:-1] if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\"" else bare


@cache
def shapes() -> re.Pattern[str]:
    begins = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
    return re.compile(rf"{KEY_BLOCK}|{begins}(?:{'|'.join(SHAPES.values())})")
