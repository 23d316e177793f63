"""Translation of axolotl's datasets: conversations and pairs become data=chat. Formats whose prompts are texts of
axolotl are refused with the words to type, since no chat template writes the same tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.integrations.importers import terms
from dtrain.integrations.importers.ledger import Ledger, Rule, count, show, text
from dtrain.integrations.importers.rules import chosen, given, lacking, refused, says, switched, table, to, unneeded
from dtrain.secrets import screen

FILES = (".jsonl", ".json", ".ndjson", ".parquet", ".pq")
ANSWERS = frozenset({"assistant", "gpt"})
ROLES: Mapping[str, frozenset[str]] = {
    "user": frozenset({"user", "human"}),
    "assistant": ANSWERS | {"model", "chatgpt"},
    "system": frozenset({"system"}),
    "tool": frozenset({"tool", "function_response", "observation", "tool_response"}),
}
"""Role -> its names in rows that dtrain knows too."""
PREFERENCES = {"dpo": "sigmoid", "ipo": "ipo"}
"""axolotl's `rl` -> objective.loss."""
BETAS = ("trl.beta", "rl_beta", "dpo_beta")
LOSSES = {(loss,): loss for loss in ("sigmoid", "hinge", "ipo")}
"""dpo_loss_type -> objective.loss."""
TEMPLATES = "https://github.com/axolotl-ai-cloud/axolotl/tree/main/src/axolotl/utils/chat_templates/templates"


def objective_section(ledger: Ledger) -> None:
    """Translate preference training, which axolotl leaves to TRL."""
    loss = PREFERENCES.get(str(ledger.get("rl")).lower())
    named = ledger.get("dpo_loss_type")
    if loss == "sigmoid" and named is not None:
        loss = LOSSES.get(tuple(named) if isinstance(named, list) else (named,), "")
        rule = unneeded("covered by rl") if loss else refused("dtrain has sigmoid, hinge and ipo.", "objective.loss")
        ledger.settle(rule, "dpo_loss_type")
    if loss is None:
        if ledger.get("rl") or ledger.get("reward_model") or ledger.get("process_reward_model"):
            ledger.ask("objective", "your own")
        return
    ledger.settle(terms.CHANGES_LOSS, "rpo_alpha", "dpo_norm_loss", "dpo_use_weighting", "dpo_loss_weights")
    if ledger.asks("objective"):
        ledger.refuse("rl", f"other keys change its loss. Type objective=dpo objective.loss={loss}.")
    else:
        ledger.carry("rl", {"objective": "dpo", **({"objective.loss": loss} if loss else {})})
    first = next((key for key in BETAS if ledger.get(key) is not None), BETAS[0])
    ledger.settle(given(to("objective.beta")), first)
    ledger.settle(unneeded(f"{first} takes precedence"), *BETAS)
    smooth = unneeded("ipo does not use it") if loss == "ipo" else given(to("objective.label_smoothing"))
    ledger.settle(smooth, "dpo_label_smoothing")
    ledger.imply({"objective.beta": 0.1}, "default of TRL")


def _is_of_pairs(ledger: Ledger) -> bool:
    return str(ledger.get("rl")).lower() in PREFERENCES


def data_section(ledger: Ledger) -> None:
    """Translate the datasets, and the keys that depend on their format."""
    sections = list(dict.fromkeys(".".join(key.split(".")[:2]) for key in ledger.under("datasets") if "." in key))
    pairs = _is_of_pairs(ledger)
    whys = {section: why for section in sections if (why := _obstacle(ledger, section, pairs))}
    kinds = {_kind(ledger, section, pairs): _columns(ledger, section, pairs) for section in sections}
    columns = [_columns(ledger, section, pairs) for section in sections]
    if len(kinds) > 1 or any(each != columns[0] for each in columns):
        whys = whys or dict.fromkeys(sections, UNLIKE)
    if not sections or whys:
        for section in sections:
            ledger.settle(refused(whys.get(section, BESIDE)), section, f"{section}.**")
        if pairs:
            ledger.ask("data", "chat, with pairs")
        return
    (kind,) = kinds
    _paths(ledger, sections)
    _template(ledger, sections)
    ledger.settle(says({"data": "chat", "data.kind": kind}, NOTES[pairs]), *(f"{section}.type" for section in sections))
    if columns[0]:
        fields = [f"{section}.{field}" for section in sections for field in FIELDS]
        named = [key for key in fields if ledger.get(key) in columns[0].values()]
        ledger.settle(says({"data.columns": columns[0]}), *named)
    _options(ledger, sections)
    _tokens(ledger)
    ledger.settle(given(_holdout), "val_set_size")
    ledger.imply({"data.holdout": 0.0}, "axolotl holds nothing out by default")


UNLIKE = "the datasets have different columns. Give them the same ones, and type data=chat data.path=[<files>]."
BESIDE = "another dataset of this file is refused. Type data=chat data.path=[<the files of all>]."
NOTES = {
    False: "all that the template writes from an answer to the next message counts, in axolotl the answer and its end",
    True: "what the template writes behind an answer counts, in axolotl without the line breaks at its end",
}
FIELDS = ("field_messages", "field_tools", "field_system", "field_chosen", "field_rejected")


def _kind(ledger: Ledger, section: str, pairs: bool) -> str:
    if pairs:
        return "pairs"
    return "conversations" if _properties(ledger, section) == ("from", "value") else "messages"


def _properties(ledger: Ledger, section: str) -> tuple[Any, Any]:
    """Return what a message calls its role and its content."""
    mapping = f"{section}.message_property_mappings"
    return (
        ledger.get(f"{mapping}.role", ledger.get(f"{section}.message_field_role", "role")),
        ledger.get(f"{mapping}.content", ledger.get(f"{section}.message_field_content", "content")),
    )


def _columns(ledger: Ledger, section: str, pairs: bool) -> dict[str, str]:
    """Return the columns whose names differ from those here."""
    here = {"messages": "messages", "tools": "tools", "system": "system", "chosen": "chosen", "rejected": "rejected"}
    if not pairs:
        here["messages"] = _kind(ledger, section, pairs)
    names = ["chosen", "rejected"] if pairs else ["messages", "tools"]
    if here["messages"] == "conversations":
        names.append("system")
    there = {here[name]: str(ledger.get(f"{section}.field_{name}", name)) for name in names}
    return {name: column for name, column in there.items() if name != column}


def _obstacle(ledger: Ledger, section: str, pairs: bool) -> str:
    """Return why a dataset is not read as it is; empty if it is."""
    kind, tokenizer = ledger.get(f"{section}.type"), f"data.tokenizer={_tokenizer(ledger)}"
    chat = f"data=chat data.path=<rows> {tokenizer}"
    if pairs:
        typed = f"Type {chat} data.kind=pairs for rows with chosen, rejected and prompt."
        return "" if kind == "chat_template.argilla_chat" else f"axolotl writes its prompts. {typed}"
    if kind == "chat_template":
        return ""
    if kind == "completion":
        return (
            "axolotl makes a sample of each text; data=text puts texts behind one another. Type data=text "
            f"data.path=<files> data.column={screen.typed(str(ledger.get(f'{section}.field', 'text')))} "
            f"{tokenizer}/tokenizer.json."
        )
    if isinstance(kind, str) and kind.startswith("sharegpt"):
        return f"axolotl's former templates. Type {chat} data.kind=conversations."
    if isinstance(kind, str) and kind.startswith("input_output"):
        return "the rows say which tokens count. Type data=jsonl with columns of tokens and of targets."
    return (
        f"the prompts are texts of axolotl. Type {chat} data.kind=instruction, which the chat template writes, or "
        "data.template=<your file>."
    )


def _tokenizer(ledger: Ledger) -> str:
    return screen.typed(str(ledger.get("tokenizer_config", ledger.get("base_model", "<name>"))))


def _paths(ledger: Ledger, sections: Sequence[str]) -> None:
    """Carry files over; ask for the rows of a repository of the hub."""
    files = [_files(ledger, section) for section in sections]
    if all(files):
        keys = [f"{section}.{name}" for section in sections for name in ("path", "data_files")]
        every = [path for each in files for path in each]
        ledger.settle(says({"data.path": every[0] if len(every) == 1 else every}), *keys)
        return
    for section, each in zip(sections, files, strict=True):
        named = [ledger.get(f"{section}.{name}") for name in ("path", "name", "split")]
        why = BESIDE if each else terms.of_the_hub(*(str(one) if one else "" for one in named))
        ledger.settle(refused(why), f"{section}.path", f"{section}.data_files")
        if not each:
            ledger.settle(refused(why), f"{section}.name", f"{section}.split")
    ledger.ask("data.path", "files or folder of the rows")


def _files(ledger: Ledger, section: str) -> list[str]:
    """Return the files of a dataset; none for a repository."""
    path, files = ledger.get(f"{section}.path"), ledger.get(f"{section}.data_files")
    if files and path in ("json", "parquet"):
        path = files
    elif files:
        return []
    paths = path if isinstance(path, list) else [path]
    return paths if all(isinstance(each, str) and each.lower().endswith(FILES) for each in paths) else []


def _template(ledger: Ledger, sections: Sequence[str]) -> None:
    """Translate the chat template: the tokenizer's own, a text, or one of axolotl's, which dtrain does not have."""
    keys = [*(f"{section}.chat_template" for section in sections), "chat_template"]
    name = next((str(ledger.get(key)) for key in keys if ledger.get(key)), "tokenizer_default")
    texts = [f"{key}_jinja" for key in keys if isinstance(ledger.get(f"{key}_jinja"), str)]
    if texts and name in ("jinja", "tokenizer_default"):
        template = ledger.leaves[texts[0]]
        if "${" in template:
            ledger.settle(refused("Write it to a file and type data.template=<the file>.", "data.template"), *texts)
        ledger.settle(says({"data.template": template}), *texts)
        ledger.settle(unneeded("covered by the text of the template"), *keys)
    elif name.startswith("tokenizer_default"):
        ledger.settle(unneeded("the tokenizer's own, as here"), *keys)
    else:
        ledger.settle(refused(f"a template of axolotl. Type data.template=<its file>, from {TEMPLATES}."), *keys)
        ledger.ask("data.template", f"file of the template {name}")
    arguments = ledger.tree.get("chat_template_kwargs")
    if isinstance(arguments, Mapping) and arguments:
        ledger.settle(says({"data.template_args": dict(arguments)}), "chat_template_kwargs.**")


def _options(ledger: Ledger, sections: Sequence[str]) -> None:
    """Record the remaining keys of each dataset."""
    for section in sections:
        for key in ledger.under(section):
            name = key.removeprefix(f"{section}.")
            rule = OPTIONS.get(name) or (_roles if name.startswith("roles.") else OTHER)
            if name.startswith(("message_property_mappings.", "message_field_r", "message_field_c")):
                rule = READ if _properties(ledger, section) in (("role", "content"), ("from", "value")) else NAMES
            (unneeded("empty") if ledger.leaves[key] is None else rule)(ledger, key, ledger.leaves[key])


def _roles(ledger: Ledger, key: str, value: Any) -> None:
    names = set(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else {""}
    known = names <= ROLES.get(key.rpartition(".")[2], frozenset())
    (READ if known else refused(f"dtrain knows the roles {', '.join(ROLES)} and ShareGPT's. Rename them in the rows."))(
        ledger, key, value
    )


def _trained(ledger: Ledger, key: str, value: Any) -> None:
    roles = value if isinstance(value, list) else [value]
    if roles and all(isinstance(each, str) and each in ANSWERS for each in roles):
        ledger.carry(key, {"data.train_on": "answers"})
    else:
        ledger.refuse(key, "dtrain learns answers, the last answer, or every token. Type data.train_on=all or last.")
        ledger.ask("data.train_on", "answers, last or all")


def _tokens(ledger: Ledger) -> None:
    """Translate the length of the samples, packing and the tokenizer."""
    base = ledger.words.get("model.name", ledger.get("base_model"))
    ledger.settle(given(to("data.tokenizer", text)), "tokenizer_config")
    if base is not None:
        ledger.imply({"data.tokenizer": str(base)}, "that of base_model")
    else:
        ledger.ask("data.tokenizer", "folder or name of a tokenizer")
    ledger.settle(given(to("data.sequence", count)), "sequence_len")
    ledger.imply({"data.sequence": 512}, "default of axolotl")
    packs = bool(ledger.get("sample_packing"))
    if _is_of_pairs(ledger):
        ledger.settle(lacking("pairs are not packed. Leave it out."), "sample_packing")
    elif packs:
        ledger.settle(says({"data.packing": "pack"}, "each conversation sees itself alone"), "sample_packing")
        ledger.settle(unneeded("windows are always full of tokens and padding"), "pad_to_sequence_len")
    ledger.settle(switched(says({"data.padding": "sequence"}), unneeded("off")), "pad_to_sequence_len")
    ledger.settle(given(chosen(LONGER, refused("Type data.long=skip, cut or refuse."))), "excess_length_strategy")
    ledger.imply({"data.long": "skip"}, "axolotl drops rows that are too long")
    if not packs:
        ledger.imply({"data.padding": "longest"}, "axolotl pads to the longest of a batch")
    for key, rule in TOKENS.items():
        ledger.settle(rule, key)


def _holdout(ledger: Ledger, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        ledger.refuse(key, f"dtrain holds out a part of the rows. Type data.holdout=<{show(value)} / samples>.")
        ledger.ask("data.holdout", f"{show(value)} / samples")
    else:
        ledger.carry(key, {"data.holdout": float(value)})


LONGER: Mapping[Any, Rule] = {
    "drop": says({"data.long": "skip"}), "truncate": says({"data.long": "cut"}), "raise": says({"data.long": "refuse"}),
}  # fmt: skip
READ = unneeded("dtrain reads these names too")
NAMES = refused("messages have role and content, or from and value. Rename them in the rows.")
OTHER = refused("an option of axolotl's data that data=chat does not have. Leave it out, or change the rows.")
END = chosen(
    {"turn": unneeded("the end of each answer counts")},
    refused("the end of each answer counts, and that of no other message. Leave it out."),
)
OPTIONS: Mapping[str, Rule] = table(
    {
        " ".join(FIELDS): READ,
        "split": chosen(
            {"train": unneeded("all rows of the files")},
            refused("files are read whole. Write the rows that you want to a file of their own."),
        ),
        "ds_type": chosen(
            {"json": READ, "jsonl": READ, "parquet": READ},
            refused("data=chat reads JSON lines, parquet, and folders of save_to_disk. Convert the file."),
        ),
        "roles_to_train": _trained,
        "train_on_eos train_on_eot": END,
        "name revision trust_remote_code": unneeded("data.path says which rows are read"),
        "chat_template chat_template_jinja": unneeded("another dataset of this file has the same one"),
        "message_field_training": chosen(
            {"train": READ, "weight": READ},
            refused("of a message `train` and `weight` say whether it counts. Rename the field in the files."),
        ),
        "drop_system_message split_thinking message_field_training_detail shards shards_idx": (
            lacking("dtrain reads rows as they are. Change them in the files.")
        ),
        "preprocess_shards": unneeded("an option of axolotl's data preparation"),
        "field_thinking template_thinking_key": chosen({"reasoning_content": READ}, OTHER),
    }
)
SPECIAL = lacking("tokens of the tokenizer. Change its files, and type data.tokenizer=<their folder>.")
TOKENS: Mapping[str, Rule] = {
    **table(
        {
            "special_tokens.pad_token": unneeded(
                "padding does not count: it is the tokenizer's pad_token or eos_token"
            ),
            "eot_tokens": unneeded("all that the template writes behind an answer counts"),
            "train_on_inputs": switched(
                refused(
                    "axolotl counts the texts of all messages. Type data.train_on=all, which counts what the template "
                    "writes between them too.",
                    "data.train_on",
                ),
                unneeded("the answers count, as here"),
            ),
            "eval_sample_packing multipack_real_batches sample_packing_group_size sample_packing_bin_size "
            "sample_packing_sequentially pad_to_multiple_of min_sample_len batch_flattening": unneeded(
                "affects speed only; windows are made once, for held-out rows too"
            ),
            "dataloader_num_workers": unneeded("rows are read ahead in a thread"),
        }
    ),
    **dict.fromkeys(("special_tokens.**", "tokens", "tokens.**", "added_tokens_overrides.**"), SPECIAL),
}
