"""Translation of torchtune's datasets: rows of conversations, instructions and pairs become data=chat.

Its tokenizers write the turns in Python, so the chat template is asked for.
"""

from collections.abc import Mapping

from dtrain.integrations.importers import terms
from dtrain.integrations.importers.ledger import Ledger, Rule, count
from dtrain.integrations.importers.rules import chosen, given, lacking, refused, says, switched, table, to, unneeded
from dtrain.integrations.importers.torchtune_model import COMPONENT

KINDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "torchtune.datasets.chat_dataset": ("messages", {}),
    "torchtune.datasets.instruct_dataset": ("prompt", {"input": "prompt", "output": "completion"}),
    "torchtune.datasets.preference_dataset": ("pairs", {"chosen": "chosen", "rejected": "rejected"}),
}
"""Builder -> data.kind, and its names of columns -> those here."""
STYLES = {"sharegpt": "conversations", "openai": "messages"}
TEXTS = (
    "torchtune makes a sample of each text; data=text puts texts behind one another. Type data=text data.path=<files> "
    "data.column={} data.tokenizer=<tokenizer.json>."
)
PROMPTS = (
    "the prompts of this dataset are texts of torchtune. Type data=chat data.path=<rows> data.kind=instruction "
    "data.tokenizer=<folder>, which the chat template writes, or data.template=<your file>."
)


def data_section(ledger: Ledger) -> None:
    name = str(ledger.get(f"dataset.{COMPONENT}", ""))
    if not name:
        return
    kind, columns = KINDS.get(name, ("", {}))
    if name == "torchtune.datasets.chat_dataset":
        kind = STYLES.get(str(ledger.get("dataset.conversation_style")), "")
    if not kind:
        text = "text_completion" in name
        ledger.settle(refused(TEXTS.format(ledger.get("dataset.column", "text")) if text else PROMPTS), "dataset.**")
        if ledger.words.get("objective") == "dpo":
            ledger.ask("data", "chat, with pairs")
        return
    ledger.carry(f"dataset.{COMPONENT}", {"data": "chat", "data.kind": kind})
    ledger.settle(says({"data.kind": kind}), "dataset.conversation_style")
    _columns(ledger, kind, columns)
    _path(ledger)
    for key, rule in OPTIONS.items():
        ledger.settle(rule, key)
    ledger.settle(OTHER, "dataset.**")
    _tokens(ledger)
    ledger.imply({"data.holdout": 0.0}, "torchtune holds nothing out by default")


def _columns(ledger: Ledger, kind: str, columns: Mapping[str, str]) -> None:
    named = {here: str(ledger.get(f"dataset.column_map.{theirs}", theirs)) for theirs, here in columns.items()}
    keys = [f"dataset.column_map.{theirs}" for theirs in columns]
    if not columns:
        named, keys = {kind: str(ledger.get("dataset.conversation_column", kind))}, ["dataset.conversation_column"]
    other = {here: column for here, column in named.items() if here != column}
    rule = says({"data.columns": other}) if other else unneeded("the names here too")
    ledger.settle(rule, *keys)
    if other:
        ledger.imply({"data.columns": other}, "names of torchtune's columns")


def _path(ledger: Ledger) -> None:
    """Carry local files over; ask for the rows of a repository of the hub."""
    source, files = ledger.get("dataset.source"), ledger.get("dataset.data_files")
    if source in ("json", "parquet") and isinstance(files, str | list) and files:
        ledger.settle(says({"data.path": files}), "dataset.data_files")
        ledger.settle(unneeded("the names of the files say it"), "dataset.source")
        return
    named = [ledger.get(f"dataset.{name}") for name in ("source", "name", "split")]
    why = terms.of_the_hub(*(str(one) if one else "" for one in named))
    ledger.settle(refused(why), "dataset.source", "dataset.data_files", "dataset.name", "dataset.split")
    ledger.ask("data.path", "files or folder of the rows")


def _tokens(ledger: Ledger) -> None:
    """Translate the tokenizer: of the same folder as the model, if that is one of Hugging Face."""
    name = str(ledger.get(f"tokenizer.{COMPONENT}", "the tokenizer")).rpartition(".")[2]
    if "model.name" in ledger.words:
        ledger.imply({"data.tokenizer": ledger.words["model.name"]}, "that of the model's folder")
    else:
        ledger.ask("data.tokenizer", "folder or name of a tokenizer of Hugging Face")
    if ledger.get("tokenizer.max_seq_len") is None:
        ledger.ask("data.sequence", "the most tokens of a conversation")
    note = "torchtune ends a row that it cuts with an end of text"
    ledger.settle(given(to("data.sequence", count, note)), "tokenizer.max_seq_len")
    if "data.packing" not in ledger.words:
        ledger.imply({"data.padding": "longest"}, "torchtune pads to the longest of a batch")
    alike = "Type data.template=null if the template of data.tokenizer writes them alike."
    ledger.settle(refused(f"{name} writes the turns in Python. {alike}"), "tokenizer", "tokenizer.**")
    ledger.ask("data.template", f"null, or a file that writes turns as {name} does")


OTHER = lacking("an option of torchtune's data that data=chat does not have. Leave it out, or change the rows.")
OPTIONS: Mapping[str, Rule] = table(
    {
        "dataset.packed": switched(
            says({"data.packing": "pack"}, "each conversation sees itself alone"), unneeded("off, as here")
        ),
        "dataset.train_on_input": switched(says({"data.train_on": "all"}), says({"data.train_on": "answers"})),
        "dataset.split": chosen(
            {"train": unneeded("all rows of the files")},
            refused("files are read whole. Write the rows that you want to a file of their own."),
        ),
        "dataset.new_system_prompt": lacking("write the system message into the rows."),
    }
)
