"""PyTorch's way to the same layer: sort, gather, all-to-all, grouped GEMMs and back, scatter-add.

One GPU runs it in this process. Several run it in one process each (this file as a program), which
take their orders line by line from standard input, so that PyTorch takes turns with the others.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import weakref

import torch

from jax_mok.bench.problem import Problem
from jax_mok.shapes import MoeShape


def layer(x, ids, weights, w_gate, w_up, w_down, *, num_experts: int, rank: int, ranks: int):
    """y [T, H] of one rank; its tokens, ids of the whole layer, its experts."""
    top_k, num_local = ids.shape[1], w_gate.shape[0]
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    token = order // top_k
    rows = x[token]
    counts = torch.bincount(flat, minlength=num_experts)
    if ranks > 1:
        counts_of_all = counts.new_empty(ranks * num_experts)
        torch.distributed.all_gather_into_tensor(counts_of_all, counts)
        table = counts_of_all.view(ranks, ranks, num_local)  # [from, to, expert there]
        arriving = table[:, rank]
        # Sizes have to be known on the host: here it waits for the GPU.
        send, receive = table[rank].sum(1).tolist(), arriving.sum(1).tolist()
        rows = _Exchange.apply(rows, send, receive)
        expert = torch.arange(num_local, device=x.device).repeat(ranks)
        expert = expert.repeat_interleave(arriving.reshape(-1))
        by_expert = expert.argsort(stable=True)
        rows, counts = rows[by_expert], arriving.sum(0)
    offsets = counts.cumsum(0).to(torch.int32)
    gate = torch._grouped_mm(rows, w_gate, offs=offsets)
    up = torch._grouped_mm(rows, w_up, offs=offsets)
    out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w_down, offs=offsets)
    if ranks > 1:
        out = torch.empty_like(out).index_copy(0, by_expert, out)
        out = _Exchange.apply(out, receive, send)
    out = out.float() * weights.reshape(-1)[order][:, None]
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return y.index_add(0, token, out).to(x.dtype)


class _Exchange(torch.autograd.Function):
    """Rows to their ranks, and the gradient back."""

    @staticmethod
    def forward(ctx, rows, send: list[int], receive: list[int]):
        ctx.sizes = send, receive
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        torch.distributed.all_to_all_single(arrived, rows.contiguous(), receive, send)
        return arrived

    @staticmethod
    def backward(ctx, d_arrived):
        send, receive = ctx.sizes
        return _Exchange.apply(d_arrived, receive, send), None, None


def step(arguments, backward: bool, **where):
    """One call, with the gradients of everything if asked for."""
    y = layer(*arguments, **where)
    if backward:
        for t in arguments:
            t.grad = None
        y.float().square().sum().backward()
    return y


def on_one_gpu(problem: Problem, arguments, backward: bool):
    """`run(*arguments)` with copies of JAX's arrays."""

    def to_torch(a):
        t = torch.from_dlpack(a).clone()
        return t.requires_grad_(backward) if t.is_floating_point() else t.long()

    copies = [to_torch(a) for a in arguments]
    where = dict(num_experts=problem.shape.num_experts, rank=0, ranks=1)
    return lambda *_: step(copies, backward, **where)


class Ranks:
    """A process for each rank. Calling it starts one call on all of them; `wait` waits for all."""

    def __init__(self, problem: Problem, backward: bool, device: str = "cuda"):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        orders = {"problem": dataclasses.asdict(problem), "backward": backward, "device": device}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, json.dumps(orders | {"rank": rank})],
                env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(problem.ranks)
        ]
        self.close = weakref.finalize(self, _end, self.processes)
        self._expect("ready")

    def __call__(self, *_):
        self._say("call")
        return self

    def wait(self) -> None:
        self._say("wait")
        self._expect("done")

    def _say(self, word: str) -> None:
        for process in self.processes:
            process.stdin.write(f"{word}\n")
            process.stdin.flush()

    def _expect(self, word: str) -> None:
        for process in self.processes:
            line = None
            while line != word:  # libraries print here too
                line = process.stdout.readline()
                if not line:
                    self.close()
                    raise RuntimeError("a process of PyTorch ended early; see above for why")
                line = line.strip()


def _end(processes) -> None:
    for process in processes:
        process.stdin.close()  # what it waits for: it ends by itself
    for process in processes:
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:  # it waits for another that is gone
            process.kill()
            process.wait()


def _main(orders: dict) -> None:
    """One rank: makes its part of the layer, then does what standard input says."""
    problem = dict(orders["problem"])
    problem = Problem(**problem | {"shape": MoeShape(**problem["shape"])})
    shape, rank, ranks = problem.shape, orders["rank"], problem.ranks
    device = torch.device(orders["device"], rank if orders["device"] == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=ranks
    )
    torch.manual_seed(rank)

    def normal(*size, scale=1.0):
        t = torch.randn(*size, device=device, dtype=torch.bfloat16).mul_(scale)
        return t.requires_grad_(orders["backward"])

    held = shape.num_experts // ranks
    h, i = shape.hidden_size, shape.intermediate_size
    mine = slice(rank * problem.tokens, (rank + 1) * problem.tokens)
    weights = torch.rand(problem.tokens, shape.top_k, device=device)
    arguments = (
        normal(problem.tokens, h),
        torch.from_numpy(problem.expert_ids()[mine]).long().to(device),
        (weights / weights.sum(1, keepdim=True)).requires_grad_(orders["backward"]),
        normal(held, h, i, scale=h**-0.5),
        normal(held, h, i, scale=h**-0.5),
        normal(held, i, h, scale=i**-0.5),
    )
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "call":
            step(
                arguments,
                orders["backward"],
                num_experts=shape.num_experts,
                rank=rank,
                ranks=ranks,
            )
        else:
            if device.type == "cuda":
                torch.cuda.synchronize()
            print("done", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
