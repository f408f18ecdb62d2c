"""One model over several processes, on one machine or many, with jax.distributed.

    python examples/multihost.py --local 2            # two processes of four CPU devices each, here

On machines of your own, start it once on each, all with the address of the first:

    python examples/multihost.py --coordinator host0:1234 --processes 4 --process 0     # ... to 3

Where a cluster manager starts the processes (Slurm, Kubernetes, Cloud TPU ...), JAX finds all of
this by itself: `srun python examples/multihost.py`.

The mesh is data x expert. By default the devices of a process share the experts: tokens then travel
within the process, and only gradients between processes. With `--expert-devices` they go further.
"""

import argparse
import functools
import os
import socket
import subprocess
import sys

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 2, 64, 128
TOKENS_PER_DEVICE = 256


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local", type=int, help="start so many processes on this machine")
    parser.add_argument("--expert-devices", type=int, help="devices over which experts are split")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    parser.add_argument("--processes", type=int, help="number of processes")
    parser.add_argument("--process", type=int, help="index of this one")
    return parser.parse_args()


def start_locally(count: int, arguments: list[str]) -> int:
    """Starts this script `count` times, with four CPU devices each; returns an exit status."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    command = [sys.executable, __file__, *arguments]
    command += [f"--coordinator=localhost:{port}", f"--processes={count}"]
    processes = [
        subprocess.Popen(
            [*command, f"--process={i}"],
            env=environment,
            stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,  # process 0 speaks for all
            text=True,
        )
        for i in range(count)
    ]
    try:
        for line in processes[0].stdout:
            if not line.startswith("[Gloo]"):  # what the CPU's collectives have to say
                print(line, end="", flush=True)
        return max(abs(process.wait()) for process in processes)
    finally:
        for process in processes:
            process.kill()


def train(expert_devices: int | None, steps: int = 30):
    """Trains one layer to compute sin(x); every process runs this."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_mok

    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    expert_devices = expert_devices or jax.local_device_count()
    mesh = Mesh(np.reshape(devices, (-1, expert_devices)), ("data", "expert"))
    jax.set_mesh(mesh)
    by_token = NamedSharding(mesh, P(("data", "expert")))
    by_expert = NamedSharding(mesh, P("expert"))
    placement = {
        "router": NamedSharding(mesh, P()),
        **dict.fromkeys(("gate", "up", "down"), by_expert),
    }

    # Under jit, each device makes its own part of the parameters and nothing else.
    @functools.partial(jax.jit, out_shardings=placement)
    def init(key):
        keys = jax.random.split(key, 4)
        normal = lambda key, *shape: 0.1 * jax.random.normal(key, shape)
        return {
            "router": normal(keys[0], HIDDEN, NUM_EXPERTS),
            "gate": normal(keys[1], NUM_EXPERTS, HIDDEN, INTERMEDIATE),
            "up": normal(keys[2], NUM_EXPERTS, HIDDEN, INTERMEDIATE),
            "down": normal(keys[3], NUM_EXPERTS, INTERMEDIATE, HIDDEN),
        }

    def loss_fn(params, x):
        routing = jax_mok.route(x @ params["router"], top_k=TOP_K)
        experts = params["gate"], params["up"], params["down"]
        y = jax_mok.moe(x, routing.expert_ids, routing.expert_weights, *experts)
        return jnp.mean((y - jnp.sin(x)) ** 2) + 0.01 * routing.load_balance_loss

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(placement, None))
    def train_step(params, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 30 * g, params, grads), loss

    say = print if jax.process_index() == 0 else lambda *_, **__: None
    say(
        f"{jax.process_count()} processes, mesh {dict(mesh.shape)}, "
        f"implementation {jax_mok.implementation_used()}"
    )
    params = init(jax.random.key(0))
    rng = np.random.default_rng(jax.process_index())  # each process has data of its own
    for step in range(steps + 1):
        local = rng.normal(size=(TOKENS_PER_DEVICE * jax.local_device_count(), HIDDEN))
        x = jax.make_array_from_process_local_data(by_token, local.astype(np.float32))
        params, loss = train_step(params, x)
        loss = float(loss)  # waits: a CPU with many devices may stall on too many steps in flight
        if step % 10 == 0:
            say(f"step {step:2d}: loss {loss:.4f}", flush=True)


def main():
    args = parse_arguments()
    if args.local:
        arguments = [f"--expert-devices={args.expert_devices}"] if args.expert_devices else []
        raise SystemExit(start_locally(args.local, arguments))

    import jax

    jax.distributed.initialize(args.coordinator, args.processes, args.process)
    train(args.expert_devices)


if __name__ == "__main__":
    main()
