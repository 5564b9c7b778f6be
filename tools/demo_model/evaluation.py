"""What a demo model is judged by: held-out bits a byte, and golden logits for `ferry parity`."""
import math
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from demo_model.corpus import BOS_ID, Corpus

CONTEXT = 1024


@torch.no_grad()
def held_out_nats(model, corpus: Corpus) -> float:
    """Each document in windows of CONTEXT tokens with half a window of context before each half."""
    was_training = model.training
    model.eval()
    nats, step = 0.0, CONTEXT // 2
    for ids in corpus.held_out:
        for begin in range(0, len(ids) - 1, step):
            left = max(0, begin - step + 1)
            window = torch.cat([torch.tensor([BOS_ID]), ids[left:begin + step + 1]])[:CONTEXT + 1]
            window = window.to(model.device)[None]
            logits = model(window[:, :-1], use_cache=False).logits.float()
            losses = F.cross_entropy(logits[0], window[0, 1:], reduction="none")
            nats += losses[begin - left + (0 if begin == 0 else 1):].sum().item()
    model.train(was_training)
    return nats


def bits_per_byte(model, corpus: Corpus) -> float:
    return held_out_nats(model, corpus) / math.log(2) / corpus.held_out_bytes


def load_float32(model_dir: pathlib.Path, device):
    """A saved model (weights rounded to bf16) with float32 arithmetic."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    return model.to(device).eval()


@torch.no_grad()
def write_golden(model, prompt_ids: torch.Tensor, lengths: tuple[int, ...], path: pathlib.Path) -> None:
    """Logits and greedy continuations of prompt_ids' first tokens, every step from the whole sequence."""
    tensors = {}
    for length in lengths:
        ids = prompt_ids[:length].to(model.device)
        tensors[f"p{length}.ids"] = ids.cpu()
        logits = model(ids[None], use_cache=False).logits[0, -min(length, 64):]
        tensors[f"p{length}.logits"] = logits.float().cpu().contiguous()
        greedy, margin = [], []
        for _ in range(24):
            best = model(ids[None], use_cache=False).logits[0, -1].float().topk(2)
            greedy.append(best.indices[0])
            margin.append(best.values[0] - best.values[1])
            ids = torch.cat([ids, best.indices[:1]])
        tensors[f"p{length}.greedy"] = torch.stack(greedy).cpu()
        tensors[f"p{length}.margin"] = torch.stack(margin).cpu()
    save_file(tensors, path)
