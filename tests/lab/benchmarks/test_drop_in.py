"""The study that puts `ADPTNet(width)` in the place of `nn.GRU`: its readers, and a run at smoke size."""

import gzip
import json

import numpy as np
import pytest
import torch

from adptnet import ADPTNet
from adptnet.errors import DataError
from adptnet_lab.benchmarks.studies import drop_in

SERIES = "@problemName tiny\n@data\n1,2,3:0,0,0:a\n4,5:1,1:b\n\n"


@pytest.fixture(autouse=True)
def in_float32():
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def series(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    for part in ("TRAIN", "TEST"):
        (folder / f"tiny_{part}.ts").write_text(SERIES)
    return folder


def test_series_are_extended_by_their_last_value_and_standardized(series):
    data = drop_in.read_data(series)
    assert data.x_train.shape == (2, 3, 2)
    assert data.y_train.tolist() == data.y_test.tolist() == [0, 1]
    values = np.array([1, 2, 3, 4, 5, 5.0])
    assert np.allclose(data.x_train[:, :, 0].flatten(), (values - values.mean()) / values.std(), atol=1e-6)
    assert torch.equal(data.x_test, data.x_train)


def test_images_are_read_row_by_row(tmp_path):
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    for part in ("train", "t10k"):
        header = bytes([0, 0, 8, 3]) + np.array(images.shape, ">i4").tobytes()
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        labels = bytes([0, 0, 8, 1]) + np.array([2], ">i4").tobytes() + bytes([1, 0])
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    data = drop_in.read_data(tmp_path)
    assert np.allclose(data.x_train, (images - images.mean()) / images.std(), atol=1e-6)
    assert data.y_train.tolist() == [1, 0]


def test_a_folder_without_data_is_named(tmp_path):
    with pytest.raises(DataError, match="neither"):
        drop_in.read_data(tmp_path)
    (tmp_path / "x_TRAIN.ts").write_text("no data")
    with pytest.raises(DataError, match="@data"):
        drop_in.read_data(tmp_path)


def test_runs_are_repeatable_and_are_not_run_twice(series, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    arguments = ["--data", f"tiny={series}", "--rate", "1e-3", "--seed", "0", "1", "--steps", "2", "--rows", str(rows)]
    drop_in.main(arguments)
    first = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["layer"], row["seed"]) for row in first] == [
        (layer, seed) for layer in drop_in.LAYERS for seed in (0, 1)
    ]
    assert f"| GRU | {first[2]['parameters']:,} |" in capsys.readouterr().out
    again = drop_in.run(drop_in.read_data(series), "ADPTNet", 1e-3, 0, 2)
    assert again["accuracy"] == first[0]["accuracy"]
    drop_in.main(arguments)
    assert len(rows.read_text().splitlines()) == len(first)


def test_outputs_of_the_default_layer_are_of_order_one():
    for width, steps in ((32, 10), (64, 300), (256, 40)):
        torch.manual_seed(0)
        with torch.no_grad():
            assert 0.2 < ADPTNet(width)(torch.randn(8, steps, width))[0].std() < 2
