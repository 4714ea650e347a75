"""Run another engine's MoE layers with their experts in host memory and a few slots on the device.

`CachedExperts` is all that an engine adds: its own routing goes in, the layer's result comes out.
Below it stands a toy engine with its own router, whose every layer is compared with the same
experts read from the checkpoint's codes by a table and multiplied in fp64.

    .venv/bin/python examples/experts_in_host_memory.py [--device cuda]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

import ftkernels

LIMIT = 10.0  # of the SwiGLU clamp
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class CachedExperts:
    """Adapter for one MoE layer; calls stand inside ``with cache.step(phase)``.

    Args:
        cache: of all layers, over banks that `ExpertBank.pack()` ordered.
        activation: "fp8" or "bf16" products.
    """

    cache: ftkernels.ExpertCache
    layer: int
    activation: str = "fp8"

    def decode(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """A step whose experts fit the slots together, those of its other layers included.

        Args:
            x: ``[T, C]`` bf16.
            topk_weights: ``[T, topk]`` fp32.
            topk_ids: ``[T, topk]`` int32, -1 for none.
        """
        slots = self.cache.ensure(self.layer, topk_ids)
        return self._run(x, topk_weights, topk_ids, slots)

    def prefill(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Any number of experts, in groups; the copies of one run beside the products of another.
        Every route has a place of its own, so groups change no bit of the result."""
        routed = x.new_zeros(*topk_ids.shape, x.shape[1])
        for slots in self.cache.groups(self.layer, topk_ids):
            self._run(x, topk_weights, topk_ids, slots, routed)
        return ftkernels.moe_combine(routed, topk_ids=topk_ids)

    def _run(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
        slots: torch.Tensor, routed_out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return ftkernels.moe_fp4(
            x, *self.cache.slots(self.layer), topk_weights, topk_ids, swiglu_limit=LIMIT,
            slot_of_expert=slots, activation=self.activation, packed=True, routed_out=routed_out,
        )  # fmt: skip


class ToyEngine:
    """Layers of experts with random FP4 weights, and a router that shares nothing with the kernels.

    Args:
        num_slots: of all layers together; a decode step's experts must fit.
    """

    def __init__(
        self, *, num_layers: int = 3, num_experts: int = 16, num_slots: int = 20, topk: int = 4,
        hidden: int = 256, inter: int = 128, activation: str = "fp8", device: str = "cpu",
    ) -> None:  # fmt: skip
        self.generator = torch.Generator().manual_seed(5)
        self.device, self.topk, self.hidden = device, topk, hidden
        shapes = (num_experts, 2 * inter, hidden), (num_experts, hidden, inter)
        self.codes = [[self._codes(*shape) for shape in shapes] for _ in range(num_layers)]
        self.routers = [self.random(num_experts, hidden).float() for _ in range(num_layers)]
        banks = [self._bank(*w13, *w2) for w13, w2 in self.codes]
        self.cache = ftkernels.ExpertCache(num_layers, num_experts, num_slots, banks, device=device)
        self.experts = [CachedExperts(self.cache, i, activation) for i in range(num_layers)]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, torch.bfloat16)

    def _codes(self, experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two E2M1 codes a byte, and a UE8M0 code for 32 of them."""
        packed = torch.randint(0, 256, (experts, rows, columns // 2), generator=self.generator)
        scale = torch.randint(122, 127, (experts, rows, columns // 32), generator=self.generator)
        return packed.to(torch.uint8), scale.to(torch.uint8)

    def _bank(
        self, w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
    ) -> ftkernels.ExpertBank:
        bank = ftkernels.ExpertBank(w13, w13_scale, w2, w2_scale).pack()
        if self.device == "cpu":
            return bank
        # copies from other memory are slow, and compute does not go on beside them
        w13, w13_scale, w2, w2_scale = (x.pin_memory() for x in bank.tensors)
        return ftkernels.ExpertBank(w13, w13_scale, w2, w2_scale, packed=True)

    def route(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax over the chosen logits."""
        logits, ids = (x.float() @ self.routers[layer].T).topk(self.topk, dim=1)
        return torch.softmax(logits, dim=1), ids.int()

    def step(self, phase: str, num_tokens: int) -> float:
        """All layers once; the largest difference from the formula."""
        x, differences = self.random(num_tokens, self.hidden), []
        with self.cache.step(phase):
            for layer, experts in enumerate(self.experts):
                weights, ids = self.route(layer, x)
                if phase == "decode" and layer + 1 < len(self.experts):
                    # a guess, from an input that this layer still changes; results never need it
                    _, guess = self.route(layer + 1, x)
                    self.cache.prefetch(layer + 1, guess.cpu())
                out = (experts.decode if phase == "decode" else experts.prefill)(x, weights, ids)
                differences.append(difference(out, self.formula(layer, x, weights, ids)))
                x = x + out / out.float().std().to(out.dtype)
        return max(differences)

    def formula(
        self, layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Every expert on every token in fp64, weighted by a route or by nothing."""
        w13, w2 = (weights_of(*codes) for codes in self.codes[layer])
        gate, up = (x.double().cpu() @ w13.mT).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
        outs = hidden @ w2.mT  # [E, T, C]
        shares = torch.zeros(len(x), len(w13), dtype=torch.float64)
        shares.scatter_(1, ids.long().cpu(), weights.double().cpu())
        return torch.einsum("te,etc->tc", shares, outs)


def weights_of(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``[E, N, K]`` fp64 from ``[E, N, K/2]`` codes, low nibble first, and ``[E, N, K/32]``."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    values = torch.tensor(E2M1, dtype=torch.float64)[nibbles & 7]
    values = torch.where(nibbles >= 8, -values, values)
    return values * (2.0 ** (scale.double() - 127)).repeat_interleave(32, dim=-1)


def difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of the values."""
    error = out.double().cpu() - expected
    return float(error.norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    plain = ftkernels.backend.use_reference(torch.empty(0, device=device))
    path = "plain-torch references" if plain else "Triton kernels"
    print(f"3 layers of 16 experts in host memory, 20 slots on {device}: {path}")
    print("difference from fp64, root mean square, relative:")
    for activation in ("fp8", "bf16"):
        engine = ToyEngine(activation=activation, device=device)
        prefill = engine.step("prefill", 40)
        decode = max(engine.step("decode", 1) for _ in range(20))
        print(f"  {activation:<4}  prefill of 40 tokens  {prefill:.1e}")
        print(f"  {activation:<4}  20 tokens of decode   {decode:.1e}")
        stats = engine.cache.stats()
        engine.cache.close()
    for phase in ("prefill", "decode"):
        counts = stats[phase]
        print(
            f"{phase}: hits {counts['hits']}, misses {counts['misses']}, hints used "
            f"{counts['prefetch_used']}, {counts['bytes_h2d'] / 1e6:.1f} MB copied"
        )


if __name__ == "__main__":
    main()
