"""jax_mok"""
