"""What a benchmark leaves behind: a table, a JSON file, a plot."""

import datetime
import json
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib

import jax_mok

RESULTS = pathlib.Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Conditions of a run: versions, devices, date."""
    devices = jax.devices()
    return {
        "date": datetime.date.today().isoformat(),
        "jax_mok": jax_mok.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "platform": devices[0].platform,
    }


def print_table(
    title: str, columns: Sequence[tuple[str, Callable[[dict], str]]], rows: list[dict[str, Any]]
) -> None:
    """One line per row, `columns` being (heading, text of a row); rows with "why_not" say why."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for index, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:  # Text, for brackets in a name are no markup
        if "why_not" in row:
            table.add_row(Text(row["candidate"]), "-", style="dim")
        else:
            table.add_row(*(Text(text(row)) for _, text in columns))
    console = Console(width=max(140, Console().width))
    console.print(table)
    for row in rows:
        if "why_not" in row:
            console.print(Text(f"{row['candidate']}: not run: {row['why_not']}"), style="dim")


def print_layer(title: str, rows: list[dict[str, Any]]) -> None:
    print_table(
        title,
        [
            ("candidate", lambda r: r["candidate"]),
            ("ms", lambda r: f"{r['ms']:.3f}"),
            ("min-max", lambda r: f"{r['spread_ms'][0]:.3f}-{r['spread_ms'][1]:.3f}"),
            ("TFLOP/s per device", lambda r: f"{r['tflops']:.3g}"),
            ("of the floor", lambda r: f"{r['share_of_floor']:.0%}"),
            ("temp MB", lambda r: megabytes(r["temp_bytes"])),
            ("peak MB", lambda r: megabytes(r["peak_bytes"])),
            ("peer heap MB", lambda r: megabytes(r["peer_heap_bytes"])),
        ],
        rows,
    )


def megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.0f}"


def save(name: str, record: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


_AXES = {"tokens": "tokens per rank", "minibatch": "minibatch rows", "comm_sms": "comm SMs"}


def plot(record: dict[str, Any], path: pathlib.Path) -> None:
    """Milliseconds: lines over what was swept, else bars per problem.

    Tokens, minibatches or comm SMs; with minibatches and comm SMs a line for each of the latter.
    """
    problems = record["problems"]
    values = lambda field: {p["problem"].get(field) for p in problems}
    swept = [f for f in _AXES if len(values(f)) > 1 and None not in values(f)]
    one_layer = len({p["problem"]["shape"]["name"] for p in problems}) == 1
    lines = len(swept) == 1 or swept == ["minibatch", "comm_sms"]
    draw = _lines if lines and one_layer else _bars
    _figure(record, path, lambda plt: draw(plt, problems, *swept[:1]), "; dashed: floor")


def plot_step(record: dict[str, Any], path: pathlib.Path) -> None:
    """Bars of ms per step: what is left without the expert layers, and what they add."""
    _figure(record, path, lambda plt: _step_bars(plt, record), "")


def _figure(record, path, draw, note):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = draw(plt)
    env = record["environment"]
    figure.suptitle(
        f"{env['devices']} x {env['device']}, jax {env['jax']}, {env['date']}{note}", fontsize=8
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _candidates(problems) -> list[str]:
    """Those that ran anywhere, in order."""
    rows = [row for problem in problems for row in problem["rows"] if "ms" in row]
    return list(dict.fromkeys(row["candidate"] for row in rows))


def _colors(names) -> list[str]:
    return ["C0" if name.startswith("jax_mok") else "0.7" for name in names]


def _bars(plt, problems, *_):
    names = _candidates(problems)
    figure, axes = plt.subplots(
        1, len(problems), figsize=(2 + 3 * len(problems), 3.6), squeeze=False
    )
    for axis, problem in zip(axes[0], problems):
        times = {row["candidate"]: row["ms"] for row in problem["rows"] if "ms" in row}
        axis.bar(names, [times.get(name, 0) for name in names], color=_colors(names))
        # A bar that would make all others invisible goes out of the picture.
        top = max(ms for ms in times.values() if ms <= 10 * min(times.values()))
        axis.set_ylim(0, 1.15 * top)
        for x, name in enumerate(names):
            beyond = times.get(name, 0) > top
            text = f"{times[name]:.3g}" if name in times else "not run"
            height = 1.06 * top if beyond else times.get(name, 0)
            axis.text(x, height, text + " ↑" * beyond, ha="center", va="bottom", fontsize=8)
        axis.axhline(problem["floor_ms"], color="C3", linewidth=1, linestyle="--")
        axis.set_title(problem["title"].replace("; ", "\n"), fontsize=7)
        axis.set_ylabel("ms")
        axis.tick_params(axis="x", labelrotation=20)
    return figure


def _lines(plt, problems, field: str):
    """A line per candidate, routing and number of comm SMs (unless they are the axis)."""
    figure, axis = plt.subplots(figsize=(6, 4))

    def group(problem):
        facts = problem["problem"]
        return facts["routing"], None if field == "comm_sms" else facts.get("comm_sms")

    groups = list(dict.fromkeys(map(group, problems)))
    routings = list(dict.fromkeys(routing for routing, _ in groups))
    for name in _candidates(problems):
        for routing, comm_sms in groups:
            points = [
                (problem["problem"][field], row["ms"])
                for problem in problems
                for row in problem["rows"]
                if group(problem) == (routing, comm_sms)
                and row["candidate"] == name
                and "ms" in row
            ]
            if points:
                label = name if len(routings) == 1 else f"{name}, {routing}"
                label += "" if comm_sms is None else f", {comm_sms} comm SMs"
                axis.plot(*zip(*sorted(points)), marker="o", label=label)
    floor = sorted({(problem["problem"][field], problem["floor_ms"]) for problem in problems})
    axis.plot(*zip(*floor), color="C3", linestyle="--", linewidth=1)
    if field != "comm_sms":
        axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    if field == "tokens":
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.set_xlabel(_AXES[field])
    axis.set_ylabel("ms")
    title = problems[0]["title"]
    if len(routings) > 1:
        title = title.replace(f", {routings[0]}", "")
    axis.set_title(title.replace("; ", "\n"), fontsize=7)
    axis.legend(fontsize=7)
    return figure


def _step_bars(plt, record):
    rows = [row for row in record["rows"] if "ms" in row]
    names = [row["candidate"] for row in rows]
    figure, axis = plt.subplots(figsize=(2 + 1.3 * len(rows), 3.8))
    without = record["without_experts_ms"]
    axis.bar(names, [row["ms"] for row in rows], color=_colors(names))
    axis.bar(names, [without] * len(rows), color="0.4")
    for x, row in enumerate(rows):
        text = f"{row['ms']:.4g} ms\n{row['tokens_per_second']:,.0f} tokens/s"
        axis.text(x, row["ms"], text, ha="center", va="bottom", fontsize=7)
    axis.set_title(record["title"].replace("; ", "\n") + "\ndark: all but the experts", fontsize=7)
    axis.set_ylabel("ms per step")
    axis.margins(y=0.2)
    axis.tick_params(axis="x", labelrotation=20)
    return figure
