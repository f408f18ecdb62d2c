"""Trains a byte-level mixture-of-experts language model on the sources of Python's own library.

    python examples/train_lm.py                                  # a few minutes on a laptop
    python examples/train_lm.py --checkpoint-dir run             # may be interrupted ...
    python examples/train_lm.py --checkpoint-dir run --resume    # ... and goes on, bit for bit
    python examples/train_lm.py --implementation xla             # with plain JAX, to compare

The mesh is data x expert: eight virtual devices on a CPU, or the accelerators of this machine. The
batch is split over all devices, the experts over the expert axis; all else is replicated. It
computes in float32 on a CPU and in bfloat16 elsewhere; parameters are float32 everywhere.
"""

import argparse
import functools
import math
import os

# Before JAX is imported: a CPU shall look like eight devices, and a GPU shall sum in one order and
# choose the same kernels in every run, or a resumed run would differ from an uninterrupted one.
for flag in ("xla_force_host_platform_device_count=8", "xla_gpu_deterministic_ops=true"):
    if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lm import data, report
from lm.checkpoints import Checkpoints
from lm.model import ByteLM, ModelConfig

import jax_mok
from jax_mok.flax import router_loss, sown_values


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=500)
    add("--batch", type=int, default=16, help="sequences of a step")
    add("--length", type=int, default=128, help="bytes of a sequence")
    add("--learning-rate", type=float, default=4e-3, help="at its peak")
    add("--layers", type=int, default=4)
    add("--experts", type=int, default=8, help="experts of a layer")
    add("--top-k", type=int, default=2, help="experts that a byte goes to")
    add("--shared-experts", type=int, default=0, help="further experts that all bytes go to")
    add("--scoring", choices=("softmax", "sigmoid", "sqrt_softplus"), default="softmax")
    add(
        "--balance",
        choices=("loss", "bias"),
        default="loss",
        help="what keeps the experts evenly busy: a loss, or a bias on the router's choice",
    )
    add("--implementation", choices=("fused", "xla"), help="of jax_mok.moe; None = the best here")
    add("--seed", type=int, default=0, help="of the parameters and of the order of the data")
    add("--checkpoint-dir", help="where to save checkpoints; None = nowhere")
    add("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--plot", default="train_lm.png", help="where to draw loss and load of the experts")
    add("--prompt", default="def ", help="beginning of the passage that the model writes")
    args = parser.parse_args()
    if args.resume and args.checkpoint_dir is None:
        parser.error("--resume needs --checkpoint-dir")
    return args


def make_mesh(num_experts: int) -> jax.sharding.Mesh:
    """All devices as data x expert, with at most four along the expert axis."""
    experts = math.gcd(jax.device_count(), num_experts, 4)
    shape = (jax.device_count() // experts, experts)
    return jax.make_mesh(shape, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def make_model(args: argparse.Namespace) -> tuple[ByteLM, nnx.Optimizer]:
    config = ModelConfig(
        layers=args.layers,
        num_experts=args.experts,
        top_k=args.top_k,
        shared_experts=args.shared_experts,
        scoring=args.scoring,
        balance=args.balance,
        implementation=args.implementation,
        dtype=jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16,
    )
    model = ByteLM(config, rngs=nnx.Rngs(args.seed))
    rate = optax.warmup_cosine_decay_schedule(
        init_value=args.learning_rate / 100,
        peak_value=args.learning_rate,
        warmup_steps=max(args.steps // 20, 1),
        decay_steps=args.steps,
        end_value=args.learning_rate / 10,
    )
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))
    return model, nnx.Optimizer(model, rule, wrt=nnx.Param)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean nats per byte."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(model: ByteLM, optimizer: nnx.Optimizer, inputs: jax.Array, targets: jax.Array):
    """One step, in place. Returns the loss and how many bytes each expert got, [layer, expert]."""
    layers = [block.moe for block in model.blocks]
    by_bias = layers[0].selection_bias is not None

    def loss_fn(model):
        logits, sown = nnx.capture(model, nnx.Intermediate)(inputs)
        loss = cross_entropy(logits, targets)
        total = loss + router_loss(sown, load_balance=0.0 if by_bias else 0.01)
        return total, (loss, jnp.stack(sown_values(sown, "expert_counts")))

    grads, (loss, counts) = nnx.grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    if by_bias:
        for layer, layer_counts in zip(layers, counts):
            layer.update_selection_bias(layer_counts)
    return loss, counts


def held_out_bits(predict, text: np.ndarray, training_text: np.ndarray, args) -> dict[str, float]:
    """Bits per byte of the model, and of two that only count, on the same held-out bytes."""
    batches = list(data.held_out_batches(text, count=16, batch=args.batch, length=args.length))
    nats = [float(cross_entropy(predict(inputs), targets)) for inputs, targets in batches]
    inputs, targets = (np.concatenate(part) for part in zip(*batches))
    return {
        "this model": np.mean(nats) / math.log(2),
        "bigram counts": data.NGram(training_text, order=2).bits(inputs, targets),
        "unigram counts": data.NGram(training_text, order=1).bits(inputs, targets),
    }


def write_passage(predict, args, *, num_bytes: int = 300, temperature: float = 0.7) -> bytes:
    """The prompt and what the model makes of it, byte by byte."""
    rng = np.random.default_rng(args.seed)
    text = list(args.prompt.encode() or data.END_OF_FILE)
    for _ in range(num_bytes):
        context = text[-args.length :]
        # A row for each device, of which the first is used. The model is causal: it does not matter
        # what stands behind the context.
        rows = np.zeros((jax.device_count(), args.length), np.int32)
        rows[0, : len(context)] = context
        logits = np.asarray(predict(rows)[0, len(context) - 1]) / temperature
        text.append(int(np.argmax(logits + rng.gumbel(size=logits.shape))))
    return bytes(text)


def main():
    args = parse_arguments()
    mesh = make_mesh(args.experts)
    jax.set_mesh(mesh)
    if args.batch % mesh.size:
        raise SystemExit(f"--batch must be a multiple of the {mesh.size} devices, got {args.batch}")

    # Each device makes the part of the state that its metadata puts there: experts are split, all
    # else is on every device.
    graph, shapes = nnx.split(nnx.eval_shape(lambda: make_model(args)))
    placement = nnx.get_named_sharding(shapes, mesh)
    state = jax.jit(lambda: nnx.state(make_model(args)), out_shardings=placement)()
    split = NamedSharding(mesh, P(("data", "expert")))

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(placement, None))
    def train_step(state, inputs, targets):
        model, optimizer = nnx.merge(graph, state)
        metrics = train(model, optimizer, inputs, targets)
        return nnx.state((model, optimizer)), metrics

    @jax.jit
    def logits(state, inputs):
        model, _ = nnx.merge(graph, state)
        return model(inputs)

    checkpoints = Checkpoints(args.checkpoint_dir, args.checkpoint_every)
    first_step, history = 0, report.History()
    if args.resume:
        first_step, state, history = checkpoints.restore(state)

    training_text, held_out_text = data.stdlib_text()
    used = jax_mok.implementation_used(mesh=mesh, implementation=args.implementation)
    report.console.print(
        f"{len(training_text) / 1e6:.1f} MB of text; {mesh.size} {jax.default_backend()} devices, "
        f"{mesh.shape['data']} data x {mesh.shape['expert']} expert; {used} implementation"
    )
    with report.ProgressBar(first_step, args.steps, args.batch * args.length) as progress:
        for step in range(first_step, args.steps):
            batch = data.training_batch(
                training_text, step, batch=args.batch, length=args.length, seed=args.seed
            )
            state, (loss, counts) = train_step(state, *jax.device_put(batch, split))
            history.loss.append(float(loss))
            history.counts.append(np.asarray(counts).tolist())
            progress.update(step + 1, history)
            checkpoints.save(step + 1, state, history, last=step + 1 == args.steps)
    checkpoints.close()

    predict = lambda inputs: logits(state, jax.device_put(inputs, split))
    bits = held_out_bits(predict, held_out_text, training_text, args)
    report.print_results(bits, history)
    report.print_passage(write_passage(predict, args))
    report.plot(args.plot, bits, history)
    report.console.print(f"Loss curve and load of the experts: {args.plot}")


if __name__ == "__main__":
    main()
