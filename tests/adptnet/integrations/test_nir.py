"""NIR export: exact after writing and reading back; an error where NIR cannot express the network."""

import numpy as np
import pytest
import torch

pytest.importorskip("nir")

import nir

from adptnet import cells, conjugates, drive, projections, spectra
from adptnet.errors import IncompatibleError, InputError
from adptnet.integrations.nir import run_nir, to_nir, write_nir
from adptnet.nn import SpikingModelSpec, spiking_adpt_for_speech
from adptnet.nn.spiking_layer import spiking_adpt


def trained(spec: SpikingModelSpec):
    """Return a network that fires, with batch norm statistics from data."""
    model = spec.build()
    for layer in model.layers:
        torch.nn.init.constant_(layer.currents.norm.norm.weight, 4.0)
        torch.nn.init.normal_(layer.currents.norm.norm.bias, 0.5)
    frames = (torch.rand(4, 25, spec.input_size) < 0.3).double() * 3
    with torch.no_grad():
        for _ in range(6):
            model(frames)
    return model.eval(), frames


exportable = {
    "ADPT": spiking_adpt_for_speech(12, beta=0.0, input_size=7, output_size=3, threshold=0.4),
    "ADPT, a map of its own": SpikingModelSpec(
        spiking_adpt(12, beta=0.0, threshold=0.3, input_projection=projections.Dense(bias=True), gain=drive.LRU()), 7, 3
    ),
    "ADPT, no memory": SpikingModelSpec(
        spiking_adpt(12, beta=0, conjugate=conjugates.Diagonal(), memory=None, threshold=0.3), 7, 3
    ),
    "LIF, zero": SpikingModelSpec(cells.LIF(12, reset="zero", threshold=0.5), 7, 3),
    "LIF, none": SpikingModelSpec(cells.LIF(12, reset="none", threshold=0.5), 7, 3, depth=1),
}


@pytest.mark.parametrize("spec", exportable.values(), ids=exportable)
def test_a_graph_that_was_written_and_read_back_fires_as_the_network_does(spec, tmp_path):
    model, frames = trained(spec)
    write_nir(to_nir(model, dt=0.004), tmp_path / "model.nir")
    graph = nir.read(tmp_path / "model.nir")
    traces = model.trace(frames[:2])
    for k in range(2):
        found = run_nir(graph, frames[k].numpy())
        for i, trace in enumerate(traces):
            np.testing.assert_array_equal(found[f"spikes{i}"], trace.spikes[k].numpy())
            if f"membrane{i}" in found:
                np.testing.assert_allclose(found[f"membrane{i}"], trace.membrane[k].numpy(), atol=1e-6)
            assert 0 < trace.spikes[k].mean() < 0.9
        softmax = torch.from_numpy(found["output"]).softmax(-1).sum(0)
        torch.testing.assert_close(softmax, model(frames[k : k + 1])[0][0], atol=1e-6, rtol=1e-6)


def test_a_rotating_state_is_rejected_or_written_as_an_approximation(tmp_path):
    model, frames = trained(spiking_adpt_for_speech(12, beta=0.5, input_size=7, output_size=3, threshold=0.4))
    with pytest.raises(IncompatibleError, match="allow_approximation=True"):
        to_nir(model, dt=0.004)
    write_nir(to_nir(model, dt=0.004, allow_approximation=True), tmp_path / "model.nir")
    graph = nir.read(tmp_path / "model.nir")
    assert float(graph.metadata["beta0"][0]) == 0.5
    key = model.layers[0].neurons.cell.inner.fast.directions[0].key_projection.dense().detach().numpy()
    np.testing.assert_allclose(graph.metadata["key0"], key)
    straight = spiking_adpt_for_speech(12, beta=0.0, input_size=7, output_size=3, threshold=0.4).build().eval()
    straight.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(
        run_nir(graph, frames[0].numpy())["spikes0"], straight.trace(frames[:1])[0].spikes[0].numpy()
    )


@pytest.mark.parametrize(
    ("neuron", "words"),
    [
        (cells.LIF(12), "resets to a value"),
        (cells.LIF(12, reset="zero", recurrent=projections.Dense()), "no recurrent map"),
        (cells.LIF(12, reset="none", spike=cells.Sigmoid()), r"Sigmoid\(\) is not a threshold"),
        (cells.LIF(12, reset="zero", initial="uniform"), 'Build them with "zero"'),
        (cells.SiLIF(12), "SiLIFCell has no exact form"),
        (spiking_adpt(12, beta=0.0, spike_reset="subtract"), "cannot express spike_reset"),
        (spiking_adpt(12, beta=0.0, spike_adaptation=True), "cannot express spike_adaptation"),
        (spiking_adpt(12, beta=0.0, spectrum=spectra.S4DInv()), "complex spectrum"),
        (spiking_adpt(12, beta=0.0, gate=drive.SoftplusGate()), "a gate"),
    ],
)
def test_what_nir_cannot_express_is_rejected(neuron, words, tmp_path):
    with pytest.raises(IncompatibleError, match=words):
        to_nir(SpikingModelSpec(neuron, 7, 3).build(), dt=0.004, allow_approximation=True)


def test_wrong_calls():
    model = SpikingModelSpec(cells.LIF(4, reset="zero"), 7, 3).build()
    with pytest.raises(InputError, match="positive number of seconds"):
        to_nir(model, dt=0.0)
    with pytest.raises(InputError, match="takes a SpikingModel"):
        to_nir(torch.nn.Linear(2, 2), dt=0.1)


def test_a_batch_gives_what_its_sequences_give_and_other_shapes_are_rejected():
    model, frames = trained(exportable["LIF, zero"])
    graph = to_nir(model, dt=0.004)
    together = run_nir(graph, frames)
    for k, sequence in enumerate(frames):
        for name, values in run_nir(graph, sequence).items():
            np.testing.assert_array_equal(together[name][k], values)
    shapes = [(7,), (25, 6), (4, 25, 6), (2, 4, 25, 7), (0, 25, 7), (0, 7)]
    for shape in shapes:
        with pytest.raises(InputError, match=r"\(time, 7\) or \(batch, time, 7\).* got shape \("):
            run_nir(graph, np.zeros(shape))
