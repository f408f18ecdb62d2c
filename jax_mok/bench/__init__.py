"""`python -m jax_mok bench`: jax_mok beside what else computes the same layer, in one run.

`problem.py` makes the layer, `candidates.py` holds the ways to compute it, `timing.py` measures
them in turns, `report.py` prints and keeps what came out.
"""
