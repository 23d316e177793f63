"""What is a secret and what is not, text by text; that none reaches a disk or a screen is tests/faults/test_secrets_nowhere.py."""

import base64
import json
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from secret_shapes import INNOCENT, Shape, shapes

from dtrain import secrets
from dtrain.secrets import patterns

SHAPES = shapes()

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test leaves a secret known, nor finds one."""
    monkeypatch.setattr(secrets, "_kept", {})
    monkeypatch.setattr(secrets, "_known", {})


def test_there_are_fifty() -> None:
    assert len(SHAPES) >= 50 and len({shape.text for shape in SHAPES}) == len(SHAPES)
    assert len(INNOCENT) >= 50


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize(
    "frame", ["{}", "ValueError: cannot log in with {}, sorry.", '{{"why": "{}"}}', "a\n  b = '{}'\nc"]
)
def test_no_text_shows_one(shape: Shape, frame: str) -> None:
    word = shape.text if shape.key == "note" else f"{shape.key.split('.')[-1]}={shape.text}"
    text = frame.format(word)
    if shape.key == "storage_options.key":
        pytest.skip("`key` alone is no secret's name; below storage_options it is")
    assert shape.core in text
    shown = secrets.masked(text)
    assert shape.core not in shown and "***" in shown
    assert shown.startswith(text[: text.index(word)]), "what stands before it stays"
    assert secrets.masked(shown) == shown


@pytest.mark.parametrize("text", INNOCENT)
def test_what_is_none_stays_readable(text: str) -> None:
    assert secrets.masked(text) == text
    assert secrets.redact_tree({"text": [text]}) == {"text": [text]}
    assert text[0] == " " or secrets.redact_arg(text) == text


def test_the_readme_stays_readable() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert secrets.masked(page.read_text()) == page.read_text(), page.name


@pytest.mark.parametrize(
    "name",
    ["password", "DB_PASSWORD", "apiKey", "api-key", "X-Api-Key", "hf_token", "AWS_SECRET_ACCESS_KEY", "awsSecretAccessKey", "accountKey", "sig", "client_secret",
     "connection_string", "private_key", "session_id", "Authorization", "passphrase", "wandb_key", "token_1", "password2", "SAS", "refreshToken", "db_pass",
     "pass", "pw", "user_pw", "pin", "otp", "totp", "creds", "aws_creds", "access_code", "accessCode", "auth_header", "authHeader", "sessionid", "sessionId", "webhook", "webhook_url",
     "slackWebhook", "dsn", "passcode", "pin_code", "psk", "recovery_codes", "smtp_pass", "csrf", "x-auth-header",
     "hmac", "salt", "hash_salt", "signing", "private", "service_account", "passwort", "mot_de_passe", "motDePasse", "contrasena", "kennwort", "senha", "wachtwoord",
     "pasword", "passwrod", "db_passwordd", "secrt", "client_sercet", "credntials", "api_kye", "apkey", "acces_token", "auth_tokn", "toekn", "private_kay"],
)  # fmt: skip
def test_a_name_of_a_secret(name: str) -> None:
    assert patterns.is_secret(f"logger.mine.{name}", "Xk29fjw0")
    assert secrets.redact_tree({"a": [{name: "Xk29fjw0"}]}) == {"a": [{name: "***"}]}
    assert secrets.redact_arg(f"logger.mine.{name}=Xk29fjw0") == f"logger.mine.{name}=***"


@pytest.mark.parametrize(
    "name",
    ["tokens", "tokenizer", "token_type", "pad_token", "next_token", "eos_token", "max_new_tokens", "tokens_per_second", "keyword", "monkey", "kv_heads", "keys",
     "author", "secretary", "single_pass", "bypass", "path", "primary_key", "design", "signal", "assignment", "sessions", "basic", "compass", "key_size", "passes", "forward_pass", "num_pass", "pin_memory", "keep", "keyframes", "spin", "pinned", "encode",
     "code", "country_code", "source_code", "webhooks_seen", "credit", "header", "headers_only", "side", "pwm", "power", "monkey_key_size", "password_length",
     "token_budget", "salt_lake", "salted", "salt_ratio", "private_data", "is_private", "service_account_name", "signing_date", "design_ing", "passed", "passes_per_day", "passport",
     "secretion", "sector", "decret", "app_page", "map_key", "step_key", "taken", "token_list_size", "credential_free", "author", "keyword"],
)  # fmt: skip
def test_a_name_of_none(name: str) -> None:
    assert not patterns.is_secret(f"data.{name}", "Xk29fjw0")
    assert secrets.masked(f"data.{name}=Xk29fjw0") == f"data.{name}=Xk29fjw0"


@pytest.mark.parametrize(
    "value",
    [
        "anon",
        "google_default",
        "<pad>",
        "[MASK]",
        "${oc.env:X}",
        "/etc/keys/mine.json",
        "",
        "none",
        True,
        None,
        0.5,
        ["a"],
    ],
)
def test_a_value_that_says_how_and_not_what(value: object) -> None:
    assert not patterns.is_secret("logger.mine.token", value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://{}@ingest.example.org/1", "https://***@ingest.example.org/1"),
        ("https://user:{}@example.org/a", "https://***@example.org/a"),
        ("https://example.org/webhooks/{}", "https://example.org/webhooks/***"),
        ("https://x.example.org/webhookb2/{}@{}/In/{}/b", "https://x.example.org/webhookb2/***"),
        ("https://example.org/api/hooks/{}/x", "https://example.org/api/hooks/***"),
    ],
)
def test_user_and_path_of_an_address_where_they_are_secret(url: str, shown: str) -> None:
    assert secrets.masked(f"at {url.replace('{}', 'a1B2c3D4e5F6g7H8i9')}: refused") == f"at {shown}: refused"


@pytest.mark.parametrize(
    "url",
    [
        "https://git@example.org/a",
        "https://example.org/hooks/readme-2024.md",
        "https://example.org/webhooks/about",
        "s3://auth/2024/01/run",
    ],
)
def test_an_address_without_a_secret_stays(url: str) -> None:
    assert secrets.masked(url) == url


def test_a_key_of_a_service_is_one_and_that_of_a_column_is_none() -> None:
    assert patterns.is_secret("logger.mine.key", "Xk29fjw0") and patterns.is_secret(
        "data.dataset.key", "aB3dE6gH9jK2mN5"
    )
    assert not patterns.is_secret("data.dataset.key", "image_1024") and not patterns.is_secret(
        "hook.mine.key", "${oc.env:X}"
    )


def test_a_number_is_a_secret_where_its_name_leaves_no_doubt() -> None:
    assert patterns.is_secret("logger.mine.pin", 4815) and patterns.is_secret("logger.mine.otp", 993311)
    assert (
        not patterns.is_secret("data.pin", 1)
        and not patterns.is_secret("data.key_size", 4096)
        and not patterns.is_secret("logger.mine.webhook", True)
    )
    assert patterns.is_secret("hook.a.password", 1234) and not patterns.is_secret("hook.a.token", 1234)


def test_what_was_told_is_known_in_every_form() -> None:
    secret = "p/ä's=w0rd+1"
    secrets.hear([f"logger.mine.password={secret}", "--token", "abcdefgh17"])
    forms = [
        secret,
        quote(secret, safe=""),
        repr(secret),
        json.dumps({"a": secret}),
        base64.b64encode(secret.encode()).decode(),
        "abcdefgh17",
    ]
    for form in forms:
        assert secrets.masked(f"so it is {form}, says the server").count("***") == 1, form
    assert "rd+1" not in secrets.masked(" ".join(forms)) and "w0rd" not in secrets.masked(" ".join(forms))


def test_a_short_one_is_known_as_a_word_of_its_own() -> None:
    secrets.know("abc")
    assert secrets.masked("abc, abcd: dabc 'abc'") == "***, abcd: dabc '***'"


def test_secrets_of_the_environment_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_scan", [0.0, ()])
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "correct-horse")
    monkeypatch.setenv("MY_SESSION", "bubblegum")
    assert secrets.masked("correct-horse, bubblegum") == "***, bubblegum"


def test_a_part_is_sealed_and_opened() -> None:
    part = {
        "_target_": "mypkg.Tracker", "_about_": {"token": "none of ours"}, "rank": 3, "token": "anon", "password": 1234, "note": "hf_" + "a1B2" * 9,
        "storage_options": {"key": "plainlooking", "anon": False, "endpoint_url": "http://here:9000", "client_kwargs": {"region_name": "us-east-1"}},
        "headers": {"X-Api-Key": "qwertyuiop", "Accept": "text/html"}, "list": [{"secret": "one"}, "two"],
        "pair": ["AKIA" + "A2" * 8, "x" * 20 + "Y/" * 10],
    }  # fmt: skip
    sealed = secrets.seal(part, "logger.mine")
    here = {key for key, _ in secrets.places(sealed, "logger.mine")}
    assert here == {
        *(f"logger.mine.{key}" for key in ("password", "note", "storage_options.key", "headers.X-Api-Key", "list.0.secret", "pair.0", "pair.1")),
        "logger.mine.storage_options.client_kwargs.region_name",
    }  # fmt: skip
    assert {key: value for key, value in sealed.items() if key in ("_target_", "_about_", "rank", "token")} == {
        key: part[key] for key in ("_target_", "_about_", "rank", "token")
    }
    assert (
        sealed["storage_options"]["endpoint_url"] == "http://here:9000" and sealed["headers"]["Accept"] == "text/html"
    )
    assert secrets.opened(sealed["password"]) == 1234 and secrets.opened(sealed["list"][0]["secret"]) == "one"
    assert secrets.seal(sealed, "logger.mine") == sealed


def test_the_ranks_are_told() -> None:
    secrets.seal({"password": "correct-horse"}, "logger.mine")
    handed = json.loads(json.dumps(secrets.hand_over()))
    secrets._kept.clear()
    secrets._known.clear()
    with pytest.raises(KeyError):
        secrets.opened("${secret:logger.mine.password}")
    secrets.take_over(handed)
    assert secrets.opened("${secret:logger.mine.password}") == "correct-horse"
    assert secrets.masked("correct-horse") == "***"


@pytest.mark.parametrize(
    "text",
    [
        "a" * 20_000,
        "a=" * 10_000,
        "token=" * 4_000,
        "token" * 20_000,
        "k:" * 30_000 + "key",
        "https://a:" * 9_000 + "key",
        "://" * 9_000,
        "-----BEGIN PRIVATE " + "KEY-----" + "A" * 50_000,
        "Bearer " * 5_000,
        "'" * 20_000,
        "[" * 30_000 + "--token",
        "[--token," * 8_000,
        "curl -u " + "a:" * 20_000,
        "curl" + " -u a" * 8_000,
    ],
)
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()
    secrets.masked(text)
    assert time.process_time() - began < 5, "linear, or nearly so: quadratic would be minutes"


@pytest.mark.parametrize(
    "text",
    [
        "Error: api_key: {} failed", "401: x-api-key: {}", "a: b: c: password = {}", "['a\\napi_key={}']", "https%3A%2F%2Fh%2Fx%3Ftoken%3D{}", "api_key%3D{}", "Set-Cookie: sid={}; HttpOnly",
        "machine api.wandb.ai login me password {}", "https://{}@host.example/repository.git", '{{"username": "me", "key": "{}"}}', "hook.key={}",
    ],
)  # fmt: skip
def test_a_name_behind_other_names_is_found(text: str) -> None:
    value = "7d0a7ba07a2531adab23e5617d266908d35e59c1"
    assert value not in secrets.masked(text.format(value))


@pytest.mark.parametrize(
    "text",
    ["dp.pt." + "aB3" * 15, "figd_" + "aB3" * 12, "ATATT3" + "xFf0" * 30, "pat" + "aB3dE5g" * 2 + "." + "0123abcd" * 8, "NRAK-" + "AB3" * 9, "sbp_" + "0a1b2" * 8,
     "tskey-auth-" + "aB3d" * 6, "lsv2_pt_" + "0a1b" * 8 + "_0a1b2c3d4e", "pcsk_" + "aB3" * 20, "tgp_v1_" + "aB3d" * 10, "rpa_" + "AB3" * 14],
)  # fmt: skip
@pytest.mark.parametrize("frame", ["{}", "x%3D{}", "'x\\n{}'"])
def test_more_of_those_who_hand_out_keys(text: str, frame: str) -> None:
    assert text[-12:] not in secrets.masked(frame.format(text))


def test_all_that_lies_below_the_name_of_a_secret_is_sealed() -> None:
    part = {
        "api_keys": ["one1", "two2"],
        "secret_list": ["three3"],
        "passwords": {"db": "four4"},
        "tokens": ["<s>", "hello"],
    }
    sealed = secrets.seal(part, "logger.mine")
    assert sealed["tokens"] == ["<s>", "hello"]
    assert not {"one1", "two2", "three3", "four4"} & set(str(sealed).replace("'", " ").split()), sealed


def test_an_error_about_a_misspelt_name_shows_no_secret() -> None:
    value = "9Xs7xbHrYFd7hk11az1JR7Veuvejyi"
    assert secrets.redact_suspect(f"model.api_kye={value} (command line)") == "model.api_kye=*** (command line)"
    for text in (
        "model.revison=9fceb02d0ae598e95dc970b74767f19372d61af8",
        "model._taget_=mypkg.AutoModelForCausalLMfrom2024",
        "out=/data/9Xs7xbHrYFd7hk11az1JR7",
    ):
        assert secrets.redact_suspect(text) == text


def test_a_secret_beside_its_name_as_two_words_is_known() -> None:
    for words in (["api_key", "abcdef123"], ["model={api_key:", "bcdefg234}"], ["--hf-token", "cdefgh345"]):
        secrets.hear(words)
    assert secrets.masked("abcdef123 bcdefg234 cdefgh345") == "*** *** ***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("logger.mine.args=[--token,swordfish]", "logger.mine.args=[--token,***]"),
        ("args: ['--url', 'a', '--api-key', 'swordfish']", "args: ['--url', 'a', '--api-key', '***']"),
        ('["--password", "swordfish"] failed', '["--password", "***"] failed'),
        ("curl -u ada:swordfish https://host/x", "curl -u ada:*** https://host/x"),
        ("sh -c 'curl --user=ada:swordfish -X POST a'", "sh -c 'curl --user=ada:*** -X POST a'"),
        ("[curl, -s, -u, ada:swordfish]", "[curl, -s, -u, ***]"),
        ("[--tokens, 100, --token, --verbose, --token-budget, 20, --salt, none]", ""),
        ("docker run -u 1000:1000 -v a:b curl", ""), ("chown -R root:root /a", ""), ("[-u, root:root]", ""), ("the flag --token, which is optional", ""),
    ],
)  # fmt: skip
def test_a_neighbour_says_what_a_value_is(text: str, shown: str) -> None:
    assert secrets.masked(text) == (shown or text)


def test_the_argument_after_a_flag_is_sealed() -> None:
    arguments = ["--url", "https://host", "--token", "swordfish", "--verbose", "-u", "ada:l0ngship"]
    assert secrets.redact_tree(arguments) == ["--url", "https://host", "--token", "***", "--verbose", "-u", "***"]
    sealed = secrets.seal({"args": arguments, "columns": ["token", "label"]}, "logger.mine")
    assert sealed["args"] == [
        *arguments[:3],
        "${secret:logger.mine.args.3}",
        "--verbose",
        "-u",
        "${secret:logger.mine.args.6}",
    ]
    assert sealed["columns"] == ["token", "label"] and secrets.opened(sealed["args"][3]) == "swordfish"
    assert secrets.masked("no swordfish here") == "no *** here"


def test_a_typed_argument_after_a_flag_is_known() -> None:
    secrets.hear(["logger.mine.args=[--token,swordfish]", "hook.mine.call=curl -u ada:mainsail https://host"])
    assert secrets.masked("swordfish and mainsail") == "*** and ***"


@pytest.mark.parametrize(
    "text",
    [
        "export PATH=$PWD:$PATH", "export PYTHONPATH=$PWD:src:/srv/code1", "export X=$HOME:${PWD}:$OLDPWD", "PWD=/home/me/a1",
        "launcher.setup=['export PATH=$PWD:$PATH']", "export PWD=$HOME/b", "launcher.env.PWD=/srv/a1",
    ],
)  # fmt: skip
def test_a_folder_of_the_shell_is_no_secret(text: str) -> None:
    assert (secrets.masked(text), secrets.redact_arg(text)) == (text, text)


@pytest.mark.parametrize(
    "text", ["export PASSWORD=hunter2x", "export PWD=hunter2x", "export DB_PWD=hunter2x", "export DB_PWD=/hunter2x", "launcher.env.PWD=hunter2x"]
)  # fmt: skip
def test_a_password_with_the_name_of_a_folder_is_a_secret(text: str) -> None:
    assert "hunter2x" not in secrets.redact_arg(text)
