"""The dense demo model: a tiny DeepseekV3ForCausalLM and its training."""
import math
import time

import torch
import torch.nn.functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from demo_model.corpus import BOS_ID, EOS_ID, PAD_ID, Corpus
from demo_model.evaluation import CONTEXT, held_out_nats


def shape(vocab_size: int) -> dict:
    """The keys that the dense and the sparse configuration share."""
    return dict(
        vocab_size=vocab_size, hidden_size=192, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
        v_head_dim=32, intermediate_size=512, moe_intermediate_size=104, first_k_dense_replace=1,
        n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=1.5, max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rope_interleave=True,
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, tie_word_embeddings=False)


def build(vocab_size: int) -> DeepseekV3ForCausalLM:
    return DeepseekV3ForCausalLM(DeepseekV3Config(**shape(vocab_size), num_nextn_predict_layers=0))


class LoadBalancer:
    """Auxiliary-loss-free balancing: moves the gates' selection bias against each expert's load."""

    def __init__(self, model, rate: float):
        self.rate, self.loads = rate, {}
        self.num_chosen = model.config.num_experts_per_tok
        for layer in model.model.layers:
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None:
                gate.register_forward_pre_hook(self.observe)

    @torch.no_grad()
    def observe(self, gate, args):
        hidden = args[0].reshape(-1, gate.weight.shape[1]).float()
        scores = F.linear(hidden, gate.weight.float()).sigmoid() + gate.e_score_correction_bias
        chosen = scores.topk(self.num_chosen, dim=-1).indices
        self.loads[gate] = torch.bincount(chosen.flatten(), minlength=gate.weight.shape[0]).float()

    @torch.no_grad()
    def step(self):
        for gate, load in self.loads.items():
            gate.e_score_correction_bias += self.rate * torch.sign(load.mean() - load)


def add_dropout(model, share: float) -> None:
    """Dropout on the embedding and on what every block adds to the residual stream, in training only."""

    def drop(module, args, output):
        return F.dropout(output, share, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


class Optimizer:
    """AdamW, decay on matrices only, linear warm-up and a cosine down to a twentieth of the rate."""

    def __init__(self, parameters, lr: float, steps: int, warmup: int, weight_decay: float):
        parameters = list(parameters)
        self.lr, self.steps, self.warmup, self.taken = lr, steps, warmup, 0
        self.adam = torch.optim.AdamW(
            [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
             {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}],
            lr=lr, betas=(0.9, 0.95), fused=True)
        self.parameters = parameters

    def step(self) -> None:
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * self.taken / self.steps))
        for group in self.adam.param_groups:
            group["lr"] = self.lr * min(1.0, (self.taken + 1) / self.warmup) * cosine
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.taken += 1


def train(model, corpus: Corpus, args) -> tuple[list, list]:
    """Trains; returns (step, nats a token) of training, with dropout, and of the held-out text."""
    add_dropout(model, args.dropout)
    balancer = LoadBalancer(model, rate=1e-3)
    optimizer = Optimizer(model.parameters(), args.lr, args.steps, min(200, args.steps // 10), args.weight_decay)
    generator = torch.Generator().manual_seed(args.seed)
    curve, held_out_curve, start = [], [], time.time()
    model.train()
    for step in range(args.steps):
        batch = corpus.windows(args.batch, args.window, generator)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        balancer.step()
        if step % 20 == 0:
            curve.append((step, round(loss.item(), 3)))
        if step % 400 == 0 or step + 1 == args.steps:
            nats = held_out_nats(model, corpus)
            held_out_curve.append((step, round(nats / corpus.held_out_tokens, 3)))
            print(f"step {step} loss {loss.item():.3f} held out "
                  f"{nats / math.log(2) / corpus.held_out_bytes:.3f} bits a byte, "
                  f"{time.time() - start:.0f} s", flush=True)
    return curve, held_out_curve
