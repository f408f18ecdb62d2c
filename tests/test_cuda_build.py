"""The CUDA kernels compile as they must: no spills, no serialised wgmma. Needs no GPU."""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

CSRC = pathlib.Path(__file__).resolve().parents[1] / "csrc"
TIME_LIMIT = (
    240  # seconds; a compile takes about 5, and code that ptxas cannot handle takes forever
)

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def compile_cubin(source, target):
    """Compiles to machine code; returns what the compiler said. In JAX_MOK_CUBINS, a folder, it is
    kept for the next test run of the same sources."""
    folder = os.environ.get("JAX_MOK_CUBINS")
    if folder:
        sources = sorted(p for p in CSRC.rglob("*") if p.is_file())
        digest = hashlib.sha256(source.encode())
        for path in sources:
            digest.update(path.read_bytes())
        kept = pathlib.Path(folder) / digest.hexdigest()[:16]
        if (kept / "report").exists():
            shutil.copy(kept / "cubin", target)
            return (kept / "report").read_text()
    command = ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-cubin"]
    command += ["-Xptxas", "-v", f"-I{CSRC}", "-o", str(target), str(CSRC / "cuda" / source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr
    if folder:
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, kept / "cubin")
        (kept / "report").write_text(done.stderr)
    return done.stderr


def disassembler():
    """Path of cuobjdump: on the PATH or in NVIDIA's Python packages; None if there is none."""
    found = shutil.which("cuobjdump")
    packaged = [p for d in sys.path for p in pathlib.Path(d).glob("nvidia/*/bin/cuobjdump")]
    return found or (str(packaged[0]) if packaged else None)


@pytest.fixture(scope="module")
def forward(tmp_path_factory):
    cubin = tmp_path_factory.mktemp("cubin") / "forward.cubin"
    return compile_cubin("forward_sm90.cu", cubin), cubin


@pytest.fixture(scope="module")
def backward(tmp_path_factory):
    cubin = tmp_path_factory.mktemp("cubin") / "backward.cubin"
    return compile_cubin("backward_sm90.cu", cubin), cubin


def check_report(report, kernels, most_spilled=0):
    """`most_spilled`: bytes that a thread may keep in local memory."""
    assert report.count("Compiling entry function") == kernels
    assert re.search(r"C75\d\d", report) is None, report  # wgmma serialised, setmaxnreg ignored
    spilled = re.findall(r"\d+ bytes stack frame, (\d+) bytes spill stores", report)
    assert len(spilled) == kernels
    assert all(int(size) <= most_spilled for size in spilled), report


def test_forward_report(forward):
    report, _ = forward
    check_report(report, kernels=3)
    assert set(re.findall(r"Used (\d+) registers", report)) == {"168"}


def test_backward_report(backward):
    """Where gate and up are computed again, 192 of a consumer's 224 registers are accumulators: the
    epilogue has to put words aside (40 bytes, 190 with biases and limits), a few times per tile;
    `test_instructions` sees to it that no main loop does so."""
    report, _ = backward
    check_report(report, kernels=6, most_spilled=250)
    assert set(re.findall(r"Used (\d+) registers", report)) == {"168"}


@pytest.mark.parametrize(
    "source, kernels", [("plan_kernels.cu", 8), ("meeting.cu", 3), ("exchange.cu", 1)]
)
def test_small_kernels_report(tmp_path, source, kernels):
    check_report(compile_cubin(source, tmp_path / "kernels.cubin"), kernels)


def functions_of(cubin):
    """The machine instructions of every kernel."""
    tool = disassembler()
    if tool is None:
        pytest.skip("needs cuobjdump (packages nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
    folder = str(pathlib.Path(tool).parent)
    sass = subprocess.run(
        [tool, "-sass", str(cubin)],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=True,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
    ).stdout
    return [
        re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", text) for text in sass.split("Function :")[1:]
    ]


# Products of a kernel in machine code: four per stage, and a stage of its own for the first one of
# a tile, which overwrites the accumulators. Forward: one loop. Backward: gate|up and dh in turns,
# dh alone, dx, weight gradients anew and added to an open sum.
@pytest.mark.parametrize(
    "source, kernels, products, loops", [("forward", 3, 8, 1), ("backward", 6, 44, 5)]
)
def test_instructions(request, source, kernels, products, loops):
    functions = functions_of(request.getfixturevalue(source)[1])
    assert len(functions) == kernels
    for lines in functions:

        def named(name, lines=lines):
            return [i for i, line in enumerate(lines) if re.search(rf"\b{name}", line)]

        assert named("UTMALDG") and named("UBLKCP") and named("USETMAXREG") and named("STSM")
        assert bool(named("UTMASTG")) == (source == "backward")
        at = named("HGMMA")
        assert len(at) == products
        # Four products make a stage, and the last of them closes the group.
        assert [i for i in at if "gsb0" in lines[i]] == at[3::4]
        # In a main loop one group stays in flight.
        waits = named(r"WARPGROUP\.DEPBAR")
        assert sum("0x1" in lines[i] for i in waits) >= loops
        # A stage: from its first product to the wait for the one before. A fence there would wait
        # for all memory traffic of the SM; accumulators in local memory would be the end of it.
        for first, last in zip(at[::4], at[3::4]):
            wait = min(i for i in waits if i > last)
            assert not any(first < i < wait for i in named("MEMBAR"))
            assert not any(first < i < last for i in named("LDL") + named("STL"))
        if source == "forward":
            assert not named("LDL") and not named("STL")
