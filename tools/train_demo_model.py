#!/usr/bin/env python3
"""Trains Ferry's demo model: a tiny DeepseekV3ForCausalLM that writes English, or its sparse variant.

usage: train_demo_model.py --text DIR --out DIR [--steps N] [--seed N]
       train_demo_model.py --text DIR --out DIR --sparse FROM_DENSE_DIR

Needs a CUDA GPU, torch, transformers >= 5.17, tokenizers and safetensors.  --text is what
tools/fetch_demo_text.sh writes.  The result is an ordinary Hugging Face directory: config.json,
model.safetensors (bf16), tokenizer.json, tokenizer_config.json, generation_config.json, and beside it
golden.safetensors (float32 logits by transformers) and training.json; of the dense model also loss.svg.
With --sparse it is a DeepseekV32ForCausalLM: the dense model and a lightning indexer in every layer.
"""
import argparse
import pathlib
import time

import torch
from tokenizers import Tokenizer

from demo_model import checkpoint, dense, sparse
from demo_model.corpus import Corpus
from demo_model.evaluation import bits_per_byte, load_float32
from demo_model.loss_plot import loss_plot


def describe(args, names: list[str], corpus: Corpus, model, start: float) -> dict:
    return {name: getattr(args, name) for name in ["seed"] + names} | {
        "parameters": sum(p.numel() for p in model.state_dict().values()), "train_tokens": len(corpus.stream),
        "held_out_bytes": corpus.held_out_bytes, "held_out_bits_per_byte": round(bits_per_byte(model, corpus), 4),
        "xz9_bits_per_byte": round(corpus.xz9_bits_per_byte, 4), "seconds": round(time.time() - start),
        "gpu": torch.cuda.get_device_name()}


def train_dense(args, device) -> dict:
    start = time.time()
    corpus = Corpus(args.text, vocab_size=args.vocab_size)
    print(f"{len(corpus.stream)} training tokens, held out {corpus.held_out_bytes} bytes, "
          f"xz -9: {corpus.xz9_bits_per_byte:.3f} bits a byte", flush=True)
    corpus.stream = corpus.stream.to(device)
    model = dense.build(args.vocab_size).to(device)
    curve, held_out_curve = dense.train(model, corpus, args)
    checkpoint.save(model, corpus, args.out)
    saved = checkpoint.save_golden(args.out, corpus, (1, 5, 300), device)
    report = describe(args, ["steps", "batch", "window", "lr", "weight_decay", "dropout"], corpus, saved, start)
    report |= {"held_out_openings": corpus.held_out_openings, "curve": curve, "held_out_curve": held_out_curve}
    (args.out / "loss.svg").write_text(loss_plot(report), encoding="utf-8")
    return report


def train_sparse(args, device) -> dict:
    start = time.time()
    corpus = Corpus(args.text, Tokenizer.from_file(str(args.sparse / "tokenizer.json")))
    corpus.stream = corpus.stream.to(device)
    dense_model = load_float32(args.sparse, device)
    dense_bits = bits_per_byte(dense_model, corpus)
    model = sparse.build(dense_model).to(device)
    stages = sparse.train(model, corpus, args)
    checkpoint.save(model, corpus, args.out)
    saved = checkpoint.save_golden(args.out, corpus, (1, 5, 300), device)
    names = ["sparse_batch", "indexer_steps", "indexer_lr", "finetune_steps", "finetune_lr", "weight_decay", "dropout"]
    return describe(args, names, corpus, saved, start) | {"dense": round(dense_bits, 4)} | stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    group = parser.add_argument_group("dense")
    group.add_argument("--steps", type=int, default=1600)
    group.add_argument("--batch", type=int, default=32)
    group.add_argument("--window", type=int, default=1024)
    group.add_argument("--vocab_size", type=int, default=4096)
    group.add_argument("--lr", type=float, default=3e-3)
    group = parser.add_argument_group("sparse")
    group.add_argument("--sparse", type=pathlib.Path, metavar="FROM_DENSE_DIR")
    group.add_argument("--sparse_batch", type=int, default=16)
    group.add_argument("--indexer_steps", type=int, default=600)
    group.add_argument("--indexer_lr", type=float, default=2e-3)
    group.add_argument("--finetune_steps", type=int, default=200)
    group.add_argument("--finetune_lr", type=float, default=2e-4)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    report = (train_sparse if args.sparse else train_dense)(args, torch.device("cuda"))
    checkpoint.write_report(args.out, report)
    print({name: value for name, value in report.items() if not name.endswith("curve")})


if __name__ == "__main__":
    main()
