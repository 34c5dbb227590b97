"""Files of `torch.save`: tensors come out, nothing else is let in."""

import collections
import os
import zipfile

import ml_dtypes
import numpy as np
import pytest

from fwpkm_jax.interchange.torch_file import Unread, read_torch_file
from tests.interchange.torch_writer import Tensor, whole, write_torch_file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pytorch_model.bin"


def test_tensors_come_out_as_they_were(path):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(3, 4)).astype(np.float32)
    flat = table.reshape(-1)
    half = rng.normal(size=5).astype(ml_dtypes.bfloat16)
    content = collections.OrderedDict(
        whole=Tensor(flat, 0, (3, 4), (4, 1)),
        transposed=Tensor(flat, 0, (4, 3), (1, 4)),
        view=Tensor(flat, 4, (2, 2), (4, 2)),
        half=whole(half),
        ids=whole(np.arange(3)),
        parameter=whole(np.ones((2, 2), np.float32), parameter=True),
        empty=whole(np.zeros((0, 4), np.float32)),
    )
    write_torch_file(path, {"module": content, "lr": 0.5, "layers": [1, (2,)]})
    read = read_torch_file(path)
    assert (read["lr"], read["layers"]) == (0.5, [1, (2,)])
    expected = {
        "whole": table, "transposed": table.T, "view": table[1:, ::2], "half": half,
        "ids": np.arange(3), "parameter": np.ones((2, 2), np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }  # fmt: skip
    assert list(read["module"]) == list(expected)
    for name, array in expected.items():
        assert read["module"][name].dtype == array.dtype, name
        np.testing.assert_array_equal(read["module"][name], array)


def test_a_name_that_is_no_tensor_is_refused_and_not_called(path, tmp_path):
    class Command:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "called"),)

    write_torch_file(path, {"weight": Command()})
    with pytest.raises(ValueError, match=r"holds a \w+\.mkdir, which is not a tensor"):
        read_torch_file(path)
    write_torch_file(path, {"weight": whole(np.ones(2, np.float32)), "more": [Command(), {1}]})
    read = read_torch_file(path, others="skip")
    np.testing.assert_array_equal(read["weight"], np.ones(2))
    assert [type(x) for x in read["more"]] == [Unread, Unread]
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Tensor(np.zeros(4, np.float32), 0, (3, 2), (2, 1)), "more numbers than its storage"),
        (Tensor(np.zeros(4, np.float32), 1, (2, 2), (2, 1)), "reaches beyond its storage"),
        (Tensor(np.zeros(4, np.float32), 2, (2,), (-1,)), "negative"),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(path, tensor, message):
    write_torch_file(path, {"weight": tensor})
    with pytest.raises(ValueError, match=message):
        read_torch_file(path)


def test_a_damaged_file_is_refused(path):
    write_torch_file(path, {"weight": whole(np.ones(1000, np.float32))})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # Inside the tensor's numbers.
    path.write_bytes(data)
    with pytest.raises(ValueError, match="CRC"):
        read_torch_file(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="is not a zip archive"):
        read_torch_file(path)


def test_a_compressed_archive_and_one_of_another_kind_are_refused(path):
    write_torch_file(path, {"weight": whole(np.ones(1000, np.float32))}, compress=True)
    with pytest.raises(ValueError, match="is compressed"):
        read_torch_file(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights.npy", b"")
    with pytest.raises(ValueError, match=r"0 entries data\.pkl"):
        read_torch_file(path)
