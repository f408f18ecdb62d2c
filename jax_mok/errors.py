"""Exceptions of jax_mok."""


class MokError(RuntimeError):
    """A call that could not be carried out on the device: which rank, which phase, and why.

    Wrong arguments raise `ValueError` or `TypeError` while the call is traced; this one is for
    what only shows when it runs.
    """
