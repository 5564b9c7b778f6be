#!/usr/bin/env python3
"""Makes small_tokenizers.json.xz: small random tokenizers and what the `tokenizers` library does with them.

Needs `pip install tokenizers` (0.23.3 made the committed file).  Seeded: makes the same file again.
"""
import json
import lzma
import pathlib
import random

import tokenizers

LETTERS = "abcdeABtshell'"
ODD = ["é", "ß", "中", "文", "ひ", "カ", "😀", "👨\u200d👩", "ſ", "١", "½", "Ⅷ", "\u0301", "\u00a0", "\u3000", "\u2028", "\u180e", "\u200b",
       "\u0085", "\x00", "\x1c", "“", "—", "∑", "ї", "ǅ", "ｱ", "！", "_", "-", ".", ",", "!", "<", ">", "#", "\t", "\n", "\r\n", "  ", "   "]

V3_SPLITS = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
V2_SPLITS = ["[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-Ֆａ-ｚ]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$",
             "[一-龥ࠀ-一가-\ud7ff]+"]
CODER_SPLITS = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+"]
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_alphabet() -> list[str]:
    printable = [b for b in range(256) if 0x21 <= b <= 0x7E or (b >= 0xA1 and b != 0xAD)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def split(pattern: str, behavior: str = "Isolated", invert: bool = False, kind: str = "Regex") -> dict:
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def byte_level(prefix: bool = False, regex: bool = False) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def text(rng: random.Random, words: list[str]) -> str:
    parts = []
    for _ in range(rng.randrange(24)):
        kind = rng.random()
        if kind < 0.45:
            parts.append("".join(rng.choice(LETTERS) for _ in range(rng.randrange(1, 7))))
        elif kind < 0.55:
            parts.append(str(rng.randrange(10 ** rng.randrange(1, 8))))
        elif kind < 0.65 and words:
            parts.append(rng.choice(words))
        elif kind < 0.80:
            parts.append(" " * rng.randrange(1, 4))
        else:
            parts.append(rng.choice(ODD))
        if rng.random() < 0.3:
            parts.append(" ")
    return "".join(parts)


def make(rng: random.Random, pre_tokenizers: list[dict], added: list[dict], ignore_merges: bool, pairs: bool) -> dict:
    alphabet = byte_alphabet()
    tokens = list(alphabet)
    known, merges = set(tokens), []
    common = [alphabet[b] for b in (LETTERS + "  0123456789éß中文ひ.-").encode()]
    grown = list(common)
    while len(merges) < 150:
        left, right = rng.choice(grown), rng.choice(grown)
        if (left, right) in merges or len(left + right) > 7:
            continue
        merges.append((left, right))
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            grown.append(left + right)
    # Tokens that no merge makes: ignore_merges takes them, merging does not.
    for word in ("shell", "tea", "Ġbat", "Ġ123"):
        if word not in known:
            known.add(word)
            tokens.append(word)
    vocab = {token: i for i, token in enumerate(tokens)}
    for offset, token in enumerate(added):
        token["id"] = vocab.get(token["content"], len(tokens) + offset)
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers}, "post_processor": None,
        "decoder": byte_level(), "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges, "vocab": vocab,
            "merges": [list(m) if pairs else " ".join(m) for m in merges]}}


def added(content: str, **flags: bool) -> dict:
    token = {"id": 0, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    token.update(flags)
    return token


def main() -> None:
    digits = {"type": "Digits", "individual_digits": True}
    configurations = {
        "v3": [split(p) for p in V3_SPLITS] + [byte_level()],
        "v2": [split(p) for p in V2_SPLITS] + [digits, byte_level()],
        "coder": [split(p) for p in CODER_SPLITS] + [digits, byte_level()],
        "cl100k": [split(CL100K), byte_level()],
        "o200k": [split(O200K), byte_level()],
        "gpt2": [byte_level(regex=True)],
        "gpt2 prefix": [byte_level(prefix=True, regex=True)],
        "digits runs": [{"type": "Digits", "individual_digits": False}, byte_level()],
        "no split": [byte_level()],
        "prefix after split": [split(",", "Isolated"), byte_level(prefix=True)],
        "removed spaces": [split(r"\s+", "Removed"), byte_level()],
        "words only": [split(r"\w+", "Removed", True), byte_level()],
        "anchors": [split(r"^\s*|\s*$"), byte_level()],
        "string": [split("ab", "MergedWithNext", False, "String"), split(".", "Isolated", False, "String"), byte_level(regex=True)],
    }
    for behavior in ("Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"):
        for invert in (False, True):
            configurations[f"{behavior} invert={invert}"] = [split(r"[aeé]|\d", behavior, invert), byte_level()]
    specials = [added("<s>", special=True), added("</s>", special=True, normalized=True), added("<left>", lstrip=True),
                added("<right>", rstrip=True, special=True), added("hell", single_word=True), added("<both>", lstrip=True, rstrip=True),
                added("<s", normalized=True), added("<s>>"), added("｜x▁y｜"), added("éé"), added("B", normalized=True, single_word=True)]
    rng = random.Random(20260101)
    cases = []
    for number, (name, pre_tokenizers) in enumerate(configurations.items()):
        some = [dict(t) for t in specials if rng.random() < 0.7]
        spec = make(rng, pre_tokenizers, some, ignore_merges=number % 3 == 1, pairs=number % 2 == 1)
        library = tokenizers.Tokenizer.from_str(json.dumps(spec))
        rows = []
        for _ in range(60):
            sample = text(rng, [t["content"] for t in specials])
            ids = library.encode(sample, add_special_tokens=False).ids
            rows.append({"text": sample, "ids": ids, "decoded": library.decode(ids, skip_special_tokens=False),
                         "decoded_without_special": library.decode(ids, skip_special_tokens=True)})
        cases.append({"name": name, "tokenizer": spec, "rows": rows})
    packed = lzma.compress(json.dumps(cases, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"), preset=9)
    target = pathlib.Path(__file__).parent / "small_tokenizers.json.xz"
    target.write_bytes(packed)
    print(f"{target}: {len(cases)} tokenizers, {len(packed)} bytes, tokenizers {tokenizers.__version__}")


if __name__ == "__main__":
    main()
