"""Settings of the GPU tests: a search of XLA for the fastest GEMM would take longer than the tests,
and the GEMMs are not ours.
"""

import os

if "xla_gpu_autotune_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
