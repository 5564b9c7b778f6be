"""The sparse demo model: the dense one as DeepseekV32ForCausalLM with a trained indexer in every layer.

Two stages, as DeepSeek-V3.2 was made: first the indexers alone learn the dense attention, then everything is
finetuned with the selection on.  In both the indexers' loss is the KL divergence of softmax(index scores) from
the attention weights summed over the heads and normalised; it reaches the indexers only.
"""
import math
import time

import torch
import torch.nn.functional as F
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

from demo_model.corpus import Corpus
from demo_model.dense import LoadBalancer, Optimizer, add_dropout, shape
from demo_model.evaluation import CONTEXT, bits_per_byte

INDEX_HEADS, INDEX_HEAD_DIM, INDEX_TOPK = 16, 32, 64


def build(dense) -> DeepseekV32ForCausalLM:
    """The dense model's weights with untrained indexers."""
    common = {name: getattr(dense.config, name) for name in shape(0)}
    config = DeepseekV32Config(**common, index_n_heads=INDEX_HEADS, index_head_dim=INDEX_HEAD_DIM,
                               index_topk=INDEX_TOPK)
    config._attn_implementation = "eager"  # the attention weights are needed
    model = DeepseekV32ForCausalLM(config).float()
    missing, unexpected = model.load_state_dict(dense.state_dict(), strict=False)
    if unexpected or any(".indexer." not in name for name in missing):
        raise ValueError(f"the dense weights do not fit: {missing=} {unexpected=}")
    return model


def set_topk(model, topk: int) -> None:
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = topk


class AttentionTap:
    """Each layer's indexer inputs, its selection and its attention weights, from the last forward."""

    def __init__(self, model):
        self.seen: dict = {}  # by indexer
        for layer in model.model.layers:
            layer.self_attn.indexer.register_forward_hook(self._saw_selection)
            layer.self_attn.register_forward_hook(self._saw_weights)

    def _saw_selection(self, indexer, args, indices):
        hidden, q_latent, position_embeddings = args[:3]
        self.seen[indexer] = [hidden.detach(), q_latent.detach(), position_embeddings, indices]

    def _saw_weights(self, attention, args, output):
        self.seen[attention.indexer].append(output[1].detach())


def index_scores(indexer, hidden, q_latent, position_embeddings) -> torch.Tensor:
    """[batch, query, key], unmasked: what the indexer's own forward ranks, but with gradients."""
    rotary, passed = indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim
    queries = indexer.wq_b(q_latent).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    q_rot, q_pass = queries.split([rotary, passed], dim=-1)
    k_rot, k_pass = keys.split([rotary, passed], dim=-1)
    q_rot, k_rot = apply_rotary_pos_emb(q_rot, k_rot, *position_embeddings, unsqueeze_dim=2)
    queries, keys = torch.cat([q_rot, q_pass], dim=-1), torch.cat([k_rot, k_pass], dim=-1)
    products = F.relu(torch.einsum("bqhd,bkd->bqhk", queries, keys.squeeze(2)) * indexer.head_dim**-0.5)
    return torch.einsum("bqh,bqhk->bqk", indexer.weights_proj(hidden) * indexer.n_heads**-0.5, products)


def visible_keys(indices: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Selected and not in the future: bool [batch, query, key]."""
    selected = torch.zeros(*indices.shape[:2], num_keys, dtype=torch.bool, device=indices.device)
    return selected.scatter(-1, indices.long(), True).tril()


def indexer_loss(tap: AttentionTap) -> torch.Tensor:
    """Mean over layers and queries, in nats."""
    losses = []
    for indexer, (hidden, q_latent, position_embeddings, indices, weights) in tap.seen.items():
        visible = visible_keys(indices, weights.shape[-1])
        scores = index_scores(indexer, hidden, q_latent, position_embeddings)
        log_index = scores.masked_fill(~visible, -math.inf).log_softmax(-1).masked_fill(~visible, 0.0)
        target = weights.mean(1)  # every head's weights sum to one
        losses.append((torch.xlogy(target, target) - target * log_index).sum(-1).mean())
    return torch.stack(losses).mean()


@torch.no_grad()
def check_scores(model, tap: AttentionTap, ids: torch.Tensor) -> None:
    """index_scores selects what transformers' indexers select."""
    set_topk(model, INDEX_TOPK)
    model(ids, use_cache=False)
    for indexer, (hidden, q_latent, position_embeddings, indices, _) in tap.seen.items():
        scores = index_scores(indexer, hidden, q_latent, position_embeddings)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        ours = scores.masked_fill(future, -math.inf).topk(INDEX_TOPK, dim=-1).indices
        agree = (visible_keys(ours, ids.shape[1]) == visible_keys(indices, ids.shape[1])).float().mean().item()
        if agree < 0.999:  # ties and rounding may swap a few
            raise ValueError(f"index_scores agrees with transformers on {agree:.4f} of the keys only")


def train_indexers(model, tap: AttentionTap, corpus: Corpus, args) -> list:
    """Stage 1: everything but the indexers is frozen, attention is dense.  Returns (step, KL in nats)."""
    model.eval()
    generator = torch.Generator().manual_seed(args.seed + 1)
    check_scores(model, tap, corpus.windows(2, CONTEXT - 1, generator))
    set_topk(model, CONTEXT)
    parameters = [p for n, p in model.named_parameters() if ".indexer." in n]
    optimizer = Optimizer(parameters, args.indexer_lr, args.indexer_steps, 50, weight_decay=0.0)
    curve = []
    for step in range(args.indexer_steps):
        with torch.no_grad():
            model(corpus.windows(args.sparse_batch, CONTEXT - 1, generator), use_cache=False)
        loss = indexer_loss(tap)
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step + 1 == args.indexer_steps:
            curve.append((step, round(loss.item(), 4)))
    return curve


def finetune(model, tap: AttentionTap, corpus: Corpus, args) -> list:
    """Stage 2: everything learns with the selection on.  Returns (step, loss in nats a token, KL in nats)."""
    set_topk(model, INDEX_TOPK)
    add_dropout(model, args.dropout)
    balancer = LoadBalancer(model, rate=1e-4)
    optimizer = Optimizer(model.parameters(), args.finetune_lr, args.finetune_steps, 20, args.weight_decay)
    generator = torch.Generator().manual_seed(args.seed + 2)
    curve = []
    model.train()
    for step in range(args.finetune_steps):
        batch = corpus.windows(args.sparse_batch, CONTEXT, generator)
        loss = F.cross_entropy(model(batch[:, :-1], use_cache=False).logits.flatten(0, 1), batch[:, 1:].flatten())
        divergence = indexer_loss(tap)
        (loss + divergence).backward()
        optimizer.step()
        balancer.step()
        if step % 20 == 0 or step + 1 == args.finetune_steps:
            curve.append((step, round(loss.item(), 3), round(divergence.item(), 4)))
    model.eval()
    return curve


def train(model, corpus: Corpus, args) -> dict:
    """Both stages; returns curves and held-out bits a byte at each point."""
    start, report, tap = time.time(), {}, AttentionTap(model)

    def judge(name: str, topk: int) -> None:
        set_topk(model, topk)
        report[name] = round(bits_per_byte(model, corpus), 4)
        print(f"{name}: {report[name]} bits a byte, {time.time() - start:.0f} s", flush=True)

    judge("every_key", CONTEXT)
    judge("untrained_indexer", INDEX_TOPK)
    report["kl_curve"] = train_indexers(model, tap, corpus, args)
    print(f"indexers' divergence {report['kl_curve'][0]} to {report['kl_curve'][-1]}", flush=True)
    judge("before_finetuning", INDEX_TOPK)
    report["finetune_curve"] = finetune(model, tap, corpus, args)
    print(f"finetuning {report['finetune_curve'][0]} to {report['finetune_curve'][-1]}", flush=True)
    judge("after_finetuning", INDEX_TOPK)
    return report
