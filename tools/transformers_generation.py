#!/usr/bin/env python3
"""What transformers' own generation reaches with the shapes that tools/gpu_serving.py measures.

  tools/transformers_generation.py --model bench/models/deepseek-v2-lite [--out FILE.json]

Random bf16 weights of config.json's shapes, 999 random ids in, 100 tokens out, greedy, one batch.
"""
import argparse
import json
import pathlib
import time

import torch
import transformers


def generate(model, batch, tokens_in, tokens_out):
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens_in), device="cuda")
    torch.cuda.synchronize()
    start = time.monotonic()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens_out,
                       min_new_tokens=tokens_out, do_sample=False, pad_token_id=0)
    torch.cuda.synchronize()
    return time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out")
    args = parser.parse_args()
    raw = json.loads((pathlib.Path(args.model) / "config.json").read_text())
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    generate(model, 1, 999, 4)
    results = []
    for batch in (1, 100):
        first = generate(model, batch, 999, 1)
        whole = generate(model, batch, 999, 100)
        results.append({"batch": batch, "ttft_ms": first * 1e3, "tpot_ms": (whole - first) / 99 * 1e3,
                        "output_tokens_per_s": batch * 100 / whole})
        print(f"transformers {transformers.__version__}, batch {batch}: TTFT {first * 1e3:.1f} ms, "
              f"TPOT {results[-1]['tpot_ms']:.2f} ms, {results[-1]['output_tokens_per_s']:.1f} tokens/s", flush=True)
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
