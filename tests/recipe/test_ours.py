"""The recipes that dtrain brings for text reach what they expect, with small models and rows made here."""

from pathlib import Path

import commands
import pytest

PREPARE = """
import sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq, torch, transformers
sys.path.insert(0, sys.argv[1])
from chat import talks
talks.tokenizer(Path("tk"))
talks.write(Path("pairs.jsonl"), talks.pairs())
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
llama = transformers.LlamaConfig(**sizes, vocab_size=600, initializer_range=0.1)
transformers.AutoModelForCausalLM.from_config(llama).save_pretrained("llama")
bert = transformers.BertConfig(**sizes, vocab_size=40, num_labels=3)
transformers.AutoModelForSequenceClassification.from_config(bert).save_pretrained("bert")
draw = torch.Generator().manual_seed(0)
def tokens(n):
    return torch.randint(1 + 12 * (n % 3), 16 + 12 * (n % 3), (5 + n % 7,), generator=draw).tolist()
rows = [{"input_ids": tokens(n), "label": n % 3} for n in range(400)]
pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
"""
WORDS = {
    "pretrain": (),
    "classify": ("model.name=bert", "data.path=rows.parquet"),
    "dpo": ("model.name=llama", "data.tokenizer=tk", "data.path=pairs.jsonl"),
}


@pytest.mark.campaign("documents")
@pytest.mark.parametrize("recipe", WORDS)
def test_it_reaches_what_it_expects(recipe: str, tmp_path: Path) -> None:
    if WORDS[recipe]:
        made = commands.python("-c", PREPARE, str(Path(__file__).parents[1]), cwd=tmp_path)
        assert made.returncode == 0, made.stderr
    done = commands.run("verify", f"recipe={recipe}", *WORDS[recipe], "data.cache=cache", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("as expected"), done.stdout + done.stderr
    assert "NOT as expected" not in done.stdout
