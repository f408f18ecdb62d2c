"""Shapes of well-known mixture-of-experts layers, shared by the tests and the benchmarks.

From the models' published configurations. `num_experts` is that of the whole model; a benchmark
that fits one GPU keeps the shape and uses fewer.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MoeShape:
    """One layer: hidden size H, intermediate size I, experts E, experts per token k."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0

    def flops(self, tokens: int) -> int:
        """Floating-point operations of the routed experts' forward pass: 6·tokens·k·H·I."""
        return 6 * tokens * self.top_k * self.hidden_size * self.intermediate_size

    def scaled_down(self, *, hidden_size: int, intermediate_size: int, num_experts: int):
        """The same layer, small: for tests on a CPU."""
        return dataclasses.replace(
            self,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            top_k=min(self.top_k, num_experts),
        )


SHAPES = {
    shape.name: shape
    for shape in (
        MoeShape("mixtral-8x7b", 4096, 14336, 8, 2),
        MoeShape("qwen3-30b-a3b", 2048, 768, 128, 8),
        MoeShape("qwen3-235b-a22b", 4096, 1536, 128, 8),
        MoeShape("qwen3.5-397b-a17b", 4096, 1024, 512, 10, 1),
        MoeShape("deepseek-v3", 7168, 2048, 256, 8, 1),
        MoeShape("deepseek-v4-pro", 7168, 3072, 384, 6, 1),
        MoeShape("kimi-k2.7", 7168, 2048, 384, 8, 1),
        MoeShape("glm-5.2", 6144, 2048, 256, 8, 1),
        MoeShape("gpt-oss-120b", 2880, 2880, 128, 4),
        MoeShape("olmoe-1b-7b", 2048, 1024, 64, 8),
    )
}
