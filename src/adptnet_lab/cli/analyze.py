"""`adptnet analyze CHECKPOINT`: measure the dynamics of every recurrent layer of a saved model."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tyro.conf import Positional

from adptnet import analysis
from adptnet._io.json_values import to_json_value
from adptnet.analysis import plot
from adptnet.cells import ADPTCell
from adptnet.checkpoint import load
from adptnet.errors import InputError
from adptnet.nn import SequenceModel
from adptnet.nn.layer import RecurrentLayer

from .._json_files import write_json
from .._runtime import describe_environment
from ..tasks import WordProblem

__all__ = ["Analyze", "run"]


@dataclass(frozen=True)
class Analyze:
    """Print the Lyapunov exponents, certificate, entropy of M and solver iterations of every layer; draw figures."""

    checkpoint: Positional[Path]
    """A file written by adptnet.save."""
    output: Path = Path("runs/analyze")
    """Folder for the figures and the numbers."""
    inputs: Path | None = None
    """A .npy file of inputs: tokens (batch, time) or features (batch, time, features). Without it, random inputs
    are drawn."""
    group: str | None = None
    """Draw random inputs from the word problem of this group (S3, A5, …) instead of uniform tokens or Gaussian noise.
    Ignored with --inputs."""
    sequences: int = 4
    """Number of random sequences."""
    length: int = 256
    """Number of steps of each random sequence."""
    seed: int = 0
    """Seed of the random inputs."""


def run(options: Analyze) -> dict[str, Any]:
    """Analyze each layer in float64 on one thread.

    Print the results, write analyze.json and the figures, and return the content of analyze.json.

    Args:
        options: The options.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the steps are too small to gain from a second thread
    try:
        return _run(options)
    finally:
        torch.set_num_threads(threads)


def _run(options: Analyze) -> dict[str, Any]:
    if options.checkpoint.is_dir():
        raise InputError(f"{options.checkpoint} is a folder. Pass a file: {options.checkpoint / 'model.safetensors'}")
    model = load(options.checkpoint).double().requires_grad_(False)
    layers = analysis.record_layer_inputs(model, _sample(model, options))
    if not layers:
        raise InputError(f"{options.checkpoint} holds a {type(model).__name__} without recurrent layers.")
    results = {name: _analyze_layer(layer, x) for name, (layer, x) in layers.items()}
    numbers = {
        "checkpoint": str(options.checkpoint),
        "environment": describe_environment(),
        "layers": {name: to_json_value(each["numbers"]) for name, each in results.items()},
    }
    for name, each in results.items():
        print(f"\n{name}\n{each['text']}")
    write_json(options.output / "analyze.json", numbers)
    written = [options.output / "analyze.json", *_draw(results, options)]
    print("\n" + "\n".join(f"wrote {path}" for path in written))
    return numbers


def _sample(model: nn.Module, options: Analyze) -> Tensor:
    for name, count in (("sequences", options.sequences), ("length", options.length)):
        if count < 1:
            raise InputError(f"--{name} {count}: must be at least 1.")
    generator = torch.Generator().manual_seed(options.seed)
    tokens = model.spec.vocabulary if isinstance(model, SequenceModel) else None
    if options.inputs is not None:
        return _read(options.inputs, tokens)
    if options.group is not None:
        task = WordProblem(options.group, options.length)
        if tokens != task.vocabulary:
            taken = "feature vectors, not tokens" if tokens is None else f"{tokens} tokens"
            raise InputError(f"{options.group} has {task.vocabulary} elements; the model takes {taken}.")
        return task.batch(options.sequences, generator).inputs
    if tokens is not None:
        return torch.randint(tokens, (options.sequences, options.length), generator=generator)
    features = model.spec.input_size if isinstance(model, SequenceModel) else getattr(model, "width", None)
    if features is None:
        features = getattr(getattr(model, "spec", None), "width", None)
    if features is None:
        raise InputError(f"the input size of a {type(model).__name__} is not known. Pass --inputs FILE.npy")
    noise = torch.randn(options.sequences, options.length, features, generator=generator, dtype=torch.float64)
    return noise.transpose(0, 1) if getattr(model, "batch_first", True) is False else noise


def _read(path: Path, tokens: int | None) -> Tensor:
    import numpy

    try:
        values = torch.from_numpy(numpy.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a .npy file of numbers ({error}). Write one with numpy.save.") from None
    if values.is_complex():
        raise InputError(f"{path} holds {values.dtype}; a recurrence needs real numbers.")
    if tokens is None:
        return values.double()
    if values.is_floating_point() or (values.numel() and not 0 <= int(values.min()) <= int(values.max()) < tokens):
        content = (
            values.dtype if values.is_floating_point() else f"numbers from {int(values.min())} to {int(values.max())}"
        )
        raise InputError(f"{path} holds {content}; the model takes tokens: integers from 0 to {tokens - 1}.")
    return values.long()


def _analyze_layer(layer: RecurrentLayer, x: Tensor) -> dict[str, Any]:
    """Return the results for one layer: `numbers`, `text`, and the tensors that the figures show."""
    cell = layer.cell
    spectrum = analysis.lyapunov_exponents(layer, x)
    certificate = analysis.certificate(layer)
    parallel = analysis.parallelizability(layer, x)
    rows = spectrum.exponents.reshape(-1, spectrum.exponents.shape[-1])
    horizon = analysis.memory_horizon(rows.mean(0)[0])
    rate = float(spectrum.entropy_rate.mean())
    text = [
        str(spectrum),
        f"memory horizon {float(horizon):.4g} steps, entropy rate {rate:.4g} nats per step",
        str(certificate),
        f"multiply-accumulates per step: {analysis.cost(layer)}",
    ]
    numbers: dict[str, Any] = {
        "exponents": rows.tolist(),
        "standard_error": spectrum.standard_error.reshape(rows.shape).tolist(),
        "window": spectrum.window,
        "certified": certificate.exponents if certificate.holds else None,
        "reasons": certificate.reasons,
        "iterations": {r.name: r.iterations.tolist() for r in parallel.solvers if r.converged},
        "predicted": {r.name: r.predicted.tolist() for r in parallel.solvers if r.predicted is not None},
        "recommendation": parallel.recommendation,
    }
    found: dict[str, Any] = {"exponents": rows, "certificate": certificate, "parallel": parallel}
    if isinstance(cell, ADPTCell):
        pairs = cell.spec.spectrum.is_complex
        conjugate = analysis.materialize_conjugate(layer, x)[0]
        entropy = float(analysis.offdiagonal_entropy(conjugate, pairs=pairs)) if cell.state_size > 1 + pairs else None
        found |= {
            "log_eigenvalues": cell.spectrum.log_modulus(),
            "shift_bound": _shift_bound(certificate, cell.spectrum().modulus()),
            "shifts": analysis.singular_value_shifts(layer, x),
            "conjugate": conjugate,
            "pairs": pairs,
        }
        spread = analysis.eigenvalue_spread(layer)
        none = entropy is None or math.isnan(entropy)
        mixing = (
            "M is diagonal"
            if none
            else f"off-diagonal entropy of M at the last step of the first sequence {entropy:.4g}"
        )
        text.append(f"eigenvalue spread {spread:.4g}; {mixing}")
        numbers |= {"log_eigenvalues": found["log_eigenvalues"].tolist(), "entropy": entropy, "spread": spread}
        if cell.spec.conjugate.has_directions:
            text.append(str(analysis.key_value_statistics(layer, x)))
    text.append(str(parallel))
    return found | {"numbers": numbers, "text": "\n".join(text)}


def _shift_bound(certificate: analysis.Certificate, moduli: Tensor) -> float:
    """Return the certified upper bound on |σ_i(J) - |λ̄|_(i)| over all i.

    It is the bound on ‖J - M‖, plus for a Taylor form the bound on |σ_i(M) - |λ̄|_(i)|. Infinite without a certificate.
    """
    prescribed = moduli.sort(descending=True).values
    return max(float((certificate.upper - prescribed).max()), float((prescribed - certificate.lower).max()))


def _draw(results: dict[str, dict[str, Any]], options: Analyze) -> list[Path]:
    """Draw the figures and return the paths of their files."""

    def by_layer(key: str) -> dict[str, Any]:
        return {name: each[key] for name, each in results.items() if key in each}

    drawn = {"spectra": plot.spectra(by_layer("exponents"), by_layer("log_eigenvalues"), by_layer("certificate"))}
    if by_layer("shifts"):
        drawn["shifts"] = plot.shifts(by_layer("shifts"), by_layer("shift_bound"))
        drawn["conjugates"] = plot.matrices(by_layer("conjugate"), pairs=any(by_layer("pairs").values()))
    for name, parallel in by_layer("parallel").items():
        counts = {r.name: r.iterations for r in parallel.solvers if r.converged}
        if counts:
            stem = f"iterations_{name.replace('.', '_')}"
            drawn[stem] = plot.iterations(counts, steps=parallel.steps)
    return [path for stem, figure in drawn.items() for path in plot.save(figure, options.output / stem)]
