"""The CUDA kernels compile as they must: no spills, no serialised wgmma. Needs no GPU."""

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
    """Compiles to machine code; returns what the compiler said."""
    command = ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-cubin"]
    command += ["-Xptxas", "-v", f"-I{CSRC}", "-o", str(target), str(CSRC / "cuda" / source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr
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


def check_report(report, kernels):
    assert report.count("Compiling entry function") == kernels
    assert re.search(r"C75\d\d", report) is None, report  # wgmma serialised, setmaxnreg ignored
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    assert len(spilled) == kernels
    assert all(pair == ("0", "0") for pair in spilled), report


def test_forward_report(forward):
    report, _ = forward
    check_report(report, kernels=3)
    assert set(re.findall(r"Used (\d+) registers", report)) == {"168"}


def test_plan_report(tmp_path):
    check_report(compile_cubin("plan_kernels.cu", tmp_path / "plan.cubin"), kernels=5)


def test_forward_instructions(forward):
    _, cubin = forward
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
    functions = sass.split("Function :")[1:]
    assert len(functions) == 3
    for function in functions:
        lines = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", function)

        def named(name, lines=lines):
            return [i for i, line in enumerate(lines) if re.search(rf"\b{name}", line)]

        assert not named("LDL") and not named("STL")
        assert named("UTMALDG") and named("UBLKCP") and named("USETMAXREG") and named("STSM")
        products = named("HGMMA")
        assert len(products) == 4
        # The main loop: the last product closes the group, and one group stays in flight. A fence
        # among them would wait for all memory traffic of the SM.
        assert "gsb0" in lines[products[-1]]
        assert not any("gsb0" in lines[i] for i in products[:-1])
        waits = named(r"WARPGROUP\.DEPBAR")
        assert any("0x1" in lines[i] for i in waits)
        assert not any(products[0] - 60 < i < waits[-1] for i in named("MEMBAR"))
