"""Cost of a spiking network, against counts of single events."""

from pathlib import Path

import pytest
import torch

from adptnet import analysis, cells, projections
from adptnet.analysis.spiking_efficiency import AC_ENERGY, MAC_ENERGY
from adptnet.errors import InputError
from adptnet.nn import SpikingModelSpec, spiking_adpt_for_speech


def firing(spec: SpikingModelSpec, scale: float = 4.0):
    model = spec.build()
    for layer in model.layers:
        torch.nn.init.constant_(layer.currents.norm.norm.weight, scale)
        torch.nn.init.normal_(layer.currents.norm.norm.bias, 0.3 * scale)
    frames = (torch.rand(3, 20, 6) < 0.3).double() * 2
    with torch.no_grad():
        for _ in range(6):
            model(frames)
    return model.eval(), frames


def test_operations_are_those_counted_event_by_event():
    model, frames = firing(SpikingModelSpec(cells.SiLIF(8), 6, 3))
    lengths = torch.tensor([20, 11, 5])
    report = analysis.efficiency(model, frames, lengths=lengths)
    additions, spikes = [0, 0], [0, 0]
    traces = model.trace(frames, lengths=lengths)
    for i, trace in enumerate(traces):
        for k, length in enumerate(lengths.tolist()):
            for t in range(length):
                additions[i] += 8 * sum(1 for value in trace.inputs[k, t].tolist() if value != 0)
                spikes[i] += int(trace.spikes[k, t].sum())
    for i, layer in enumerate(report.layers):
        assert layer.synaptic_operations == pytest.approx(additions[i] / 36)
        assert layer.rate == pytest.approx(spikes[i] / 36 / 8)
    assert [layer.dense_operations for layer in report.layers] == [48, 64]
    assert report.readout_operations == pytest.approx(3 * spikes[1] / 36)
    assert report.energy == pytest.approx(AC_ENERGY * (sum(additions) + 3 * spikes[1]) / 36)
    assert report.dense_energy == pytest.approx(MAC_ENERGY * (48 + 64 + 24))
    assert "read-out" in str(report)


def test_spiking_directions_turn_multiplications_into_additions():
    common = {"beta": 0.5, "input_size": 6, "output_size": 3, "threshold": 0.8, "layer_norm": False}
    dense, frames = firing(spiking_adpt_for_speech(8, **common), 1.5)
    sparse, _ = firing(spiking_adpt_for_speech(8, spiking_directions=True, **common), 1.5)
    plain, events = (analysis.efficiency(model, frames).layers[0] for model in (dense, sparse))
    assert plain.direction_additions is None
    assert plain.direction_macs == events.direction_macs > 0
    assert events.direction_additions == pytest.approx(2 * 8 * 8 * events.rate)
    straight, _ = firing(spiking_adpt_for_speech(8, **{**common, "beta": 0.0}), 1.5)
    assert analysis.efficiency(straight, frames).layers[0].direction_macs == 0


@pytest.mark.parametrize(
    "neuron", [cells.LIF(8, recurrent=projections.Dense(), threshold=0.3), cells.DelayedLIF(8, 2, threshold=0.3)]
)
def test_recurrent_spikes_are_counted(neuron):
    model, frames = firing(SpikingModelSpec(neuron, 6, 3, depth=1))
    (layer,), (trace,) = analysis.efficiency(model, frames).layers, model.trace(frames)
    arriving = int((trace.inputs != 0).sum()) + int(trace.spikes.sum())
    assert trace.spikes.any()
    assert layer.synaptic_operations == pytest.approx(8 * arriving / 60)
    assert layer.dense_operations == 48 + 64


def test_efficiency_needs_a_network_and_recordings():
    model, frames = firing(SpikingModelSpec(cells.LIF(8), 6, 3))
    with pytest.raises(InputError, match="at least one recording"):
        analysis.efficiency(model, frames[:0])
    with pytest.raises(InputError, match=r"for a SpikingModel; got Linear"):
        analysis.efficiency(torch.nn.Linear(6, 6), frames)


def test_silent_and_saturated_layers_are_named():
    model, frames = firing(SpikingModelSpec(cells.LIF(8), 6, 3, depth=1), scale=0.01)
    with pytest.warns(analysis.ActivityWarning, match="layer 0 almost never fires") as seen:
        report = analysis.efficiency(model, frames)
    assert "torch" not in Path(seen[0].filename).parts  # the warning shows the line of the caller, not of a decorator
    assert report.layers[0].silent_neurons == 1
    model, frames = firing(SpikingModelSpec(cells.LIF(8, reset="none", threshold=0.1), 6, 3, depth=1))
    torch.nn.init.constant_(model.layers[0].currents.norm.norm.bias, 10.0)
    model.train()
    with pytest.warns(analysis.ActivityWarning, match="fires almost always"):
        analysis.efficiency(model, frames)
    assert model.training


def test_figures_of_spikes_and_membranes(tmp_path):
    pytest.importorskip("matplotlib")
    from adptnet.analysis import plot

    model, frames = firing(SpikingModelSpec(cells.SiLIF(8), 6, 3))
    trace = model.trace(frames)[0]
    drawn = plot.raster(trace.spikes[0], seconds_per_step=0.004, title="first layer")
    assert len(drawn.axes[0].collections[0].get_offsets()) == int(trace.spikes[0].sum())
    lines = plot.membranes(trace.membrane[0], 1.0, neurons=(0, 3)).axes[0].lines
    assert torch.equal(torch.as_tensor(lines[1].get_ydata()), trace.membrane[0, :, 3])
    assert len(plot.membranes(trace.membrane[0, :, :2], 1.0).axes[0].lines) == 2 + 1  # and the threshold
    with pytest.raises(InputError, match=r"neurons=\(8,\); there are 8, from 0 to 7"):
        plot.membranes(trace.membrane[0], 1.0, neurons=(8,))
    plot.save(drawn, tmp_path / "raster")
    with pytest.raises(InputError, match=r"Pass spikes\[0\]"):
        plot.raster(trace.spikes)
