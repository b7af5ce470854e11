"""Figures of an analysis. matplotlib is imported when a figure is drawn, not by `import adptnet`.

Each function returns a `matplotlib.figure.Figure`; `save` writes it as SVG and as PNG.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._io.files import replace_file
from ..errors import AdptnetError, InputError
from .certificate import Certificate
from .entropy import offdiagonal_entropy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLORS",
    "iterations",
    "matrices",
    "membranes",
    "new_figure",
    "raster",
    "save",
    "shifts",
    "spectra",
    "strip_axes",
]

COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"]
_SHADE = "#f0e442"


def save(figure: "Figure", path: str | Path) -> tuple[Path, Path]:
    """Write a figure as SVG and PNG, each atomically, and create the folder if it does not exist.

    Args:
        figure: The figure.
        path: The file name, with or without the suffix .svg or .png.

    Returns:
        The paths of both files.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    stem = target.with_suffix("") if target.suffix in (".svg", ".png") else target
    vector, pixels = stem.with_name(stem.name + ".svg"), stem.with_name(stem.name + ".png")
    with replace_file(vector) as draft:
        figure.savefig(draft, format="svg", metadata={"Date": None})  # no date, so that files do not differ by it
    with replace_file(pixels) as draft:
        figure.savefig(draft, format="png", dpi=150)
    return vector, pixels


def spectra(
    exponents: Mapping[str, Tensor],
    log_eigenvalues: Mapping[str, Tensor] | None = None,
    certificates: Mapping[str, Certificate | tuple[float, float]] | None = None,
    *,
    columns: int = 3,
) -> "Figure":
    """Draw Lyapunov exponents and ln |λ̄|, one panel for each name, with the certified interval shaded.

    Args:
        exponents: (n,) or (batch, n) each, by name; a batch is drawn as mean and range.
        log_eigenvalues: ln |λ̄| by name, for the panels that have one; -inf is marked at the bottom.
        certificates: Certificates or certified intervals of exponents by name, for the panels that have one.
        columns: Number of panels per row.
    """
    if not exponents:
        raise InputError("no spectrum was given. Pass exponents={'layer': spectrum.exponents}.")
    columns = min(columns, len(exponents))
    rows = math.ceil(len(exponents) / columns)
    figure = new_figure(3.6 * columns, 2.9 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, name in zip(axes.flat, exponents, strict=False):
        eigenvalues = (log_eigenvalues or {}).get(name)
        interval = (certificates or {}).get(name)
        interval = interval.exponents if isinstance(interval, Certificate) else interval
        _draw_spectrum(axis, exponents[name], eigenvalues, interval)
        axis.set_title(name, fontsize=10)
    for axis in axes.flat[len(exponents) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("per step")
    for axis in axes[-1]:
        axis.set_xlabel("index i, descending")
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    beside = 2 if columns == 1 else 5  # a single panel is too narrow for all entries in one row
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=beside, frameon=False, fontsize=9)
    return figure


def shifts(values: Mapping[str, Tensor], bounds: Mapping[str, float] | None = None) -> "Figure":
    """Draw histograms of Δ_i^(t) = σ_i(J_t) - |λ̄|_(i), with mean and standard deviation (fig:delta_distribution).

    Args:
        values: From `singular_value_shifts`, by name.
        bounds: Certified upper bounds on |Δ|, by name; written into the panel.
    """
    figure = new_figure(3.6 * len(values), 3.0)
    axes = figure.subplots(1, len(values), squeeze=False)[0]
    for axis, (name, shift) in zip(axes, values.items(), strict=True):
        flat = shift.detach().double().flatten().cpu()
        heights, _, _ = axis.hist(flat.numpy(), bins=60, color=COLORS[0], log=True)
        axis.axvline(0, ymax=0.75, color="black", linewidth=0.8, linestyle=":")
        note = f"mean {_format(float(flat.mean()))}\nstd {_format(float(flat.std()))}"
        bound = (bounds or {}).get(name, math.inf)
        note += f"\n|Δ| ≤ {bound:.2g} certified" if bound < math.inf else ""
        axis.text(0.03, 0.97, note, transform=axis.transAxes, va="top", fontsize=8)
        axis.set(xlabel="Δ = σ(J) − |λ̄|", ylim=(0.7, 80 * max(heights)))
        axis.set_title(name, fontsize=10)
        axis.locator_params(axis="x", nbins=5)
        strip_axes(axis)
    axes[0].set_ylabel("count")
    return figure


def matrices(conjugates: Mapping[str, Tensor], *, pairs: bool = False) -> "Figure":
    """Draw |M| as images, with the off-diagonal entropy of each (fig:materialise_matrices_layer0).

    Args:
        conjugates: (n, n) each by name, from `materialize_conjugate`.
        pairs: Whether eigenvalues are complex; see `offdiagonal_entropy`.
    """
    from matplotlib.colors import LogNorm

    figure = new_figure(3.3 * len(conjugates) + 0.6, 3.4)
    axes = figure.subplots(1, len(conjugates), squeeze=False)[0]
    largest = max(float(m.detach().abs().max()) for m in conjugates.values())
    smallest = min(_low_end(m) for m in conjugates.values())
    scale = LogNorm(min(max(smallest, 1e-8 * largest), 1e-2 * largest), largest, clip=True)
    for axis, (name, matrix) in zip(axes, conjugates.items(), strict=True):
        image = axis.imshow(matrix.detach().abs().cpu().numpy(), cmap="magma", norm=scale, interpolation="nearest")
        has_one_block = len(matrix) == 1 + pairs
        entropy = math.nan if has_one_block else float(offdiagonal_entropy(matrix.detach(), pairs=pairs))
        axis.set_title(f"{name}\nH = {entropy:.3f}" if not math.isnan(entropy) else f"{name}\ndiagonal", fontsize=10)
        axis.set(xticks=[], yticks=[])
    figure.colorbar(image, ax=list(axes), shrink=0.85, label="|M|")
    return figure


def iterations(counts: Mapping[str, Tensor], *, steps: int | None = None) -> "Figure":
    """Draw a histogram of the iterations of each solver.

    Args:
        counts: Iterations of each sequence, by the name of the solver.
        steps: The length of the sequences, for the title.
    """
    figure = new_figure(5.4, 0.9 + 0.75 * len(counts))
    axes = figure.subplots(len(counts), 1, squeeze=False, sharex=True)[:, 0]
    top = max(int(c.max()) for c in counts.values())
    width = max(1, math.ceil(top / 60))
    edges = [0.5 + i * width for i in range(math.ceil(top / width) + 1)]
    for i, (axis, (name, count)) in enumerate(zip(axes, counts.items(), strict=True)):
        axis.hist(count.detach().flatten().cpu().numpy(), bins=edges, color=COLORS[i % len(COLORS)])
        axis.set_yticks([])
        label = f"{name}\nmean {float(count.double().mean()):.1f}"
        axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
        strip_axes(axis)
        axis.spines["left"].set_visible(False)
    axes[-1].set(xlabel="iterations", xlim=(0, edges[-1] + 0.5))
    axes[-1].locator_params(axis="x", integer=True)
    axes[0].set_title("Iterations of each sequence" + (f" of {steps} steps" if steps else ""), fontsize=10)
    return figure


def raster(spikes: Tensor, *, seconds_per_step: float | None = None, title: str = "") -> "Figure":
    """Draw a dot for each spike of one recording.

    Args:
        spikes: (time, neurons).
        seconds_per_step: Duration of a step; if None, the time axis is in steps.
        title: The title.
    """
    if spikes.dim() != 2:
        raise InputError(f"a raster shows one recording, (time, neurons); got {tuple(spikes.shape)}. Pass spikes[0].")
    figure = new_figure(7, 3.5)
    axis = figure.add_subplot()
    step, neuron = (part.cpu() for part in spikes.nonzero(as_tuple=True))
    axis.scatter(step * (seconds_per_step or 1), neuron, s=2, color=COLORS[0], linewidths=0)
    axis.set(xlabel="step" if seconds_per_step is None else "seconds", ylabel="neuron", title=title)
    axis.set(xlim=(0, len(spikes) * (seconds_per_step or 1)), ylim=(-1, spikes.shape[1]))
    strip_axes(axis)
    return figure


def membranes(
    membrane: Tensor, threshold: float, *, neurons: tuple[int, ...] | None = None, title: str = ""
) -> "Figure":
    """Draw the membrane potentials of some neurons of one recording, with the threshold.

    Args:
        membrane: (time, neurons).
        threshold: The firing threshold.
        neurons: Indices of the neurons; the first three by default.
        title: The title.
    """
    if membrane.dim() != 2:
        raise InputError(f"membranes shows one recording, (time, neurons); got shape {tuple(membrane.shape)}.")
    count = membrane.shape[1]
    shown = range(min(3, count)) if neurons is None else neurons
    if not all(0 <= neuron < count for neuron in shown):
        raise InputError(f"neurons={tuple(shown)}; there are {count}, from 0 to {count - 1}.")
    figure = new_figure(7, 3.5)
    axis = figure.add_subplot()
    for place, neuron in enumerate(shown):
        values = membrane[:, neuron].detach().cpu()
        axis.plot(values, color=COLORS[place % len(COLORS)], label=f"neuron {neuron}")
    axis.axhline(threshold, color="black", linewidth=0.8, linestyle="--")
    axis.set(xlabel="step", ylabel="membrane", title=title)
    axis.legend(frameon=False, fontsize=8)
    strip_axes(axis)
    return figure


def _low_end(matrix: Tensor) -> float:
    """Return the 10 % quantile of the absolute values of the off-diagonal entries."""
    size = matrix.detach().abs().double()
    off = size[~torch.eye(len(size), dtype=torch.bool, device=size.device)]
    return float(off.quantile(0.1)) if off.numel() else 0.0


def _draw_spectrum(
    axis: "Axes", exponents: Tensor, log_eigenvalues: Tensor | None, interval: tuple[float, float] | None
) -> None:
    rows = exponents.detach().double().cpu().reshape(-1, exponents.shape[-1])
    mean = rows.mean(0)
    place = torch.arange(1, rows.shape[-1] + 1)
    finite = mean.isfinite()
    shown = [mean[finite]]
    if len(rows) > 1:
        axis.fill_between(place[finite], rows.amin(0)[finite], rows.amax(0)[finite], color=COLORS[0], alpha=0.25, lw=0)
    infinite = [(place[~finite], COLORS[1], "exponent −∞")]
    if log_eigenvalues is not None:
        eigenvalues = log_eigenvalues.detach().double().cpu().reshape(-1).sort(descending=True).values
        alive = eigenvalues.isfinite()
        index = torch.linspace(1, rows.shape[-1], len(eigenvalues))
        axis.plot(index[alive], eigenvalues[alive], color="black", linewidth=1.2, label="ln |λ̄|")
        shown.append(eigenvalues[alive])
        infinite.append((index[~alive], "black", "ln |λ̄| = −∞"))
    style = "o" if rows.shape[-1] <= 32 else "."
    axis.plot(place[finite], mean[finite], style, color=COLORS[0], markersize=4, label="Lyapunov exponents")
    values = torch.cat(shown)
    low, high = (float(values.min()), float(values.max())) if len(values) else (-1.0, 0.0)
    margin = max(0.12 * (high - low), 0.02 * max(abs(low), abs(high))) or 0.1
    limits = (low - margin, high + margin)
    if interval is not None and not all(math.isinf(edge) for edge in interval):
        bottom, top = (min(max(edge, limits[0] - 2 * margin), limits[1] + 2 * margin) for edge in interval)
        limits = (min(limits[0], bottom - margin / 2), max(limits[1], top + margin / 2))
        cut = (interval[0] < bottom, interval[1] > top)
        axis.axhspan(
            limits[0] if cut[0] else bottom,
            limits[1] if cut[1] else top,
            color=_SHADE,
            alpha=0.3,
            lw=0,
            label="certified",
        )
        below, above = (_format(edge) for edge in interval)
        axis.text(0.04, 0.09, f"certified [{below}, {above}]", transform=axis.transAxes, fontsize=7.5)
    elif interval is not None:
        axis.text(0.04, 0.09, "no certificate", transform=axis.transAxes, fontsize=7.5)
    for positions, colour, label in infinite:
        if len(positions):
            floor = limits[0] - 0.5 * margin
            axis.plot(positions, torch.full((len(positions),), floor), "v", color=colour, markersize=3, label=label)
            limits = (floor - 0.5 * margin, limits[1])
    if limits[0] < 0 < limits[1]:
        axis.axhline(0, color="black", linewidth=0.6, linestyle=":")
    axis.set_ylim(*limits)
    axis.locator_params(axis="y", nbins=5)
    axis.locator_params(axis="x", integer=True)
    strip_axes(axis)


def _format(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) < 1e-12:
        return "0"
    return f"{value:.2g}".replace("-", "−")


def strip_axes(axis: "Axes") -> None:
    """Remove the top and right spines and make the tick labels small.

    Args:
        axis: The axes to change.
    """
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure.

    Args:
        width: In inches.
        height: In inches.

    Raises:
        AdptnetError: matplotlib is not installed; the message gives the command that installs it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise AdptnetError("figures need matplotlib. Run: pip install 'adptnet[plots]'") from None
    return Figure(figsize=(width, height), layout="constrained")
