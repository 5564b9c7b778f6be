"""Writes a trained model as an ordinary Hugging Face directory."""
import json
import pathlib

import torch

from demo_model.corpus import BOS, BOS_ID, EOS, PAD, Corpus
from demo_model.evaluation import CONTEXT, load_float32, write_golden


def save(model, corpus: Corpus, out: pathlib.Path) -> None:
    """bf16 weights, the gates' selection bias in float32, the tokenizer.  Converts the model in place."""
    bias = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    model.to(torch.bfloat16)
    for buffer in bias.values():
        buffer.data = buffer.data.float()
    model.save_pretrained(out)
    model.generation_config.to_json_file(out / "generation_config.json")
    corpus.tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({
        "add_bos_token": True, "add_eos_token": False, "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
        "model_max_length": CONTEXT, "tokenizer_class": "PreTrainedTokenizerFast"},
        indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_golden(out: pathlib.Path, corpus: Corpus, lengths: tuple[int, ...], device):
    """golden.safetensors of held-out text from the saved weights; returns the model that made it."""
    model = load_float32(out, device)
    write_golden(model, torch.cat([torch.tensor([BOS_ID]), corpus.held_out[0]]), lengths,
                 out / "golden.safetensors")
    return model


def write_report(out: pathlib.Path, report: dict) -> None:
    """training.json; its curves stay one point a line."""
    text = json.dumps(report, indent=2, ensure_ascii=False)
    for name in [n for n in report if n.endswith("curve")]:
        rows = ",\n    ".join(json.dumps(row) for row in report[name])
        text = text.replace(f'"{name}": ' + _indented(report[name]), f'"{name}": [\n    {rows}\n  ]')
    (out / "training.json").write_text(text + "\n", encoding="utf-8")


def _indented(value) -> str:
    return json.dumps(value, indent=2).replace("\n", "\n  ")
