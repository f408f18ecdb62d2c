"""Text for the language model: the sources of Python's standard library, as bytes.

They are real, varied, and on every machine that can run the example. Which files are held out is
decided by a hash of their path, so that they stay apart whatever else changes.
"""

import pathlib
import sysconfig
import zlib

import numpy as np

# Tests, tables and generated text: repetitive, or not what one would learn Python from.
SKIPPED = frozenset(
    "__pycache__ site-packages dist-packages test tests idlelib lib2to3 encodings pydoc_data "
    "turtledemo".split()
)

END_OF_FILE = b"\0"


def stdlib_text() -> tuple[np.ndarray, np.ndarray]:
    """(training bytes, held-out bytes), uint8: about one file in sixteen is held out."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    training, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED.isdisjoint(name.parts):
            is_held_out = zlib.crc32(name.as_posix().encode()) % 16 == 0
            (held_out if is_held_out else training).append(path.read_bytes())
    as_bytes = lambda files: np.frombuffer(END_OF_FILE.join(files), np.uint8)
    return as_bytes(training), as_bytes(held_out)


def training_batch(text: np.ndarray, step: int, *, batch: int, length: int, seed: int):
    """(inputs, targets), int32 [batch, length] each: windows from random places of the text.

    They depend on seed and step alone: that is what lets a resumed run see the same data.
    """
    rng = np.random.default_rng([seed, step])
    return _windows(text, rng.integers(len(text) - length, size=batch), length)


def held_out_batches(text: np.ndarray, *, count: int, batch: int, length: int):
    """`count` times (inputs, targets): windows spread evenly over the text."""
    starts = np.linspace(0, len(text) - length - 1, count * batch).astype(int)
    for of_batch in starts.reshape(count, batch):
        yield _windows(text, of_batch, length)


def _windows(text, starts, length):
    window = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return window[:, :-1], window[:, 1:]


class NGram:
    """The byte model that counts: unigrams (order 1) or bigrams (order 2), each count plus one."""

    def __init__(self, text: np.ndarray, order: int):
        self.order = order
        pairs = self._context(text[:-1]).astype(int) * 256 + text[1:]
        counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 1
        self.log2_p = np.log2(counts / counts.sum(axis=1, keepdims=True))

    def _context(self, previous: np.ndarray) -> np.ndarray:
        return previous if self.order == 2 else np.zeros_like(previous)

    def bits(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Mean bits per byte of `targets`, where `inputs` are the bytes just before them."""
        return float(-self.log2_p[self._context(inputs), targets].mean())
