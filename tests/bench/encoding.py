"""Text to tokens beside the tokenizers library's own `encode_batch`, per core, for RESULTS.md.

python tests/bench/encoding.py [--rounds 5]

CPU seconds for the same documents, in turn: the library in this process without threads, `dtrain.tokenizer.pool.encode` in this process, and two
processes of it, with all that this process does for them.
"""

import argparse
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from dtrain.tokenizer import Vocabulary
from dtrain.tokenizer.pool import Document, Pool, _groups, encode

os.environ["TOKENIZERS_PARALLELISM"] = "false"


def trained(folder: Path, files: list[str]) -> Vocabulary:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train(
        files[:80], tokenizers.trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    )
    made.save(str(folder / "tokenizer.json"))
    return Vocabulary((folder / "tokenizer.json").read_bytes(), "tokenizer")


def spent() -> float:
    """CPU seconds of this process and of the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def timed(act: Callable[[], object]) -> float:
    began = spent()
    act()
    return spent() - began


def main(rounds: int) -> None:
    files = [str(path) for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    documents = [Document(file, Path(file).read_bytes()) for file in files]
    texts = [text.decode(errors="replace") for _, text in documents]
    documents = [Document(name, text.encode()) for (name, _), text in zip(documents, texts, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = trained(Path(folder), files)
        library = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    start = timed(lambda: _pooled(tokenizer, []))
    ways: dict[str, Callable[[], object]] = {
        "encode_batch": lambda: library.encode_batch(texts),
        "encode_batch, and the ids": lambda: [each.ids for each in library.encode_batch(texts)],
        "dtrain, in one process": lambda: list(encode(documents, tokenizer, processes=1)),
        "dtrain, two processes": lambda: _pooled(tokenizer, documents),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    began = time.perf_counter()
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(timed(way) - start * (name == "dtrain, two processes"))
    size = sum(len(text) for _, text in documents) / 1e6
    base = statistics.median(seconds["encode_batch"])
    print(
        f"{size:.1f} MB, {rounds} rounds, {time.perf_counter() - began:.0f} s; to start two processes takes {start:.2f} s of CPU"
    )
    for name, each in seconds.items():
        middle = statistics.median(each)
        print(f"| {name} | {size / middle:.2f} MB a second of a core | {base / middle:.2f} |")


def _pooled(tokenizer: Vocabulary, documents: list[Document]) -> None:
    with Pool(tokenizer, 2) as pool:
        list(pool.encoded(iter(_groups(documents) if documents else ())))
        if not documents:
            time.sleep(1)  # until they have started


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args().rounds)
