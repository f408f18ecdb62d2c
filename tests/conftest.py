"""Settings of all tests: eight virtual CPU devices, and which machines run which tests."""

import os
import pathlib
import sys

# Test what is installed, not the source tree, where the native module is not: `python -m pytest`
# puts it first, and so does a `python -c` that a test starts from there.
_TESTS = pathlib.Path(__file__).resolve().parent
sys.path[:] = [p for p in sys.path if pathlib.Path(p or ".").resolve() != _TESTS.parent]

# Before JAX is imported. A device machine that asks for another platform keeps it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

import jax
import pytest

# Programs here are many and small: compiling them well costs more than running them badly.
if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_disable_most_optimizations", True)

hypothesis = pytest.importorskip("hypothesis")
hypothesis.settings.register_profile(
    "repeatable", deadline=None, max_examples=25, derandomize=True, database=None
)
hypothesis.settings.load_profile("repeatable")


def _num_gpus() -> int:
    try:
        return len(jax.devices("gpu"))
    except RuntimeError:
        return 0


def pytest_collection_modifyitems(config, items):
    wanted = {"gpu": 1, "gpu2": 2}
    marked = [(i, n) for i in items for mark, n in wanted.items() if i.get_closest_marker(mark)]
    if not marked:
        return
    found = _num_gpus()
    for item, needed in marked:
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPUs, found {found}"))


@pytest.fixture(scope="session", autouse=True)
def outside_the_source_tree():
    os.chdir(_TESTS)


@pytest.fixture(params=["fused", "xla"])
def implementation(request) -> str:
    return request.param
