"""Tasks of lm_eval with files of their own: a multiple choice, a perplexity, and a text that is written."""

import json
from pathlib import Path

TASK = """task: my_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
"""
KINDS = {
    "choice": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "text": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
    "write": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n", "capital"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}, {metric: bleu}]
""",
}


def lines(number: int) -> str:
    return f"The square of {number} is {number * number}. What is the capital of France? Paris is the capital.\n"


def write(folder: Path) -> None:
    """my_choice, my_text, my_write, and my_gone, whose file a test removes."""
    folder.mkdir(parents=True)
    rows = {
        "choice": [
            {
                "question": f"The square of {n} is",
                "choices": [f"{n * n}", f"{n + 2}", "Paris", "I am fine."],
                "answer": 0,
            }
            for n in range(11)
        ],
        "text": [{"text": "".join(map(lines, range(n, n + n % 4 + 1)))} for n in range(9)],
        "write": [{"question": f"The square of {n}", "answer": f" is {n * n}."} for n in range(7)],
    }
    rows["gone"] = rows["text"]
    for name, items in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, items)))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder) + KINDS.get(name, KINDS["text"]))
