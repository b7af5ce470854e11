"""SiLIF, compared with its authors' code: their trained weights and the spikes that their network fires."""

import numpy as np
import pytest
import torch

from adptnet.errors import CheckpointError
from adptnet.integrations.silif import from_silif
from support.golden import golden


def test_the_trained_network_fires_as_the_authors_program_does():
    model = from_silif(golden("golden/silif_ssc_4ms_seed13.npz"))
    assert sum(p.numel() for p in model.parameters()) == 359_017
    with np.load(golden("golden/silif_golden.npz")) as file:
        frames = torch.from_numpy(file["frames"]).float()
        first, second = model.trace(frames)
        assert (first.spikes.sum(1).numpy() == file["spike_count_l1"]).all()
        assert (second.spikes.sum(1).numpy() == file["spike_count_l2"]).all()
        packed = np.packbits(first.spikes[:4].numpy().astype(np.uint8), -1)
        assert (packed == file["spikes_l1_first4"]).all()
        with torch.no_grad():
            np.testing.assert_allclose(model(frames)[0].numpy(), file["output"], atol=1e-3, rtol=1e-5)


def test_other_weights_raise(tmp_path):
    with pytest.raises(CheckpointError, match="missing"):
        from_silif({"snn.0.dt": np.zeros(4)})
    (tmp_path / "weights.npz").write_bytes(b"PK no archive")
    with pytest.raises(CheckpointError, match=r"is not an \.npz file"):
        from_silif(tmp_path / "weights.npz")
