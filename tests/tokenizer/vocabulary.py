"""A tokenizer.json of byte pairs, and documents."""

from pathlib import Path

import tokenizers


def written(path: Path, size: int = 300, **changed: object) -> str:
    """The path of a small tokenizer.json, trained on the code of this package."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    made.train([str(Path(__file__))], trainer)
    if changed:
        made.enable_truncation(**changed)  # type: ignore[arg-type]
        made.enable_padding(length=64)
    made.save(str(path))
    return str(path)


def texts(folder: Path, count: int, size: int = 200) -> Path:
    """A folder of text files, each other than the others."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"{number}: é " * (size // 6 + number % 7))
    return folder
