"""`python -m jax_mok profile TRACE_DIR`: where the steps of any JAX training run on GPUs go.

It reads a trace of `jax.profiler` and says how much of a step is communication that no compute
hides, expert GEMMs, sorts, gathers and scatters, and what jax_mok could save. The run that was
traced need not use jax_mok. Needs no GPU, starts no backend.

    trace.py     finds the files of a run and reads kernels with JAX's own reader
    hlo.py       the HLO of the traced programs, which the trace holds too
    origin.py    kernel -> instruction of the HLO
    classify.py  kernel -> kind, and whether it belongs to an MoE layer
    steps.py     where steps begin and end
    analysis.py  times of a device, with overlaps counted once
    report.py    tables, JSON, picture
"""
