"""A model of transformers, built from the config.json of a folder, a hub repository or any URL:

    model=hf model.name=meta-llama/Llama-3.2-1B
    model=hf model.name=s3://bucket/mine model.config='{num_labels: 3}'

Code of a repository is never run.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dtrain.errors import PreflightError, StoreError, WordsError, an, first_line, nearest
from dtrain.model.head import base_of, begin_anew
from dtrain.storage import hub, store
from dtrain.weights.place import near

TASKS = {
    "causal_lm": "AutoModelForCausalLM", "classification": "AutoModelForSequenceClassification",
    "masked_lm": "AutoModelForMaskedLM", "image_classification": "AutoModelForImageClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}  # fmt: skip
ATTENTIONS = {
    "eager": "", "sdpa": "", "flex_attention": "", "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface", "flash_attention_4": "flash_attn",
}  # fmt: skip
"""Attentions of transformers -> the package that has to be installed, as a kernel is downloaded in its place."""
MOST_LAYERS = 10_000
"""Layers that a config.json may ask for: a hundred take a second to build."""


def load(*, name: str, task: str, weights: str, config: Mapping[str, Any], head: str = "kept") -> nn.Module:
    """The model of `task`, with the entries of `config` in place of those of config.json. With `weights` pretrained its
    parameters are on the meta device, for a checkpoint to fill; with random they are initialised as transformers does.
    `head` new: that of pretrained weights is left out.

    Raises WordsError for a configuration that transformers cannot build, StoreError, and PreflightError without
    transformers.
    """
    if hub.place(name).startswith(hub.SCHEME):
        hub.watch()
    try:
        import transformers
    except ImportError as error:
        raise PreflightError("model=hf: transformers is not installed. Type pip install 'dtrain[hf]'.") from error
    there = read(name)
    described = {**there, **config}
    kind = str(described.pop("model_type", ""))
    if kind not in transformers.CONFIG_MAPPING:
        own = " Its code is in the repository, which is not run." if "auto_map" in described else ""
        raise WordsError(
            f"model.name={name}: transformers {transformers.__version__} has no model of the type {kind!r}."
            f"{nearest(kind, transformers.CONFIG_MAPPING.keys())}{own} Install the package that has its class, and "
            "type model._target_=<package.Class> trust=[<package>]."
        )
    _check_sizes(name, described)
    _check_kernels(name, described)
    _check_entries(kind, there, config)
    try:
        built = transformers.AutoConfig.for_model(kind, **described)
        maker = getattr(transformers, TASKS[task])
        with _without_memory() if weights == "pretrained" else _without_values():
            model = maker.from_config(built, dtype=torch.float32)
        model.tie_weights()
    except ZeroDivisionError as error:
        zeros = [
            f"{key}: 0"
            for key, value in described.items()
            if value == 0 and isinstance(value, int) and _is_size(key, value)
        ]
        raise WordsError(
            f"model.name={name} model.task={task}: {' and '.join(zeros) or 'an entry of 0'} in config.json or "
            "model.config: no such model can be built. Type model.config={<entry>: <a number from 1>}."
        ) from error
    except KeyError as error:  # a name that transformers looks up, such as that of an activation
        raise WordsError(f"model.name={name} model.task={task}: {_unknown_value(error, described)}") from error
    except Exception as error:  # of any class of any model
        raise WordsError(f"model.name={name} model.task={task}: {' '.join(str(error).split())[:300]}") from error
    if head == "new":
        if not (base := base_of(model)) or all(name.startswith(base) for name, _ in model.named_parameters()):
            raise WordsError(f"model.head=new: {an(model)} has no head of its own. Leave it out.")
        begin_anew(model)
    return cast(nn.Module, model)


def read(name: str) -> dict[str, Any]:
    """config.json of a model. Raises WordsError if it is none, StoreError, and PreflightError for one of the hub that
    is not there.
    """
    place = hub.place(name)
    where = store.join(place, "config.json")
    try:
        text = hub.read(place, "config.json") if place.startswith(hub.SCHEME) else store.read(where)
        described = json.loads(text)
    except StoreError as error:
        if error.kind == "missing":
            raise WordsError(
                f"model.name={name}: there is no {where}. Type a folder or URL with config.json, or "
                f"<organisation>/<name> of the Hugging Face hub.{hub.longer(name)} {near(place)}".rstrip()
            ) from error
        raise
    except (ValueError, RecursionError) as error:
        raise WordsError(f"model.name={name}: {where} is not JSON: {first_line(error)}") from error
    if not isinstance(described, dict):
        raise WordsError(f"model.name={name}: {where} has no configuration of a model.")
    return described


def _check_sizes(name: str, described: Mapping[str, Any]) -> None:
    """Raises WordsError for a model of so many layers that it would take hours to build, part by part too."""
    for key, value in described.items():
        if isinstance(value, dict):
            _check_sizes(name, value)
        elif "layer" in key and _is_size(key, value) and value > MOST_LAYERS:
            raise WordsError(
                f"model.name={name}: {key}={value} in config.json or model.config: at most {MOST_LAYERS} layers can be "
                "built."
            )


def _check_kernels(name: str, described: Mapping[str, Any]) -> None:
    """Raises WordsError for an attention that transformers would download as code: any but its own, and flash attention
    where its package is not installed.
    """
    for key, value in described.items():
        if "attn_implementation" not in key:
            if isinstance(value, Mapping):
                _check_kernels(name, value)
            continue
        for chosen in _leaves(value):
            package = ATTENTIONS.get(str(chosen))
            if chosen is not None and (package is None or (package and find_spec(package) is None)):
                raise WordsError(
                    f"model.name={name}: {key}={chosen} in config.json or model.config is code that would be "
                    "downloaded. Type model.config={attn_implementation: sdpa}."
                )


def _leaves(value: Any) -> Iterator[Any]:
    """The values in a mapping, at any depth, or the value itself."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    else:
        yield value


def _check_entries(kind: str, there: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raises WordsError for entries of model.config that transformers would keep without using them."""
    import transformers

    for key in ("dtype", "torch_dtype"):
        if key in config:
            raise WordsError(
                f"model.config={{{key}: {config[key]}}}: the type of the weights is that of the run. Type "
                "precision=bf16_true for weights in bf16, precision=bf16 for products in it."
            )
    for key in config:
        if key in there or key == "model_type" or key.endswith("_implementation"):
            continue
        try:
            known = transformers.CONFIG_MAPPING[kind]()
            entries = {**there, **config}
            entries.pop("model_type", None)
            used, left = (
                transformers.AutoConfig.for_model(kind, **given).to_dict()
                for given in (entries, {name: value for name, value in entries.items() if name != key})
            )
        except Exception:  # of any class: told where it is built
            return
        if not hasattr(known, key) and {**used, key: None} == {**left, key: None}:
            allowed = [*known.to_dict(), *known.attribute_map]
            raise WordsError(
                f"model.config: {type(known).__name__} has no {key}.{nearest(key, allowed)} Leave it out, or write it "
                "into config.json if the code of the model reads it."
            )


def _unknown_value(error: KeyError, described: Mapping[str, Any], path: str = "") -> str:
    """Which entry has the value that is not known."""
    sought = error.args[0] if error.args else None
    for key, value in described.items():
        if isinstance(value, Mapping) and (inside := _unknown_value(error, value, f"{path}{key}.")):
            return inside
        if isinstance(value, str) and value == sought:
            return f"{path}{key}: {value} in config.json or model.config is not known to transformers."
    return "" if path else f"{sought!r} is not known to transformers."


def _is_size(key: str, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not key.endswith("_id")


def _without_values() -> AbstractContextManager[None]:
    """In a trace, parameters are not initialised: some of transformers' ways to do it read the values of tensors."""
    from transformers.initialization import no_init_weights

    return no_init_weights() if isinstance(torch.empty(0, device="cpu"), FakeTensor) else nullcontext()


@contextmanager
def _without_memory() -> Iterator[None]:
    """Parameters are moved to the meta device as they are made; buffers keep the values of their constructors."""
    from transformers.initialization import no_init_weights

    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment]
    try:
        with no_init_weights():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
