"""`python -m jax_mok doctor`: what this machine can run, and why not the rest.

It looks at what is installed, at the GPUs and the links between them, and asks the code that
chooses an implementation what it would choose. It runs no kernel and takes no GPU memory for long.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "scipy-openblas32",
    "flax",
    "numpy",
)
VARIABLES = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_CUMEM_ENABLE",
    "NCCL_P2P_DISABLE",
    "JAX_MOK_NUM_THREADS",
)


def main() -> int:
    """Prints the report; returns the exit status."""
    for title, lines in report():
        print(f"{title}")
        for line in lines:
            print(f"  {line}")
    return 0


def report() -> Iterator[tuple[str, list[str]]]:
    """(title, lines) of each part."""
    yield "Installed", _installed()
    yield "CUDA kernels", _cuda_kernels()
    yield "GPUs, as CUDA sees them", _gpus()
    links = _links()
    if links:
        yield "Links (nvidia-smi topo -m)", links
    yield "Devices, as JAX sees them", _devices()
    yield "What moe would pick (implementation=None)", _choices()


def _installed() -> list[str]:
    import jax_mok

    info = jax_mok.build_info()
    lines = [
        f"jax_mok {jax_mok.__version__}, built with jaxlib {info['built_with_jaxlib']}",
        f"Python {platform.python_version()}, {platform.machine()}, {platform.platform()}",
    ]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    lines += [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    return lines


def _cuda_kernels() -> list[str]:
    from jax_mok import _cuda

    if _cuda.core is None:
        return [f"not in this installation: {_cuda.WHY_NO_CUDA}"]
    versions = _cuda.core.versions()
    of = lambda version: f"{version // 1000}.{version % 1000 // 10}"
    lines = [f"built with CUDA {of(versions['cuda_built_with'])}, for Hopper (sm_90a), bfloat16"]
    driver = versions["cuda_driver"]
    lines.append(f"driver for CUDA {of(driver)}" if driver else "no NVIDIA driver")
    return lines


def _gpus() -> list[str]:
    from jax_mok import _cuda

    if _cuda.core is None:
        return ["not asked: no CUDA kernels"]
    try:
        devices = _cuda.core.devices()
    except RuntimeError as e:
        return [f"none: {e}"]
    lines = []
    for i, device in enumerate(devices):
        capability = ".".join(map(str, device["compute_capability"]))
        can = "can run the kernels" if capability == _cuda.HOPPER else "cannot run the kernels"
        lines.append(
            f"{i}: {device['name']}, compute capability {capability} ({can}), "
            f"{device['multiprocessors']} multiprocessors, "
            f"{device['memory_bytes'] / 2**30:.0f} GiB"
        )
        others = [j for j in range(len(devices)) if j != i]
        apart = [j for j in others if j not in device["peers"]]
        if apart:
            lines.append(f"   no peer-to-peer access to {apart}: they cannot share an expert axis")
        elif others:
            lines.append(f"   peer-to-peer access to all {len(others)} others")
    return lines or ["none"]


def _links() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        done = subprocess.run(
            [command, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return [f"could not be asked: {e}"]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    lines = [line.rstrip() for line in plain.splitlines()]
    matrix = [line for line in lines if "GPU" in line]
    return [line.expandtabs(8) for line in matrix] if done.returncode == 0 else lines[:3]


def _devices() -> list[str]:
    # This starts JAX's backend, which by default takes most of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as e:
        return [f"no backend: {e}"]
    lines = [f"default backend: {jax.default_backend()}, {devices[0].client.platform_version}"]
    kinds = {}
    for device in devices:
        kinds.setdefault((device.platform, device.device_kind), []).append(device.id)
    lines += [f"{len(ids)} x {kind} ({name})" for (name, kind), ids in kinds.items()]
    if devices[0].platform == "gpu":
        from jax_mok import _cuda

        if _cuda.core is not None:
            versions = _cuda.core.versions()
            found = versions["nccl"] or "not loaded yet"
            lines.append(
                f"NCCL {found}" + (f": {versions['nccl_problem']}" * bool(versions["nccl_problem"]))
            )
    elif _has_gpus():
        lines.append(
            "the GPUs are not among them: install jax[cuda13], and see JAX_PLATFORMS above"
        )
    return lines


def _has_gpus() -> bool:
    from jax_mok import _cuda

    try:
        return _cuda.core is not None and bool(_cuda.core.devices())
    except RuntimeError:
        return False


def _choices() -> list[str]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh

    from jax_mok import _topology, runtime

    try:
        devices = jax.devices()
    except RuntimeError as e:
        return [f"nothing: {e}"]
    meshes = {"one device": None}
    if len(devices) > 1:
        import numpy as np

        meshes[f"experts over {len(devices)} devices"] = Mesh(np.array(devices), ("expert",))
    lines = []
    for name, mesh in meshes.items():
        topology = _topology.find(mesh, None if mesh is None else "expert", ())
        for dtype in (jnp.bfloat16, jnp.float32):
            chosen, reason = runtime.choose(None, topology, jnp.dtype(dtype))
            lines.append(f"{jnp.dtype(dtype).name}, {name}: {chosen} ({reason})")
    return lines


if __name__ == "__main__":
    sys.exit(main())
