"""The package as a newcomer meets it: import, names, build facts."""

import pathlib
import subprocess
import sys

import pytest

import jax_mok


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_starts_no_backend_and_loads_no_framework():
    out = python(
        "import sys, jax_mok\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized(), 'flax' in sys.modules)"
    )
    assert out.split() == ["False", "False"]


def test_all_names_exist_and_have_docstrings():
    for name in jax_mok.__all__:
        value = getattr(jax_mok, name)
        assert isinstance(value, str) or value.__doc__, name


def test_build_info():
    info = jax_mok.build_info()
    assert "cpu" in info["fused_platforms"]
    built = tuple(int(p) for p in info["built_with_jaxlib"].split("."))
    import jaxlib

    assert built <= tuple(int(p) for p in jaxlib.__version__.split("."))


def test_version_matches_the_metadata():
    from importlib import metadata

    assert metadata.version("jax_mok") == jax_mok.__version__


@pytest.mark.parametrize("module", ["flax", "linen"])
def test_without_flax_the_message_names_the_extra(module):
    out = python(
        "import sys\n"
        "sys.modules['flax'] = None\n"
        f"try: import jax_mok.{module}\n"
        "except ImportError as e: print(e)"
    )
    assert "jax_mok[flax]" in out


def test_the_source_tree_says_that_it_is_not_the_installed_package():
    """`python -m jax_mok` in a clone finds the folder there first."""
    root = pathlib.Path(__file__).resolve().parent.parent
    if any((root / "jax_mok").glob("_core.*")):
        pytest.skip("built in place")
    run = lambda *options: subprocess.run(
        [sys.executable, *options, "-c", "import jax_mok"], cwd=root, capture_output=True, text=True
    )
    assert "run from another folder" in run().stderr.lower() and "python -P" in run().stderr
    assert run("-P").returncode == 0
