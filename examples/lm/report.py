"""What the user sees of a run: the progress bar, the tables at the end, the picture."""

import dataclasses
import math
import time

import matplotlib
import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax
from rich.table import Table

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

console = Console()


@dataclasses.dataclass
class History:
    """One entry a step. It is saved with the checkpoints, so that a resumed run keeps its past."""

    loss: list[float] = dataclasses.field(default_factory=list)  # nats per byte
    counts: list[list[list[int]]] = dataclasses.field(default_factory=list)  # [layer][expert]

    def bits(self, last: int = 1) -> float:
        """Training loss in bits per byte, mean of the last steps."""
        return float(np.mean(self.loss[-last:])) / math.log(2)

    def load(self) -> np.ndarray:
        """[step, layer, expert]: tokens that the expert got, as a multiple of an even share."""
        counts = np.asarray(self.counts, float)
        return counts / counts.mean(axis=-1, keepdims=True)


class ProgressBar:
    """Step, loss, speed and balance while a run goes on; ten lines of them stay on the screen."""

    def __init__(self, first_step: int, steps: int, tokens_per_step: int):
        self.lines_every = max(steps // 10, 1)
        self.tokens_per_step = tokens_per_step
        self.progress = Progress(
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task(
            "", total=steps, completed=first_step, status="compiling"
        )
        self.timed_from = None  # (step, time) of the first update: compilation does not count

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *error):
        self.progress.stop()

    def update(self, step: int, history: History):
        """After `step` steps."""
        now = time.perf_counter()
        self.timed_from = self.timed_from or (step, now)
        steps, seconds = step - self.timed_from[0], now - self.timed_from[1]
        speed = f"{steps * self.tokens_per_step / seconds:6,.0f}" if steps else "     -"
        busiest = history.load()[-1].max()
        status = f"{history.bits():.3f} bits/byte, {speed} tokens/s, busiest expert {busiest:.2f}x"
        self.progress.update(self.task, completed=step, status=status)
        if step == 1 or step % self.lines_every == 0:
            console.print(f"step {step:5d}: loss {status} even", highlight=False)


def print_results(bits: dict[str, float], history: History):
    """Tables of the held-out bits per byte, and of what the experts of each layer got to do."""
    table = Table(title="Held-out files")
    table.add_column("model")
    table.add_column("bits per byte", justify="right")
    for name, value in bits.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)

    load = _at_the_end(history.load())
    table = Table(title="Tokens of each expert, % of an even share")
    table.add_column("layer", justify="right")
    for expert in range(load.shape[1]):
        table.add_column(str(expert), justify="right")
    for layer, row in enumerate(load):
        table.add_row(str(layer), *(f"{100 * value:.0f}" for value in row))
    console.print(table)


def print_passage(text: bytes):
    text = "".join(
        c if c.isprintable() or c == "\n" else "�" for c in text.decode(errors="replace").rstrip()
    )
    code = Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True)
    console.print(Panel(code, title="A passage from the model", width=100))


def plot(path: str, bits: dict[str, float], history: History):
    """Loss curve, load of every expert at the end, and busiest expert over time."""
    steps = 1 + np.arange(len(history.loss))
    loss, load = np.asarray(history.loss) / math.log(2), history.load()
    figure = plt.figure(figsize=(11, 4.8), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1), height_ratios=(1.6, 1))

    axes = figure.add_subplot(grid[:, 0], xlabel="step", ylabel="bits per byte", title="Loss")
    axes.plot(steps, loss, color="C0", alpha=0.3, linewidth=1)
    axes.plot(steps, _smooth(loss), color="C0", label="training")
    for i, (name, value) in enumerate(bits.items()):
        style = dict(color="C0", linestyle="--") if i == 0 else dict(color=f"C{i}", linestyle=":")
        axes.axhline(value, label=f"{name}, held-out: {value:.2f}", **style)
    axes.legend()

    final = _at_the_end(load)
    axes = figure.add_subplot(grid[0, 1], xlabel="expert", ylabel="layer")
    axes.set_title("Load of the experts at the end (1 = even)")
    image = axes.imshow(final, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
    axes.set_xticks(range(final.shape[1]))
    axes.set_yticks(range(final.shape[0]))
    if final.shape[1] <= 16:  # else there is no room
        for (layer, expert), value in np.ndenumerate(final):
            axes.text(expert, layer, f"{value:.2f}", ha="center", va="center", fontsize=8)
    figure.colorbar(image)

    axes = figure.add_subplot(grid[1, 1], xlabel="step", ylabel="x even")
    axes.set_title("Load of the busiest expert")
    for layer, busiest in enumerate(load.max(axis=-1).T):
        axes.plot(steps, _smooth(busiest), label=f"layer {layer}", linewidth=1)
    axes.axhline(1.0, color="grey", linewidth=0.5)
    axes.legend(ncols=2, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _at_the_end(load: np.ndarray) -> np.ndarray:
    """[layer, expert]: mean over the last tenth of the steps."""
    return load[-max(len(load) // 10, 1) :].mean(axis=0)


def _smooth(values: np.ndarray, window: int = 15) -> np.ndarray:
    """Moving average, centred; over fewer values at both ends."""
    kernel = np.ones(min(window, len(values)))
    total = np.convolve(values, kernel, mode="same")
    return total / np.convolve(np.ones_like(values), kernel, mode="same")
