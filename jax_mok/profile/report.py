"""What `profile` leaves behind: tables, a JSON record, a picture."""

import pathlib
from typing import Any

import jax

import jax_mok
from jax_mok.profile import analysis, classify
from jax_mok.profile.analysis import DeviceTimes, Saving, slowest
from jax_mok.profile.trace import Run

FORMULA = (
    "What jax_mok could save is time in which nothing runs on the device but collectives of MoE "
    "dispatch and combine, and sorts, gathers and scatters of MoE layers. It is an upper bound: "
    "jax_mok moves the rows too, hidden only as far as its expert GEMMs last. Faster GEMMs, "
    "activations and idle time are not counted."
)
REASONS = {
    classify.BY_SCOPE: "scope name",
    classify.BY_NAME: "op or kernel name",
    classify.ALL_REDUCE: "scope; may sum gradients",
    None: "-",
}
COLORS = {
    classify.EXPERTS: "#1b7837",
    classify.JAX_MOK: "#00bcd4",
    classify.GEMM: "#7fbf7b",
    classify.OTHER: "#b0bec5",
    classify.SORT: "#e6a700",
    classify.GATHER: "#f4cf58",
    classify.COPY: "#9e8ac7",
    classify.COMMUNICATION: "#c62828",
    "idle": "#eeeeee",
}
_ROWS = 14


def record(run: Run, devices: list[DeviceTimes], experts: str | None) -> dict[str, Any]:
    """Everything that the tables say, and more, as what JSON can hold; ms are per step."""
    return {
        "run": run.name,
        "files": [str(path) for path in run.files],
        "jax_mok": jax_mok.__version__,
        "jax": jax.__version__,
        "moe_scopes": classify.MOE_SCOPE,
        "experts": experts,
        "formula": FORMULA,
        "slowest": f"{slowest(devices).host} {slowest(devices).name}",
        "devices": [_device_record(d) for d in devices],
    }


def _device_record(d: DeviceTimes) -> dict[str, Any]:
    saving = lambda s: {
        "communication_ms": s.communication,
        "rearranging_ms": s.rearranging,
        "total_ms": s.total,
        "share_of_step": s.total / d.step,
    }
    return {
        "host": d.host,
        "device": d.name,
        "steps": {
            "source": d.steps.source,
            "count": len(d.steps.spans),
            "left_out_as_too_long": d.steps.left_out,
            "mean_ms": d.step,
            "shortest_ms": d.shortest,
            "longest_ms": d.longest,
        },
        "kinds": {
            kind: {"busy_ms": d.busy[kind], "of_the_step_ms": d.alone[kind]}
            for kind in classify.KINDS
        },
        "idle_ms": d.idle,
        "exposed_communication_ms": d.exposed,
        "exposed_communication_of_no_moe_ms": d.unplaced,
        "copies_and_other_compute_in_moe_scopes_ms": d.uncounted,
        "known_by_kernel_name_only_ms": d.unknown,
        "could_save": {"by_scope": saving(d.by_scope), "at_most": saving(d.at_most)},
        "ops": [
            {
                "kind": row.label.kind,
                "op": row.label.op,
                "scope": row.label.scope,
                "counts_as_moe_by": row.label.moe,
                "ms": row.ms,
                "calls": row.calls,
            }
            for row in d.rows
        ],
    }


def print_tables(run: Run, devices: list[DeviceTimes]) -> None:
    """Steps of the slowest device by kind, its MoE kernels, all devices, what could be saved."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(100, Console().width))
    show = lambda text, **kw: console.print(text, markup=False, highlight=False, **kw)
    d = slowest(devices)
    files = f"{len(run.files)} file" + "s" * (len(run.files) > 1)
    show(f"Run {run.name}: {files}, {len(devices)} GPU" + "s" * (len(devices) > 1))
    if run.others:
        show(f"Other runs there (--run NAME): {', '.join(run.others)}", style="dim")
    more = f"; {d.steps.left_out} much longer ones left out" if d.steps.left_out else ""
    show(
        f"Steps: {d.steps.source}: {len(d.steps.spans)}, {d.step:.3f} ms on average "
        f"({d.shortest:.3f}-{d.longest:.3f}){more}"
    )

    def table(title: str, *columns: str, left: int = 1) -> Table:
        made = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            made.add_column(column, justify="left" if i < left else "right")
        return made

    if len(devices) > 1:
        show(f"{d.host} {d.name} computes longest: the others wait for it in their collectives.")
    kinds = table(f"A step on {d.host} {d.name}", "kind", "busy ms", "not hidden ms", "of the step")
    for kind in classify.KINDS:
        if d.busy[kind]:
            cells = (f"{d.busy[kind]:.3f}", f"{d.alone[kind]:.3f}", f"{d.alone[kind] / d.step:.1%}")
            kinds.add_row(kind, *cells, style="bold" if kind == classify.COMMUNICATION else None)
    kinds.add_row("idle", "", f"{d.idle:.3f}", f"{d.idle / d.step:.1%}")
    console.print(kinds)

    rows = [row for row in d.rows if row.label.moe or row.label.kind == classify.EXPERTS]
    if rows:
        parts = table(
            "Kernels of MoE layers, per step, hidden or not",
            *("kind", "op", "scope", "counted by", "calls", "ms"),
            left=4,
        )
        for row in rows[:_ROWS]:
            reason = REASONS[row.label.moe] if row.label.kind != classify.EXPERTS else ""
            cells = (row.label.op[:40], _short(row.label.scope), reason)
            parts.add_row(row.label.kind, *cells, f"{row.calls:.4g}", f"{row.ms:.3f}")
        console.print(parts)
        if len(rows) > _ROWS:
            rest = sum(row.ms for row in rows[_ROWS:])
            show(f"and {len(rows) - _ROWS} more, {rest:.3f} ms (--json has all)", style="dim")

    if len(devices) > 1:
        each = table(
            "All devices, ms per step",
            *("device", "step", "compute", "exposed communication", "idle", "could save"),
        )
        for one in devices:
            cells = (one.step, one.compute, one.exposed, one.idle)
            texts = [*(f"{ms:.3f}" for ms in cells), _range(one.by_scope, one.at_most, one.step)]
            each.add_row(f"{one.host} {one.name}", *texts, style="bold" if one is d else None)
        console.print(each)

    saved = table("What jax_mok could save, ms per step", "part", "by scope names", "at most")
    for name, part in (
        ("exposed communication of dispatch and combine", "communication"),
        ("sorts, gathers, scatters that nothing hides", "rearranging"),
        ("together", "total"),
    ):
        values = (getattr(s, part) for s in (d.by_scope, d.at_most))
        saved.add_row(name, *(f"{v:.3f} ({v / d.step:.1%})" for v in values))
    console.print(saved)
    show(FORMULA)
    for note in notes(d):
        show(f"* {note}")


def notes(d: DeviceTimes) -> list[str]:
    """What a reader has to know before believing the numbers."""
    found = []
    if d.at_most.total > d.by_scope.total:
        found.append(
            '"At most" also counts what only op or kernel names point at (all-to-alls, rearranging '
            "kernels without any scope) and all-reduces in MoE scopes, which may sum gradients."
        )
    if d.by_scope.communication > 0:
        found.append(
            "Collectives in a MoE scope may also gather weights of experts (FSDP): jax_mok does "
            "not take those away. The table of MoE kernels tells which ops they are."
        )
    if d.at_most.communication > d.busy[classify.EXPERTS] > 0:
        found.append(
            "Exposed dispatch and combine last longer than the expert GEMMs: not all can hide "
            "behind them."
        )
    if d.unplaced > 0.01 * d.step:
        found.append(
            f"{d.unplaced:.3f} ms ({d.unplaced / d.step:.1%}) of exposed communication is not "
            "counted to MoE layers. If it is theirs, name their scope: --experts REGEX, or "
            'jax.named_scope("moe") in the model.'
        )
    if d.uncounted > 0.01 * d.step:
        found.append(
            f"Copies and other compute in MoE scopes, {d.uncounted:.3f} ms of kernel time, are not "
            "counted."
        )
    if d.unknown > 0.05 * (d.step - d.idle):
        found.append(
            f"{d.unknown:.3f} ms of kernels are known by their name alone (CUDA graphs, or no HLO "
            "in the trace). For their scopes, trace with "
            "XLA_FLAGS=--xla_gpu_enable_command_buffer= (nothing after the =)."
        )
    if d.busy[classify.JAX_MOK]:
        found.append(
            f"jax_mok's own kernels run {d.busy[classify.JAX_MOK]:.3f} ms of the step, with "
            "dispatch, experts and combine inside."
        )
    return found


def _short(scope: str, length: int = 44) -> str:
    return scope if len(scope) <= length else "…" + scope[1 - length :]


def _range(low: Saving, high: Saving, step: float) -> str:
    if f"{low.total:.3f}" == f"{high.total:.3f}":
        return f"{low.total:.3f} ({low.total / step:.1%})"
    share = f"{low.total / step:.1%}-{high.total / step:.1%}"
    return f"{low.total:.3f}-{high.total:.3f} ({share})"


def picture(
    run: Run, devices: list[DeviceTimes], classifier: classify.Classifier, path: pathlib.Path
) -> None:
    """Shares of the step on every device, and one step of the slowest, kind by kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    d = slowest(devices)
    tall = max(1.0, 0.3 * len(devices))
    figure, (shares, line) = plt.subplots(
        2, 1, figsize=(11, 4.6 + tall), height_ratios=(tall, 3.2), constrained_layout=True
    )
    _draw_shares(shares, devices)
    _draw_step(line, run, d, classifier)
    low, high = d.by_scope.total / d.step, d.at_most.total / d.step
    saving = f"{low:.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:.1%} to {high:.1%}"
    figure.suptitle(
        f"{run.name}: {d.step:.2f} ms a step; communication that nothing hides "
        f"{d.exposed / d.step:.1%}; jax_mok could save at most {saving}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_shares(axis, devices: list[DeviceTimes]) -> None:
    names = [f"{d.host} {d.name}" if len(devices) > 1 else d.name for d in devices]
    left = [0.0] * len(devices)
    for kind in (*classify.KINDS, "idle"):
        values = [(d.idle if kind == "idle" else d.alone[kind]) / d.step * 100 for d in devices]
        if max(values) > 0:
            axis.barh(names, values, left=left, color=COLORS[kind], label=kind, height=0.7)
        left = [a + b for a, b in zip(left, values)]
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of the step", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.invert_yaxis()
    axis.legend(fontsize=7, ncols=5, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False)


def _draw_step(axis, run: Run, d: DeviceTimes, classifier: classify.Classifier) -> None:
    """The median step, a row per kind; communication is pale where something hides it."""
    (device,) = [x for x in run.devices if (x.host, x.name) == (d.host, d.name)]
    spans = sorted(d.steps.spans, key=lambda span: span[1] - span[0])
    step = analysis.draw(device, spans[len(spans) // 2], classifier)
    kinds = [kind for kind in classify.KINDS if step.running[kind]]
    for row, kind in enumerate(kinds):
        whole = (row - 0.4, 0.8)
        hides = kind != classify.COMMUNICATION
        look = dict(color=COLORS[kind], linewidth=0.3)  # a line, so that short kernels show
        axis.broken_barh(step.running[kind], whole, alpha=1 if hides else 0.3, **look)
        if not hides:
            axis.broken_barh(step.exposed, whole, **look)
        axis.broken_barh(step.moe[kind], (row + 0.4, 0.1), color="black", linewidth=0.3)
    axis.set_yticks(range(len(kinds)), kinds, fontsize=7)
    axis.set_ylim(len(kinds) - 0.3, -0.6)
    axis.set_xlim(0, step.length)
    axis.set_xlabel(
        f"ms of one step on {d.name}; underlined: MoE dispatch and combine; pale: hidden",
        fontsize=8,
    )
    axis.tick_params(axis="x", labelsize=7)
