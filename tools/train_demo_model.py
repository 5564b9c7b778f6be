#!/usr/bin/env python3
"""Trains Ferry's demo model: a tiny DeepseekV3ForCausalLM that writes English.

usage: train_demo_model.py --text DIR --out DIR [--steps N] [--seed N]

Needs a CUDA GPU, torch, transformers >= 5.17, tokenizers and safetensors.  DIR is what
tools/fetch_demo_text.sh writes.  The result is an ordinary Hugging Face directory: config.json,
model.safetensors (bf16), tokenizer.json, tokenizer_config.json, generation_config.json, and beside it
golden.safetensors (float32 logits by transformers), training.json and loss.svg.
"""
import argparse
import json
import lzma
import math
import pathlib
import re
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

CONTEXT = 1024
HELD_OUT_SHARE = 0.05  # the end of every book
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
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
    special = [BOS, EOS, PAD] + CHAT_TOKENS
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(paragraphs, trainer)
    return tokenizer


def model_config(vocab_size: int) -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=vocab_size, hidden_size=192, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
        v_head_dim=32, intermediate_size=512, moe_intermediate_size=104, first_k_dense_replace=1,
        n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=1.5, max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=0, eos_token_id=1,
        pad_token_id=2, tie_word_embeddings=False, num_nextn_predict_layers=0)


class LoadBalancer:
    """Auxiliary-loss-free balancing: moves the gates' selection bias against each expert's load."""

    def __init__(self, model: DeepseekV3ForCausalLM, rate: float):
        self.rate, self.loads = rate, {}
        for layer in model.model.layers:
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None:
                gate.register_forward_pre_hook(self.observe)

    @torch.no_grad()
    def observe(self, gate, args):
        hidden = args[0].reshape(-1, gate.weight.shape[1]).float()
        scores = F.linear(hidden, gate.weight.float()).sigmoid() + gate.e_score_correction_bias
        chosen = scores.topk(2, dim=-1).indices
        self.loads[gate] = torch.bincount(chosen.flatten(), minlength=gate.weight.shape[0]).float()

    @torch.no_grad()
    def step(self):
        for gate, load in self.loads.items():
            gate.e_score_correction_bias += self.rate * torch.sign(load.mean() - load)


def add_dropout(model: DeepseekV3ForCausalLM, share: float) -> None:
    """Dropout on the embedding and on what every block adds to the residual stream, in training only."""

    def drop(module, args, output):
        return F.dropout(output, share, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


@torch.no_grad()
def bits_per_byte(model, documents: list[torch.Tensor], num_bytes: int, device) -> float:
    """Each document in windows of CONTEXT tokens with half a window of context before each half."""
    model.eval()
    nats = 0.0
    for ids in documents:
        step = CONTEXT // 2
        for begin in range(0, len(ids) - 1, step):
            left = max(0, begin - step + 1)
            window = torch.cat([torch.zeros(1, dtype=torch.long), ids[left:begin + step + 1]])[:CONTEXT + 1]
            window = window.to(device)[None]
            logits = model(window[:, :-1]).logits.float()
            losses = F.cross_entropy(logits[0], window[0, 1:], reduction="none")
            nats += losses[begin - left + (0 if begin == 0 else 1):].sum().item()
    model.train()
    return nats / math.log(2) / num_bytes


def write_loss_plot(path: pathlib.Path, curve: list[tuple[int, float]], held_out: list[tuple[int, float]]):
    width, height, margin = 640, 320, 40
    steps, top = curve[-1][0], max(v for _, v in curve[1:] or curve)
    low = min(v for _, v in curve + held_out) * 0.95

    def points(rows):
        return " ".join(f"{margin + (width - 2 * margin) * s / steps:.1f},"
                        f"{height - margin - (height - 2 * margin) * (min(v, top) - low) / (top - low):.1f}"
                        for s, v in rows)

    ticks = "".join(
        f'<text x="4" y="{height - margin - (height - 2 * margin) * i / 4 + 4:.0f}">{low + (top - low) * i / 4:.2f}</text>'
        for i in range(5))
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{ticks}'
        f'<text x="{width / 2 - 120}" y="16">loss (nats a token): training (blue), held out (red)</text>'
        f'<text x="{width - margin - 60}" y="{height - 12}">{steps} steps</text>'
        f'<polyline fill="none" stroke="#1f6fb4" points="{points(curve)}"/>'
        f'<polyline fill="none" stroke="#c0392b" stroke-width="2" points="{points(held_out)}"/></svg>\n', encoding="utf-8")


@torch.no_grad()
def write_golden(model_dir: pathlib.Path, prompt_ids: torch.Tensor, device) -> None:
    """Logits and greedy continuations in float32 from the saved (bf16-rounded) weights."""
    model = DeepseekV3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).eval()
    torch.backends.cuda.matmul.allow_tf32 = False
    tensors = {}
    for length in (1, 5, 64, 300):
        ids = prompt_ids[:length].to(device)
        tensors[f"p{length}.ids"] = ids.cpu()
        tensors[f"p{length}.logits"] = model(ids[None]).logits[0, -min(length, 64):].float().cpu().contiguous()
        greedy, margin = [], []
        for _ in range(24):
            best = model(ids[None]).logits[0, -1].float().topk(2)
            greedy.append(best.indices[0])
            margin.append(best.values[0] - best.values[1])
            ids = torch.cat([ids, best.indices[:1]])
        tensors[f"p{length}.greedy"] = torch.stack(greedy).cpu()
        tensors[f"p{length}.margin"] = torch.stack(margin).cpu()
    save_file(tensors, model_dir / "golden.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda")
    args.out.mkdir(parents=True, exist_ok=True)

    train, held_out = split_books(read_books(args.text))
    tokenizer = train_tokenizer([p for book in train for p in book], args.vocab_size)
    encode = lambda paragraphs: torch.tensor(tokenizer.encode("\n\n".join(paragraphs)).ids)
    train_ids = [encode(book) for book in train]
    held_ids = [encode(book) for book in held_out]
    held_bytes = sum(len("\n\n".join(book).encode()) for book in held_out)
    xz_bits = 8 * len(lzma.compress("\n\n".join("\n\n".join(b) for b in held_out).encode(), preset=9)) / held_bytes
    stream = torch.cat([torch.cat([torch.tensor([0]), ids, torch.tensor([1])]) for ids in train_ids]).to(device)
    print(f"{sum(map(len, train_ids))} training tokens, held out {held_bytes} bytes, xz -9: {xz_bits:.3f} bits a byte", flush=True)

    model = DeepseekV3ForCausalLM(model_config(args.vocab_size)).to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    add_dropout(model, args.dropout)
    balancer = LoadBalancer(model, rate=1e-3)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": args.weight_decay}, {"params": other, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.95), fused=True)
    warmup = min(200, args.steps // 10)
    curve, held_curve, start = [], [], time.time()
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        scale = min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * scale
        offsets = torch.randint(0, len(stream) - args.window, (args.batch,), generator=generator)
        batch = torch.stack([stream[o:o + args.window] for o in offsets.tolist()])
        batch = torch.cat([torch.zeros_like(batch[:, :1]), batch], dim=1)  # every window starts with BOS
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balancer.step()
        if step % 20 == 0:
            curve.append((step, loss.item()))
        if step % 500 == 0 or step + 1 == args.steps:
            bits = bits_per_byte(model, held_ids, held_bytes, device)
            held_curve.append((step, bits * math.log(2) * held_bytes / sum(map(len, held_ids))))
            print(f"step {step} loss {loss.item():.3f} held out {bits:.3f} bits a byte, {time.time() - start:.0f} s", flush=True)

    bias = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    model.to(torch.bfloat16)
    for name, buffer in bias.items():
        buffer.data = buffer.data.float()
    model.save_pretrained(args.out)
    model.generation_config.to_json_file(args.out / "generation_config.json")
    tokenizer.save(str(args.out / "tokenizer.json"))
    (args.out / "tokenizer_config.json").write_text(json.dumps({
        "add_bos_token": True, "add_eos_token": False, "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
        "model_max_length": CONTEXT, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2, ensure_ascii=False) + "\n")
    saved = load_file(args.out / "model.safetensors")
    final = DeepseekV3ForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device)
    final_bits = bits_per_byte(final, held_ids, held_bytes, device)
    write_loss_plot(args.out / "loss.svg", curve, held_curve)
    write_golden(args.out, torch.cat([torch.tensor([0]), held_ids[0]]), device)
    report = {"seed": args.seed, "steps": args.steps, "batch": args.batch, "window": args.window, "lr": args.lr,
              "weight_decay": args.weight_decay, "dropout": args.dropout,
              "parameters": sum(t.numel() for t in saved.values()), "train_tokens": int(len(stream)),
              "held_out_bytes": held_bytes, "held_out_bits_per_byte": round(final_bits, 4),
              "xz9_bits_per_byte": round(xz_bits, 4), "seconds": round(time.time() - start),
              "gpu": torch.cuda.get_device_name(), "held_out_openings": [book[1][:200] for book in held_out]}
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
