"""One layer of the model with the official round trips, one prompt at once, written from the
specification in plain torch; nothing of ours is used.

fp32 maths: every formula in fp32, with the quantize-dequantize round trips of the precision
    contract where it names them. Weights are dequantized fp32 tensors by their official names.
"""

from __future__ import annotations

import math

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
W = 128


def fp8_trip(x: torch.Tensor, block: int) -> torch.Tensor:
    parts = []
    for part in x.split(block, dim=-1):
        amax = part.abs().amax(-1, keepdim=True).clamp_min(1e-4)
        mantissa, exponent = torch.frexp(amax * torch.tensor(1 / 448))
        scale = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())
        parts.append((part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, -1)


def fp4_trip(x: torch.Tensor) -> torch.Tensor:
    parts = []
    for part in x.split(32, dim=-1):
        amax = part.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
        mantissa, exponent = torch.frexp(amax / 6)
        scale = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())
        y = (part / scale).clamp(-6, 6)
        gap = (y.abs()[..., None] - E2M1).abs()
        # the nearest code, of two equally near ones the even code
        order = gap + torch.arange(8) % 2 * 1e-9
        parts.append(E2M1[order.argmin(-1)] * y.sign() * scale)
    return torch.cat(parts, -1)


def norm(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    d, h = x.shape[-1], torch.ones(1, 1)
    while len(h) < d:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return x @ h * d**-0.5


class OfficialLayer:
    """Layer ``number`` of a checkpoint: streams of a whole prompt in, streams out."""

    def __init__(self, cfg: dict, tensors: dict[str, torch.Tensor], number: int) -> None:
        self.cfg, self.number = cfg, number
        self.ratio = cfg["compress_ratios"][number]
        prefix = f"layers.{number}."
        self.w = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        self.eps = cfg.get("rms_norm_eps", 1e-6)
        self.r = cfg["qk_rope_head_dim"]

    def __call__(self, streams: torch.Tensor, ids: list[int]) -> torch.Tensor:
        for site, inner in (("attn", self.attention), ("ffn", lambda x: self.moe(x, ids))):
            x, post, comb = self.mix(streams, site)
            y = inner(norm(x, self.w[f"{site}_norm.weight"], self.eps))
            streams = post[..., None] * y[:, None] + torch.einsum("tjk,tjc->tkc", comb, streams)
        return streams

    def mix(self, streams: torch.Tensor, site: str):
        n, hc_eps = streams.shape[1], self.cfg.get("hc_eps", 1e-6)
        fn, base, scale = (self.w[f"hc_{site}_{k}"] for k in ("fn", "base", "scale"))
        f = streams.flatten(1)
        m = f @ fn.T * torch.rsqrt(f.square().mean(-1, keepdim=True) + self.eps)
        pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + hc_eps
        post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + hc_eps
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
        for _ in range(self.cfg["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + hc_eps)
            comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
        return (pre[..., None] * streams).sum(1), post, comb

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """An FP8 linear: the input quantized in blocks of 128."""
        return fp8_trip(x, 128) @ self.w[f"{name}.weight"].T

    def rope(self, x: torch.Tensor, positions: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
        cfg, r = self.cfg, self.r
        i = torch.arange(r // 2, dtype=torch.float64)
        if self.ratio == 0:
            freq = cfg["rope_theta"] ** (-2 * i / r)
        else:
            base, s = cfg["compress_rope_theta"], cfg["rope_scaling"]
            freq = base ** (-2 * i / r)

            def dim(turns: float) -> float:
                length = s["original_max_position_embeddings"]
                return r * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))

            lo = max(math.floor(dim(s["beta_fast"])), 0)
            hi = min(math.ceil(dim(s["beta_slow"])), r - 1)
            ramp = ((i - lo) / (hi - lo if hi > lo else 0.001)).clamp(0, 1)
            freq = freq * (1 - ramp) + freq / s["factor"] * ramp
        angle = positions.float()[:, None] * freq.float()
        c, s_ = angle.cos(), sign * angle.sin()
        if x.ndim == 3:
            c, s_ = c[:, None], s_[:, None]
        a, b = x[..., -r::2], x[..., -r + 1 :: 2]
        turned = torch.stack((a * c - b * s_, a * s_ + b * c), -1).flatten(-2)
        return torch.cat((x[..., :-r], turned), -1)

    def kv_trip(self, row: torch.Tensor) -> torch.Tensor:
        return torch.cat((fp8_trip(row[:, : -self.r], 64), row[:, -self.r :]), 1)

    def pooled(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Compressed rows before their store."""
        kv, gate = x @ self.w[f"{name}.wkv.weight"].T, x @ self.w[f"{name}.wgate.weight"].T
        ape, ratio = self.w[f"{name}.ape"], self.ratio
        c = kv.shape[1] // (2 if ratio == 4 else 1)
        rows = []
        for j in range(len(x) // ratio):
            now = slice(ratio * j, ratio * (j + 1))
            z, v = gate[now] + ape, kv[now]
            if ratio == 4:
                z, v, old = z[:, c:], v[:, c:], slice(4 * j - 4, 4 * j)
                if j:
                    z = torch.cat((gate[old, :c] + ape[:, :c], z))
                    v = torch.cat((kv[old, :c], v))
            rows.append((z.softmax(0) * v).sum(0))
        if not rows:
            return x.new_zeros(0, c)
        rows = norm(torch.stack(rows), self.w[f"{name}.norm.weight"], self.eps)
        return self.rope(rows, ratio * torch.arange(len(rows)))

    def picks(self, x: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[T, rows]`` True where the indexer selects."""
        cfg, heads, di = self.cfg, self.cfg["index_n_heads"], self.cfg["index_head_dim"]
        k = fp4_trip(hadamard(self.pooled(x, "attn.indexer.compressor")))
        q = self.rope(self.linear(qr, "attn.indexer.wq_b").view(-1, heads, di), positions)
        q = fp4_trip(hadamard(q))
        weight = x @ self.w["attn.indexer.weights_proj.weight"].T * di**-0.5 * heads**-0.5
        score = (weight[..., None] * torch.relu(torch.einsum("thd,jd->thj", q, k))).sum(1)
        visible = torch.arange(len(k))[None] < (positions[:, None] + 1) // 4
        order = score.masked_fill(~visible, -torch.inf).argsort(dim=1, descending=True, stable=True)
        chosen = torch.zeros_like(visible).scatter_(1, order[:, : cfg["index_topk"]], True)
        return chosen & visible

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        cfg, positions = self.cfg, torch.arange(len(x))
        heads, d = cfg["num_attention_heads"], cfg["head_dim"]
        qr = norm(self.linear(x, "attn.wq_a"), self.w["attn.q_norm.weight"], self.eps)
        q = norm(self.linear(qr, "attn.wq_b").view(-1, heads, d), 1.0, self.eps)
        q = self.rope(q, positions)
        kv = norm(self.linear(x, "attn.wkv"), self.w["attn.kv_norm.weight"], self.eps)
        keys = self.kv_trip(self.rope(kv, positions))
        gap = positions[:, None] - positions[None]
        seen = (gap >= 0) & (gap < W)
        if self.ratio:
            rows = self.kv_trip(self.pooled(x, "attn.compressor"))
            late = torch.arange(len(rows))[None] < (positions[:, None] + 1) // self.ratio
            if self.ratio == 4:
                late = late & self.picks(x, qr, positions)
            keys, seen = torch.cat((keys, rows)), torch.cat((seen, late), 1)
        s = torch.einsum("thd,jd->thj", q, keys) * d**-0.5
        s = s.masked_fill(~seen[:, None], -torch.inf)
        sink = self.w["attn.attn_sink"].expand(len(x), -1)[..., None]
        p = torch.cat((s, sink), -1).softmax(-1)[..., :-1]
        o = self.rope(torch.einsum("thj,jd->thd", p, keys), positions, -1.0)
        groups, rank = cfg["o_groups"], cfg["o_lora_rank"]
        wo_a = self.w["attn.wo_a.weight"].view(groups, rank, -1)
        u = torch.einsum("tgk,grk->tgr", o.reshape(len(x), groups, -1), wo_a)
        return self.linear(u.flatten(1), "attn.wo_b")

    def expert(self, x: torch.Tensor, name: str, weight: torch.Tensor | float) -> torch.Tensor:
        limit = self.cfg["swiglu_limit"] or torch.inf
        a = self.linear(x, f"{name}.w1").clamp(max=limit)
        b = self.linear(x, f"{name}.w3").clamp(-limit, limit)
        return self.linear(torch.nn.functional.silu(a) * b * weight, f"{name}.w2")

    def moe(self, x: torch.Tensor, ids: list[int]) -> torch.Tensor:
        cfg, topk = self.cfg, self.cfg["num_experts_per_tok"]
        g = x @ self.w["ffn.gate.weight"].T
        s = torch.nn.functional.softplus(g).sqrt()
        if self.number < cfg["num_hash_layers"]:
            chosen = self.w["ffn.gate.tid2eid"][torch.tensor(ids)]
        else:
            biased = s + self.w["ffn.gate.bias"]
            chosen = biased.argsort(dim=1, descending=True, stable=True)[:, :topk]
        w = s.gather(1, chosen)
        w = w / w.sum(1, keepdim=True) * cfg["routed_scaling_factor"]
        y = self.expert(x, "ffn.shared_experts", 1.0)
        for e in range(cfg["n_routed_experts"]):
            for t, k in (chosen == e).nonzero().tolist():
                y[t] += self.expert(x[t : t + 1], f"ffn.experts.{e}", w[t, k])[0]
        return y
