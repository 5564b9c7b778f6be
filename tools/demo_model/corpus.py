"""The demo model's text: books, what of them is held out, the tokenizer, token ids."""
import lzma
import pathlib
import re

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HELD_OUT_SHARE = 0.05  # the end of every book
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
CHAT_TOKENS = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]


def read_books(directory: pathlib.Path) -> dict[str, list[str]]:
    """Every book as a list of paragraphs, hard line wraps undone, italics marks dropped."""
    books = {}
    for path in sorted(directory.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        if path.stem == "kjv":
            verses = re.findall(r"^(\S+?)(\d+):(\d+) (.*)$", text, flags=re.M)
            chapters: dict[tuple[str, str], list[str]] = {}
            for book, chapter, _, verse in verses:
                chapters.setdefault((book, chapter), []).append(verse.strip())
            paragraphs = [" ".join(chapter) for chapter in chapters.values()]
        else:
            paragraphs = [" ".join(p.split()).replace("_", "") for p in re.split(r"\n\s*\n", text)]
        books[path.stem] = [p for p in paragraphs if p]
    return books


def split_books(books: dict[str, list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    train, held_out = [], []
    for paragraphs in books.values():
        total, seen, cut = sum(map(len, paragraphs)), 0, 0
        while seen < total * (1 - HELD_OUT_SHARE):
            seen += len(paragraphs[cut])
            cut += 1
        train.append(paragraphs[:cut])
        held_out.append(paragraphs[cut:])
    return train, held_out


def train_tokenizer(paragraphs: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with the split sequence of DeepSeek-V3's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    letters = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rest = r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
        pre_tokenizers.Split(Regex(letters + rest), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[BOS, EOS, PAD] + CHAT_TOKENS,
                                  show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(paragraphs, trainer)
    return tokenizer


class Corpus:
    """The books in directory as token ids; without a tokenizer one is trained on the training part."""

    def __init__(self, directory: pathlib.Path, tokenizer: Tokenizer | None = None, vocab_size: int = 4096):
        train, held_out = split_books(read_books(directory))
        self.tokenizer = tokenizer or train_tokenizer([p for book in train for p in book], vocab_size)
        texts = ["\n\n".join(book) for book in held_out]
        self.held_out = [self._encode(text) for text in texts]
        self.held_out_tokens = sum(map(len, self.held_out))
        self.held_out_bytes = sum(len(text.encode()) for text in texts)
        self.held_out_openings = [book[1][:200] for book in held_out]
        packed = lzma.compress("\n\n".join(texts).encode(), preset=9)
        self.xz9_bits_per_byte = 8 * len(packed) / self.held_out_bytes
        bos, eos = torch.tensor([BOS_ID]), torch.tensor([EOS_ID])
        self.stream = torch.cat([part for book in train
                                 for part in (bos, self._encode("\n\n".join(book)), eos)])

    def _encode(self, text: str) -> torch.Tensor:
        return torch.tensor(self.tokenizer.encode(text).ids)

    def windows(self, batch: int, window: int, generator: torch.Generator) -> torch.Tensor:
        """[batch, 1 + window] ids from random places of the training part, each after a BOS."""
        offsets = torch.randint(0, len(self.stream) - window, (batch,), generator=generator)
        ids = torch.stack([self.stream[o:o + window] for o in offsets.tolist()])
        return torch.cat([torch.full_like(ids[:, :1], BOS_ID), ids], dim=1)
