"""Attention of one layer over whole sequences that start at position 0.

Queries come in blocks of 128; a block sees its own keys, those of the block before and every
compressed row of its sequence, behind a mask. A last key of zeros carries the sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from demo.parts import rms_norm, rope_tables, rotate
from demo.rounding import Rounding
from ftruntime.model.config import ModelConfig

BLOCK: Final = 128
_KEYS_MULTIPLE: Final = 16


@dataclass(frozen=True)
class Selection:
    """Which keys a query sees.

    ``sparse``: of a layer with an indexer only the selected rows, as in the model; else all that
    are visible. ``learn``: also return the indexer's distance from what attention looked at.
    The others take away what the model has, to measure what it is worth: ``rows`` off no
    compressed row, ``worst`` the rows that the indexer likes least, ``window`` fewer tokens.
    """

    sparse: bool = True
    learn: bool = False
    rows: bool = True
    worst: bool = False
    window: int = BLOCK


class _SinkAttention(torch.autograd.Function):
    """``softmax(q k^T + mask, with a sink) k`` for `q [B, M, d]`, `keys [B, K, d]`, `mask` that
    broadcasts to `[B, M/H, H, K]` and `sink [H]`, whose column is the last key.

    Returns the output and the probabilities; the latter carry no gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor) -> Any:
        heads = len(sink)
        scores = torch.bmm(q, keys.mT)
        by_head = scores.view(len(q), -1, heads, keys.shape[1])
        by_head += mask
        by_head[..., -1] = sink.to(scores.dtype)
        probs = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(q, keys, probs)
        ctx.heads = heads
        ctx.mark_non_differentiable(probs)
        return torch.bmm(probs, keys), probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        q, keys, probs = ctx.saved_tensors
        grad = grad.contiguous()
        scores = torch._softmax_backward_data(torch.bmm(grad, keys.mT), probs, -1, probs.dtype)
        by_head = scores.view(len(q), -1, ctx.heads, keys.shape[1])
        wide = torch.promote_types(scores.dtype, torch.float32)
        grad_sink = by_head[..., -1].sum((0, 1), dtype=wide)
        # the sink's key is zero and stays so: what its column gives to keys is dropped
        grad_keys = torch.bmm(scores.mT, q) + torch.bmm(probs.mT, grad)
        return torch.bmm(scores, keys), grad_keys, None, grad_sink


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sink_attention(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    both: tuple[Tensor, Tensor] = _SinkAttention.apply(  # type: ignore[no-untyped-call]
        q, keys, mask, sink
    )
    return both


def attention(
    config: ModelConfig, w: dict[str, Tensor], ratio: int, x: Tensor, batch: int,
    selection: Selection, rounding: Rounding,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of `x [N, D]`, `batch` sequences of a multiple of 128 tokens each.

    Args:
        w: the layer's tensors by their names behind ``attn.``.

    Returns:
        `[N, D]`, and the indexer's loss a token where one is learnt.
    """
    eps, rope, heads = config.rms_norm_eps, config.qk_rope_head_dim, config.num_attention_heads
    tokens, width = len(x) // batch, config.head_dim
    cos, sin = rope_tables(config, ratio, tokens)
    x_in = rounding.activation(x)
    qr = rms_norm(linear(x_in, w["wq_a.weight"]), w["q_norm.weight"], eps)
    qr_in = rounding.activation(qr)
    q = rms_norm(linear(qr_in, w["wq_b.weight"]).view(batch, tokens, heads, width), None, eps)
    q = rotate(q * width**-0.5, cos[:, None], sin[:, None])
    kv = rms_norm(linear(x_in, w["wkv.weight"]), w["kv_norm.weight"], eps)
    kv = rounding.row(rotate(kv.view(batch, tokens, width), cos, sin), rope)

    rows, index, mask = None, None, None
    if ratio and selection.rows:
        rows = compress(config, w, "compressor", ratio, x.view(batch, tokens, -1))
        rows = rounding.row(rows, rope)
        mask = _visible(tokens, ratio, rows.shape[1])
    if mask is not None and ratio == 4 and (selection.learn or selection.sparse):
        with torch.set_grad_enabled(selection.learn and torch.is_grad_enabled()):
            index = index_scores(config, w, x.detach(), qr_in.detach(), batch, rounding)
        index = index.masked_fill(~mask, float("-inf"))
        if selection.sparse and index.shape[2] > config.index_topk:
            order = index.detach()
            if selection.worst:
                order = (-order).masked_fill(~mask, float("-inf"))
            mask = mask & _selected(order, config.index_topk)
    out, probs = _attend(q, kv, rows, mask, w["attn_sink"], selection.window)
    loss = None
    if index is not None and mask is not None and selection.learn:
        loss = _index_loss(index, mask, probs[..., 2 * BLOCK :], heads)

    out = rotate(out.view(batch, tokens, heads, width), cos[:, None], -sin[:, None])
    grouped = _by_group(out.view(batch * tokens, config.o_groups, -1), w["wo_a.weight"])
    return linear(rounding.activation(grouped), w["wo_b.weight"]), loss


def _by_group(out: Tensor, weight: Tensor) -> Tensor:
    """`[N, G * R]` of `out [N, G, K]`, a matrix `[R, K]` of `weight [G * R, K]` for each group."""
    groups = out.shape[1]
    wide = torch.bmm(out.transpose(0, 1), weight.view(groups, -1, out.shape[2]).mT)
    return wide.transpose(0, 1).flatten(1)


def _attend(
    q: Tensor, kv: Tensor, rows: Tensor | None, visible: Tensor | None, sink: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Outputs `[blocks, 128 * H, d]` of `q [B, T, H, d]`, and the probabilities."""
    batch, tokens, heads, width = q.shape
    blocks = tokens // BLOCK
    before = pad(kv, (0, 0, BLOCK, 0))[:, :tokens].view(batch, blocks, BLOCK, width)
    parts = [before, kv.view(batch, blocks, BLOCK, width)]
    i, j = torch.arange(BLOCK)[:, None], torch.arange(2 * BLOCK)
    window = ((j > i + BLOCK - size) & (j <= i + BLOCK)).expand(blocks, -1, -1).clone()
    window[0, :, :BLOCK] = False
    seen = [window.expand(batch, -1, -1, -1)]
    count = 2 * BLOCK
    if rows is not None and visible is not None and rows.shape[1]:
        parts.append(rows[:, None].expand(-1, blocks, -1, -1))
        seen.append(visible.expand(batch, -1, -1).view(batch, blocks, BLOCK, -1))
        count += rows.shape[1]
    extra = -(count + 1) % _KEYS_MULTIPLE + 1
    keys = pad(torch.cat(parts, dim=2), (0, 0, 0, extra)).flatten(0, 1)
    mask = pad(torch.cat(seen, dim=3), (0, extra)).flatten(0, 1)
    penalty = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    flat = q.view(batch * blocks, BLOCK * heads, width)
    both: tuple[Tensor, Tensor] = _sink_attention(flat, keys, penalty[:, :, None], sink)
    return both


def compress(
    config: ModelConfig, w: dict[str, Tensor], name: str, ratio: int, x: Tensor
) -> Tensor:
    """Compressed rows `[B, T // ratio, c]` of `x [B, T, D]`, normed and rotated."""
    batch, tokens, _ = x.shape
    count = tokens // ratio
    values = linear(x, w[f"{name}.wkv.weight"]).view(batch, count, ratio, -1)
    gates = linear(x, w[f"{name}.wgate.weight"]).view(batch, count, ratio, -1).float()
    gates = gates + w[f"{name}.ape"]
    if ratio == 4:
        values = _with_window_before(values, 0.0)
        gates = _with_window_before(gates, float("-inf"))
    shares = torch.softmax(gates, dim=2)
    pooled = (shares * values.float()).sum(2).to(x.dtype)
    rows = rms_norm(pooled, w[f"{name}.norm.weight"], config.rms_norm_eps)
    cos, sin = rope_tables(config, ratio, tokens)
    return rotate(rows, cos[::ratio], sin[::ratio])


def _with_window_before(x: Tensor, absent: float) -> Tensor:
    """`[B, J, 8, c]`: series A of the window before, then series B of this one."""
    old, new = x.chunk(2, dim=3)
    return torch.cat((pad(old, (0, 0, 0, 0, 1, 0), value=absent)[:, :-1], new), dim=2)


def index_scores(
    config: ModelConfig, w: dict[str, Tensor], x: Tensor, qr: Tensor, batch: int, rounding: Rounding
) -> Tensor:
    """The indexer's scores `[B, T, rows]` fp32 of every row, visible or not."""
    heads, width, tokens = config.index_n_heads, config.index_head_dim, len(x) // batch
    cos, sin = rope_tables(config, 4, tokens)
    q = linear(qr, w["indexer.wq_b.weight"]).view(batch, tokens, heads, width)
    q = rounding.index(rotate(q, cos[:, None], sin[:, None]))
    inner = {name.removeprefix("indexer."): t for name, t in w.items() if "indexer." in name}
    rows = rounding.index(compress(config, inner, "compressor", 4, x.view(batch, tokens, -1)))
    products = torch.relu(torch.bmm(q.flatten(1, 2), rows.mT)).view(batch, tokens, heads, -1)
    weights = linear(x, w["indexer.weights_proj.weight"]).view(batch, tokens, 1, heads)
    scaled = weights * (width * heads) ** -0.5
    return torch.matmul(scaled, products).squeeze(2).float()


def _visible(tokens: int, ratio: int, rows: int) -> Tensor:
    """`[1, T, rows]`: row j is visible from the token on that completes it."""
    position, row = torch.arange(tokens)[:, None], torch.arange(rows)
    return (row < (position + 1) // ratio)[None]


def _selected(scores: Tensor, topk: int) -> Tensor:
    """True at the `topk` best entries of the last dimension; equal scores: lower row."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def _index_loss(index: Tensor, mask: Tensor, probs: Tensor, heads: int) -> Tensor:
    """Mean distance a token of the indexer's choice from attention's, over the rows in `mask`."""
    batch, tokens, rows = index.shape
    seen = probs[..., :rows].view(batch, tokens, heads, rows).float().mean(2)
    share = seen.sum(-1, keepdim=True)
    target = seen / (share + 1e-6)
    log_choice = torch.log_softmax(index.masked_fill(~mask, -1e4), dim=-1)
    distance = torch.xlogy(target, target) - target * log_choice
    return (distance.sum(-1) * (share[..., 0] > 1e-3)).mean()
