#!/usr/bin/env python3
"""Writes a small random checkpoint in the form Hugging Face publishes DeepSeek's: config.json, model.safetensors (bf16),
tokenizer.json, tokenizer_config.json, generation_config.json.  What it says is noise; every shape, name and format is real.

The same arguments give the same bytes.  Python's standard library only.
"""
import argparse
import collections
import json
import math
import pathlib
import random
import re
import struct

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
ROLE_TOKENS = ["<｜User｜>", "<｜Assistant｜>"]
NUM_MERGES = 400

# DeepSeek-V3's pre-tokenizer.
SPLITS = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]

# The merges are learned from this.
TEXT = """
A ferry carries people and their things across the water, from the shore where they are to the shore where they want to be. It
leaves when it is full or when it is time, and it comes back for those who wait. The river does not care how many boats there are;
it moves under all of them in the same way. On one side there is a town with a market, and on the other side there are fields, and
between the two there is always something to bring over: bread, letters, children on their way to school, a horse that does not
like the noise, a piano that took six men. The captain knows the stones under the surface and the wind that comes down from the
hills in the afternoon. He says that the work is simple. You take what is given to you, you do not lose any of it, and you put it
down where it belongs. If a rope breaks you tie another one. If the engine stops you do not wait for help that may not come; you
drift a little, you think, and you start again. In the evening the lamps are lit on both sides and the last passengers stand at
the rail and look at the lights. They talk about what they have seen during the day, about the weather, about the price of things,
about people who have gone away and people who have returned. When they arrive they thank the captain, who nods and counts the
tickets, because every number must be right before he can go home. Tomorrow the first boat will leave at six, whatever happens,
with the letters and the bread and with everyone who has somewhere to go. There is nothing more to say about it, and that is why
so many stories begin with a journey over water: what matters is not the boat but that both shores exist at the same time, and
that someone is willing to go from one to the other and to come back again with an answer to the question that was asked.
"""


def byte_alphabet() -> list[str]:
    printable = [b for b in range(256) if 0x21 <= b <= 0x7E or (b >= 0xA1 and b != 0xAD)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def learn_merges(count: int) -> list[tuple[str, str]]:
    """Byte-pair merges of TEXT: the most frequent pair first, of equals the smaller."""
    words = collections.Counter(re.findall(r" ?[a-zA-Z]+", TEXT.replace("\n", " ")))
    pieces = [[word.replace(" ", "Ġ"), times] for word, times in sorted(words.items())]
    symbols = [list(piece) for piece, _ in pieces]
    merges = []
    for _ in range(count):
        pairs: collections.Counter = collections.Counter()
        for parts, (_, times) in zip(symbols, pieces):
            for pair in zip(parts, parts[1:]):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for parts in symbols:
            i = 0
            while i + 1 < len(parts):
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = [best[0] + best[1]]
                i += 1
    return merges


def make_tokenizer() -> tuple[dict, int]:
    """tokenizer.json and the number of ids."""
    merges = learn_merges(NUM_MERGES)
    tokens = [BOS, EOS, PAD] + byte_alphabet()
    known = set(tokens)
    for left, right in merges:
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
    vocab = {token: i for i, token in enumerate(tokens)}

    def added(token: str, token_id: int, special: bool) -> dict:
        return {"id": token_id, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": not special,
                "special": special}

    added_tokens = [added(token, vocab[token], True) for token in (BOS, EOS, PAD)]
    added_tokens += [added(token, len(tokens) + i, False) for i, token in enumerate(ROLE_TOKENS)]
    splits = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in SPLITS]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens,
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits + [byte_level]},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": [" ".join(m) for m in merges]}}
    return tokenizer, len(tokens) + len(ROLE_TOKENS)


def make_config(args: argparse.Namespace, vocab_size: int) -> dict:
    v3 = args.family == "v3"
    config = {
        "architectures": ["DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if v3 else "deepseek_v2",
        "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "vocab_size": vocab_size,
        "hidden_size": args.hidden, "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads, "num_key_value_heads": args.heads,
        "q_lora_rank": args.hidden // 2 if v3 else None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 2 * args.hidden, "moe_intermediate_size": args.hidden // 2,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": 8, "n_shared_experts": 1 if v3 else 2,
        "num_experts_per_tok": 2, "scoring_func": "sigmoid" if v3 else "softmax", "topk_method": "noaux_tc" if v3 else "greedy",
        "n_group": 4 if v3 else 1, "topk_group": 2 if v3 else 1, "norm_topk_prob": v3, "routed_scaling_factor": 2.5 if v3 else 1.0,
        "rms_norm_eps": 1e-6, "max_position_embeddings": args.max_position_embeddings, "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": max(1, args.max_position_embeddings // 4),
                         "beta_fast": 32, "beta_slow": 1, "mscale": 1.0 if v3 else 0.707, "mscale_all_dim": 1.0 if v3 else 0.707},
    }
    if v3:
        config["num_nextn_predict_layers"] = 0
    return config


def tensor_shapes(c: dict) -> dict[str, list[int]]:
    h, heads = c["hidden_size"], c["num_attention_heads"]
    qk = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    shapes = {"model.embed_tokens.weight": [c["vocab_size"], h], "lm_head.weight": [c["vocab_size"], h], "model.norm.weight": [h]}

    def mlp(prefix: str, width: int) -> None:
        shapes[prefix + "gate_proj.weight"] = [width, h]
        shapes[prefix + "up_proj.weight"] = [width, h]
        shapes[prefix + "down_proj.weight"] = [h, width]

    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        shapes[prefix + "input_layernorm.weight"] = [h]
        shapes[prefix + "post_attention_layernorm.weight"] = [h]
        if c["q_lora_rank"]:
            shapes[attention + "q_a_proj.weight"] = [c["q_lora_rank"], h]
            shapes[attention + "q_a_layernorm.weight"] = [c["q_lora_rank"]]
            shapes[attention + "q_b_proj.weight"] = [heads * qk, c["q_lora_rank"]]
        else:
            shapes[attention + "q_proj.weight"] = [heads * qk, h]
        shapes[attention + "kv_a_proj_with_mqa.weight"] = [c["kv_lora_rank"] + c["qk_rope_head_dim"], h]
        shapes[attention + "kv_a_layernorm.weight"] = [c["kv_lora_rank"]]
        shapes[attention + "kv_b_proj.weight"] = [heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"]]
        shapes[attention + "o_proj.weight"] = [h, heads * c["v_head_dim"]]
        if layer < c["first_k_dense_replace"]:
            mlp(prefix + "mlp.", c["intermediate_size"])
            continue
        shapes[prefix + "mlp.gate.weight"] = [c["n_routed_experts"], h]
        if c["topk_method"] == "noaux_tc":
            shapes[prefix + "mlp.gate.e_score_correction_bias"] = [c["n_routed_experts"]]
        for expert in range(c["n_routed_experts"]):
            mlp(f"{prefix}mlp.experts.{expert}.", c["moe_intermediate_size"])
        mlp(prefix + "mlp.shared_experts.", c["n_shared_experts"] * c["moe_intermediate_size"])
    return shapes


def random_bf16(rng: random.Random, count: int, deviation: float) -> bytes:
    """`count` values of both signs: three of four in [1, 2) * 2^e, the others four times smaller, with e chosen for `deviation`.

    A bf16 is sign, 8 bits of exponent, 7 of mantissa: the bytes are drawn as a whole and then fitted, which is fast.
    """
    exponent = 127 + round(math.log2(deviation / (math.sqrt(7 / 3) * math.sqrt(0.75 + 0.25 / 16))))
    low = bytes((exponent & 1) << 7 | (b & 0x7F) for b in range(256))
    high = bytes((b & 0x80) | ((exponent >> 1) - (1 if b & 0x03 == 0 else 0)) for b in range(256))
    out = bytearray(2 * count)
    out[0::2] = rng.randbytes(count).translate(low)
    out[1::2] = rng.randbytes(count).translate(high)
    return bytes(out)


def tensor_bytes(rng: random.Random, name: str, shape: list[int]) -> tuple[str, bytes]:
    """dtype and values."""
    if name.endswith("e_score_correction_bias"):
        return "F32", struct.pack(f"<{shape[0]}f", *(rng.uniform(-0.05, 0.05) for _ in range(shape[0])))
    if len(shape) == 1:  # a norm: 1 + k/128, k in 0..31
        return "BF16", b"".join(struct.pack("<H", 0x3F80 | rng.randrange(32)) for _ in range(shape[0]))
    rows, columns = shape
    # What is summed over `columns` products keeps its size; logits are spread wider, so that the best token stands out.
    gain = {"lm_head.weight": 3.0, "model.embed_tokens.weight": math.sqrt(columns)}.get(name, 1.0)
    return "BF16", random_bf16(rng, rows * columns, gain / math.sqrt(columns))


def write_safetensors(path: pathlib.Path, shapes: dict[str, list[int]], seed: int) -> int:
    """Returns the number of parameters."""
    rng = random.Random(seed)
    header, data, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name in sorted(shapes):
        dtype, values = tensor_bytes(rng, name, shapes[name])
        header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [offset, offset + len(values)]}
        data.append(values)
        offset += len(values)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        out.writelines(data)
    return sum(math.prod(shape) for shape in shapes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="directory to write (made if missing)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128, help="hidden_size; other widths follow from it")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--max_position_embeddings", type=int, default=4096, help="tokens")
    parser.add_argument("--family", choices=["v2", "v3"], default="v3")
    args = parser.parse_args()
    if args.layers < 1 or args.heads < 1 or args.hidden < 4 or args.hidden % 4 or args.max_position_embeddings < 1:
        parser.error("need --layers, --heads and --max_position_embeddings of at least 1, --hidden a multiple of 4")

    tokenizer, vocab_size = make_tokenizer()
    config = make_config(args, vocab_size)
    bos, eos, pad = ({"__type": "AddedToken", "content": t, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
                     for t in (BOS, EOS, PAD))
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.95},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "add_bos_token": True, "add_eos_token": False, "bos_token": bos, "eos_token": eos, "pad_token": pad, "unk_token": None,
            "clean_up_tokenization_spaces": False, "model_max_length": args.max_position_embeddings,
            "tokenizer_class": "LlamaTokenizerFast"},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (args.out / name).write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    parameters = write_safetensors(args.out / "model.safetensors", tensor_shapes(config), args.seed)
    print(f"{args.out}: {config['model_type']}, {parameters} parameters, {vocab_size} tokens")


if __name__ == "__main__":
    main()
